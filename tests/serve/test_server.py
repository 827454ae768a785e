"""What holds for every interface: load, order, limits, clients that go away, who may call, models on demand."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import pytest
from serving import Server, alone, open_engine, running, until
from starlette.responses import Response, StreamingResponse

from kvcli.errors import UsageError
from kvcli.options import AttendOptions, SampleOptions
from kvcli.serve import native, wire
from kvcli.serve import server as serverfile
from kvcli.serve.app import Guard, application

TEXTS = [f"{word} and {number}" for number, word in enumerate(["red", "green", "blue", "long " * 40] * 4)]


def test_answers_under_load_are_those_of_single_runs(server: Server) -> None:
    options = SampleOptions(temperature=0.8, seed=3, max_tokens=12)
    wanted = [alone(server.engine, text, options)[0] for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        found = list(pool.map(lambda text: server.chat(text, temperature=0.8, seed=3)["message"]["content"], TEXTS))
    assert found == wanted


def test_rows_of_tokens_that_chose_pages_are_nobody_elses() -> None:
    """What a call finds of an earlier one changes no answer."""
    with running(open_engine(page_size=16, attend=AttendOptions(1))) as server:
        wanted = [alone(server.engine, text, SampleOptions(temperature=0.0, max_tokens=12))[0] for text in TEXTS[3:8]]
        for _ in range(2):
            assert [server.chat(text)["message"]["content"] for text in TEXTS[3:8]] == wanted


def test_a_client_that_goes_away_ends_its_answer() -> None:
    with running(open_engine(ctx_size=4096), parallel=1) as server:
        asked = {"messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=asked, trust_env=False) as stream:
            lines = stream.iter_lines()  # without a reference the stream is closed
            next(lines)
            assert server.get("/slots").json()["slots"][0]["state"] == "decode"
        until(lambda: server.host.loaded[0].worker.idle)
        with pytest.raises(httpx.TimeoutException):
            httpx.post(
                server.url + "/v1/chat/completions", json={**asked, "stream": False}, timeout=0.3, trust_env=False
            )
        until(lambda: server.host.loaded[0].worker.idle)
        assert server.chat("x")["finish_reason"] == "length"


def test_too_many_calls_are_refused_and_the_others_answered() -> None:
    with running(open_engine(ctx_size=2048, parallel=1), parallel=1, queue=1) as server:
        asked = {"messages": [{"role": "user", "content": "x"}], "ignore_eos": True, "max_tokens": 300}
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda _: server.post("/v1/chat/completions", asked), range(6)))
        codes = sorted(each.status_code for each in found)
        assert set(codes) == {200, 429} and codes.count(200) >= 2
        refused = next(each for each in found if each.status_code == 429)
        assert refused.headers["retry-after"] and "wait" in refused.json()["error"]["message"]
        assert re.search(r"kv_refused_total\{.*\} [1-9]", server.get("/metrics").text)


def test_who_may_call() -> None:
    with running(guard=Guard("secret", ("https://a.org",), frozenset({"127.0.0.1"}), 2000)) as server:
        assert server.get("/health").json() == {"status": "ok"} and server.get("/").status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
            assert server.get("/v1/models", headers=headers).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert server.get("/v1/models", headers=key).status_code == 200
        assert server.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
        assert server.get("/v1/models", headers={**key, "host": "evil.org"}).status_code == 403
        assert server.get("/v1/models", headers={**key, "origin": "https://evil.org"}).status_code == 403
        allowed = server.get("/v1/models", headers={**key, "origin": "https://a.org"})
        assert allowed.headers["access-control-allow-origin"] == "https://a.org"
        asks = {"origin": "https://a.org", "access-control-request-method": "POST"}
        assert httpx.options(server.url + "/v1/models", headers=asks, trust_env=False).status_code == 204
        own = server.get("/v1/models", headers={**key, "origin": server.url})
        assert own.status_code == 200
        long = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3000}]}, headers=key)
        assert long.status_code == 413
        pieces = (b"x" * 500 for _ in range(20))
        assert httpx.post(server.url + "/tokenize", content=pieces, headers=key, trust_env=False).status_code == 413


def test_calls_that_do_not_begin_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverfile, "HEADERS_S", 0.2)
    with running() as server:
        for head in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
            with socket.create_connection(server.address, timeout=10) as slow:
                slow.sendall(head)
                assert slow.recv(100) == b""
        assert server.get("/health").status_code == 200


HOSTILE = [
    b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"messages":' + b"[" * 50_000, b'{"a":1e999999}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": 1e400}', b"0" * 10_000,
    b'{"messages": [{"role": null, "content": []}]}', b'{"messages": [{"role": "user", "content": null}], "n": -1}',
    b'{"prompt": [1e9]}', b'{"prompt": [99999999]}', b'{"prompt": [[]]}', b'{"prompt": ["a", 1]}', b'{"input": [{}]}',
    b'{"content": 1}', b'{"tokens": [-1]}',
    b'{"messages":[{"role":"user","content":"a"}],"max_tokens":99999999999999999999}',
    b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    b'{"messages":[{"role":"\\u0000","content":"a"}],"seed":-5}',
    json.dumps({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": 3}}).encode(),
    json.dumps({"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "json_schema"}}).encode(),
]  # fmt: skip


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/tokenize"),
        *(
            pytest.param(path, marks=pytest.mark.thorough)
            for path in (
                *("/v1/embeddings", "/v1/messages/count_tokens", "/api/generate", "/api/show", "/detokenize"),
                "/nowhere",
            )
        ),
    ],
)
def test_hostile_bodies_get_a_clear_word_and_disturb_nobody(server: Server, path: str) -> None:
    for body in HOSTILE:
        found = server.post(path, body)
        assert found.status_code in (200, 400, 404, 501), (body[:80], found.text)
        if found.status_code != 200:
            assert "error" in found.json() and "Traceback" not in found.text and len(found.text) < 1500
    assert server.chat("Hello")["finish_reason"] == "length"


def test_models_are_loaded_on_demand_and_make_room() -> None:
    others = {"tiny": open_engine, "second": lambda: open_engine("qwen2"), "third": lambda: open_engine("gemma3")}
    with running(most=2, others=others) as server:
        names = [each["id"] for each in server.get("/v1/models").json()["data"]]
        assert names == ["tiny", "second", "third"]
        own = server.chat("Hi", max_tokens=4)["message"]["content"]

        def loaded() -> list[str]:
            return [each["model"] for each in server.get("/api/ps").json()["models"]]

        def ask(name: str) -> str:
            asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
            return (
                server.post("/v1/chat/completions", asked).raise_for_status().json()["choices"][0]["message"]["content"]
            )

        first = ask("second")
        assert loaded() == ["tiny", "second"] and ask("second") == first
        server.chat("keeps this one young")
        ask("third")
        assert loaded() == ["tiny", "third"]
        with ThreadPoolExecutor(4) as pool:  # two models that must make room for each other
            assert set(pool.map(ask, ["second", "second", "second", "second"])) == {first}
        ask("third")
        assert "tiny" not in loaded() and ask("") == ask("alias") == own  # the first one, which is loaded again


def test_two_models_answer_at_the_same_time() -> None:
    with running(most=2, others={"second": lambda: open_engine("qwen2")}) as server:

        def ask(name: str) -> str:
            asked = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0}
            found = server.post("/v1/chat/completions", {**asked, "ignore_eos": True}).raise_for_status().json()
            return found["choices"][0]["message"]["content"]

        wanted = {name: ask(name) for name in ("tiny", "second")}
        names = ["tiny", "second"] * 8
        with ThreadPoolExecutor(len(names)) as pool:
            assert list(pool.map(ask, names)) == [wanted[name] for name in names]


def test_tokenize_and_back(server: Server) -> None:
    found = server.post("/tokenize", {"content": "Hello there", "with_pieces": True}).json()["tokens"]
    assert "".join(each["piece"] for each in found) == "Hello there"
    ids = [each["id"] for each in found]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"content": "Hello there"}


def test_a_stop_lets_answers_end(tmp_path: Path) -> None:
    text: list[str] = []
    with running(open_engine(ctx_size=2048)) as server:
        thread = threading.Thread(
            target=lambda: text.append(server.chat("x", max_tokens=200, ignore_eos=True)["message"]["content"])
        )
        thread.start()
        until(lambda: bool(server.get("/slots").json()["slots"]))
    thread.join()
    assert text and text[0]


def _event(text: str) -> Any:
    """What the last line that says something says."""
    return json.loads(text.strip().splitlines()[-1].removeprefix("data: "))


def test_a_stop_tells_those_whose_answers_it_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serverfile, "GRACE_S", 0.2)
    engine, told = open_engine(ctx_size=4096, parallel=6), "the server is stopping"
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda running: (time.sleep(0.01), step(running))[1])
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4000, "model": "tiny", "stream": True}
    text = {"prompt": "x", "max_tokens": 4000}
    calls = [
        ("/v1/chat/completions", messages),
        ("/v1/completions", text | {"stream": True}),
        ("/v1/completions", text),
        ("/v1/messages", messages),
        ("/api/generate", {"prompt": "x"}),
        ("/v1/responses", {"input": "x", "stream": True}),
    ]
    endless = SampleOptions(ignore_eos=True)
    with running(engine, parallel=6, sampling=endless) as server, ThreadPoolExecutor(len(calls)) as pool:
        found = [pool.submit(server.post, path, body) for path, body in calls]
        until(lambda: len(server.get("/slots").json()["slots"]) == len(calls))
        server.stopping.set()
        chat, streamed, whole, claude, line, response = (each.result() for each in found)
    for each in (chat, streamed):
        assert each.status_code == 200 and "[DONE]" not in each.text and _event(each.text)["error"]["message"] == told
    assert whole.status_code == 503 and whole.json()["error"]["message"] == told
    for each in (claude, response):
        assert each.text.strip().splitlines()[-2] == "event: error" and told in str(_event(each.text))
    assert _event(line.text) == {"error": told}


def test_a_stop_tells_those_whose_calls_have_not_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serverfile, "GRACE_S", 0.2)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    with running() as server, socket.create_connection(server.address) as client:
        client.sendall(head)
        server.get("/health")
        server.stopping.set()
        told = client.makefile("rb").read()
    assert told.startswith(b"HTTP/1.1 503 ") and b"the server is stopping" in told
    assert [each for each in caplog.records if each.exc_info] == []


def _served(handler: Any, stopping: threading.Event) -> bytes:
    """What a client gets of a call that this answers, until the server has ended. It reads nothing before."""
    listening = serverfile.bound("127.0.0.1", 0)
    app = application(None, Guard(), (((("GET", "/", handler),), native.failure),))
    with socket.create_connection(listening.getsockname()) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        serverfile.run(app, listening, stopping.is_set)
        return client.makefile("rb").read()


def test_who_is_told_is_waited_for_after_a_suspension(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All times that began before are over then."""
    monkeypatch.setattr(serverfile, "TELL_S", 60.0)
    stopping = threading.Event()

    async def suspended() -> Response:
        stopping.set()
        while "stopping: answers to 1 call" not in caplog.text:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 3600)
        await asyncio.sleep(7200)
        raise AssertionError

    told = _served(lambda request, *_: wire.while_connected(request, suspended()), stopping)
    assert told.startswith(b"HTTP/1.1 503 ") and b"the server is stopping" in told
    assert [each for each in caplog.records if each.exc_info] == []


@pytest.mark.parametrize("streams", [False, True])
def test_who_cannot_be_told_is_left(
    streams: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serverfile, "GRACE_S", 0.1)
    monkeypatch.setattr(serverfile, "TELL_S", 0.1)
    stopping = threading.Event()

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * (1 << 20)
            stopping.set()
            await asyncio.sleep(0)

    async def answer(*_: Any) -> Response:
        if streams:
            return StreamingResponse(endless())
        stopping.set()
        await asyncio.sleep(3600)
        raise AssertionError

    with suppress(ConnectionResetError):
        _served(answer, stopping)
    assert [each for each in caplog.records if each.exc_info] == []


def test_who_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(serverfile, "SLOW_S", 0.2)
    stopping = threading.Event()
    reply = Mock(__aenter__=AsyncMock(), __aexit__=AsyncMock(side_effect=lambda *_: stopping.set()))

    async def endless() -> AsyncIterator[str]:
        while True:
            yield "x" * (1 << 20)
            await asyncio.sleep(0)

    async def answer(*_: Any) -> Response:
        return wire.Stream(endless(), reply, str)

    with suppress(ConnectionResetError):
        _served(answer, stopping)
    assert caplog.text.count("a client read nothing for 0 s: its connection is closed") == 1
    assert "ASGI" not in caplog.text and [each for each in caplog.records if each.exc_info] == []


def test_an_empty_input_is_refused_by_its_name(server: Server) -> None:
    for nothing in ("", []):
        refused = server.post("/v1/responses", {"input": nothing})
        assert refused.status_code == 400 and "'input' is empty" in refused.json()["error"]["message"]


def test_sockets(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no path"):
        serverfile.bound("unix:", 0)
    path = tmp_path / "kv.sock"
    with serverfile.bound(f"unix:{path}", 0):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UsageError, match="cannot listen"):
            serverfile.bound(f"unix:{path}", 0)
    serverfile.bound(f"unix:{path}", 0).close()  # nobody listens to it any more
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UsageError, match="cannot listen"):
        serverfile.bound(f"unix:{tmp_path / 'file'}", 0)
    assert (tmp_path / "file").read_text() == "kept"
    with serverfile.bound("127.0.0.1", 0) as taken, pytest.raises(UsageError, match="address already in use"):
        serverfile.bound("127.0.0.1", taken.getsockname()[1])
