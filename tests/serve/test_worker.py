"""Whoever waits for an answer is told how it ended, whatever goes wrong; models that are loaded are never lost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest
from serving import ignore, open_engine, served, until

from kvcli import startup
from kvcli.errors import KVError
from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.prompt import Prompt
from kvcli.serve import host as hostfile
from kvcli.serve import wire
from kvcli.serve import worker as workerfile
from kvcli.serve.app import Guard, application
from kvcli.serve.host import EngineReply, Host, Known, Served
from kvcli.serve.worker import Busy, Stopped, Work, Worker


class Asked:
    """Two answers to one prompt, and how each ends."""

    def __init__(self, worker: Worker, prompt: str = "Hello", most: int = 4) -> None:
        self.ends: Queue[tuple[int, Any]] = Queue()
        options = worker.settled(SampleOptions(temperature=0.0, max_tokens=most, ignore_eos=True), 2)
        ids = worker.engine.loaded.text.tokenizer.encode(prompt)
        self.work = Work(Prompt(ids), options, self._deliver)
        worker.submit(self.work)

    def _deliver(self, number: int, event: Any) -> None:
        if isinstance(event, (End, KVError)):
            self.ends.put((number, event))

    def told(self) -> dict[int, Any]:
        return dict(self.ends.get(timeout=60) for _ in range(2))


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = served(open_engine()).worker
    yield found
    found.stop(0.0)


def test_what_cannot_begin_is_told_and_others_go_on(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> Any:
        raise ValueError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(worker.engine, "request", fails)
        told = Asked(worker).told()
    assert set(told) == {0, 1} and all("no such thing" in str(each) for each in told.values())
    assert all(isinstance(each, End) for each in Asked(worker).told().values())


def test_a_step_that_fails_is_told_to_answers_that_have_just_ended(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = worker._scheduler.step

    def fails() -> Any:
        found = step()
        if any(request.finished for request, _ in found):
            raise ValueError("too late")
        return found

    monkeypatch.setattr(worker._scheduler, "step", fails)
    worker._scheduler.preemptions = 3
    told = Asked(worker).told()
    assert all(isinstance(each, Stopped) for each in told.values())
    assert all(isinstance(each, End) for each in Asked(worker).told().values())
    assert worker.facts()["preemptions_total"] == 3
    assert worker.retire()


def test_what_waits_at_a_stop_is_told(worker: Worker) -> None:
    first, waiting = Asked(worker, most=400), [Asked(worker) for _ in range(4)]
    assert not worker.retire()
    worker.stop(0.0)
    for asked in (first, *waiting):
        assert set(asked.told()) == {0, 1}
    with pytest.raises(Stopped):
        Asked(worker)


def test_a_stream_that_nobody_begins_to_read_ends_its_answer() -> None:
    begun = served(open_engine(ctx_size=4096))

    async def disconnected() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()  # nobody gets it

    async def check() -> None:
        options = begun.worker.settled(SampleOptions(temperature=0.0, ignore_eos=True))
        reply = EngineReply(begun, Prompt(begun.text.tokenizer.encode("Hello")), options)
        sent = wire.pieces(reply, "", lambda number, event: "", str, "")
        await wire.Stream(sent, reply, str)({"type": "http", "app": application(Mock(), Guard())}, disconnected, send)
        with suppress(Stopped):  # it may not even have begun
            assert (await reply.whole())[0].end.finish_reason == "interrupted"

    asyncio.run(check())
    begun.worker.stop(0.0)


@pytest.mark.parametrize("turns", range(12))
def test_a_stream_is_told_of_the_end_whatever_it_does_just_then(turns: int) -> None:
    """`asyncio.wait_for` of Python 3.11 and before loses a cancellation that comes when what it waits for is done."""
    sent: list[Any] = []

    async def endless() -> AsyncIterator[str]:
        while True:
            await asyncio.sleep(0)
            yield "more"

    async def connected() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)
        if turns % 2:
            await asyncio.sleep(0)

    async def check() -> None:
        app = application(Mock(), Guard())
        reply = Mock(__aenter__=AsyncMock(), __aexit__=AsyncMock(return_value=False))
        streaming = asyncio.ensure_future(
            wire.Stream(endless(), reply, lambda failure: failure.message)(
                {"type": "http", "app": app}, connected, send
            )
        )
        for _ in range(20 + turns):
            await asyncio.sleep(0)
        app.state.over.set()
        _, pending = await asyncio.wait({streaming}, timeout=10)
        assert not pending

    asyncio.run(check())
    assert sent[-1]["body"] == b"the server is stopping" and not sent[-1]["more_body"]
    assert sent[0]["type"] == "http.response.start" and sent[1]["body"] == b"more"


def test_a_model_whose_call_goes_away_while_it_is_loaded_is_kept() -> None:
    first, may, begun = served(open_engine()), threading.Event(), threading.Event()

    def load(name: str) -> Served:
        begun.set()
        assert may.wait(60)
        return Served(name, served(open_engine("qwen2")).worker)

    async def check() -> None:
        host = Host(first, load, lambda: [Known("second")], 2)
        call = asyncio.ensure_future(host.served("second"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        may.set()
        assert (await host.served("second")) in host.loaded and len(host.loaded) == 2
        host.stop(0.0)

    asyncio.run(check())


def test_a_model_is_not_loaded_beside_one_that_still_ends() -> None:
    """The memory of that one may be what it needs; and a server that ends waits for its caches."""
    gate, ended, begun = threading.Event(), threading.Event(), threading.Event()

    def stop(seconds: float) -> None:
        begun.set()
        assert gate.wait(60)
        ended.set()

    first = Served("tiny", Mock(stop=stop, retire=lambda: True))

    def load(name: str) -> Served:
        assert ended.is_set()
        return Served(name, cast(Worker, SimpleNamespace(stop=lambda seconds: None)))

    async def check() -> None:
        host = Host(first, load, lambda: [Known("second")], 2)
        await host.unload("tiny")
        assert host.loaded == []
        call = asyncio.ensure_future(host.served("second"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        assert not call.done()
        gate.set()
        assert (await call).name == "second"
        gate.clear(), ended.clear()
        host.loaded.append(first)
        await host.unload("tiny")
        threading.Timer(0.1, gate.set).start()
        host.stop(0.0)
        assert ended.is_set()

    asyncio.run(check())


@pytest.mark.parametrize("how", ["unloaded", "makes room", "as an answer ends"])
def test_a_model_that_is_let_go_of_takes_no_memory(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no garbage is sought among what was loaded."""
    monkeypatch.setattr(startup, "_alone", object())
    monkeypatch.setattr(hostfile, "LET_GO_S", 60.0)
    with startup.uncollected():
        models = [served(open_engine())]
    gone = weakref.ref(models[0].worker.engine.loaded)

    async def check() -> None:
        host = Host(models.pop(), lambda name: served(open_engine("qwen2")), lambda: [Known("second")], 1)
        if how == "unloaded":
            await host.unload(host.loaded[0].name)
        elif how == "makes room":
            await host.served("second")
        else:
            prompt, options = Prompt(host.loaded[0].text.tokenizer.encode("Hello")), SampleOptions(max_tokens=1)
            async with EngineReply(host.loaded[0], prompt, host.loaded[0].worker.settled(options)) as reply:
                await reply.whole()
                await host.unload(reply.served.name)
            del reply
        while gone() is not None:
            await asyncio.sleep(0.01)
        await asyncio.get_running_loop().run_in_executor(None, host.stop, 0.0)

    gc.disable()
    try:
        asyncio.run(asyncio.wait_for(check(), 60))
    finally:
        gc.enable()


def test_a_load_does_not_hold_up_the_end() -> None:
    first, gate, begun = served(open_engine()), threading.Event(), threading.Event()

    def load(name: str) -> Served:
        begun.set()
        gate.wait(60)
        return first

    async def check() -> None:
        host = Host(first, load, lambda: [Known("second")], 2)
        call = asyncio.ensure_future(host.served("second"))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        host.stop(0.0)

    began = time.monotonic()
    asyncio.run(check())
    assert time.monotonic() - began < 30
    gate.set()


def test_a_step_that_takes_long_does_not_hold_up_the_end(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate, begun, step = threading.Event(), threading.Event(), worker._scheduler.step
    monkeypatch.setattr(workerfile, "STEP_S", 0.05)
    monkeypatch.setattr(worker._scheduler, "step", lambda: (begun.set(), gate.wait(60), step())[2])
    asked = Asked(worker)
    assert begun.wait(60)
    worker.stop(0.0)
    assert "a step takes long" in caplog.text and asked.ends.empty()
    gate.set()
    assert set(asked.told()) == {0, 1}
    worker.stop(0.0)
    assert caplog.text.count("takes long") == 1


def test_a_stop_waits_for_a_step_behind_which_a_prompt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(workerfile, "STEP_S", 0.05)
    worker = served(open_engine(ubatch=64), store=tmp_path / "prompts", min_tokens=8).worker
    gate, begun, step = threading.Event(), threading.Event(), worker.engine.step

    def third(running: Any) -> Any:
        if running[0].seq.length == 128:
            begun.set()
            assert gate.wait(60)
        return step(running)

    monkeypatch.setattr(worker.engine, "step", third)
    asked = Asked(worker, "many words " * 40)
    assert begun.wait(60)
    stop = threading.Thread(target=worker.stop, args=(0.0,))
    stop.start()
    until(lambda: "waiting 30 s at most for prompts to be kept" in caplog.text)
    gate.set()
    stop.join()
    assert "takes long" not in caplog.text and set(asked.told()) == {0, 1}
    caches = worker.engine.prompt_caches(
        PromptCacheOptions(store=tmp_path / "prompts", min_tokens=8), Tell(ignore, ignore, ignore)
    )
    with closing(caches), closing(worker.engine.new_sequence()) as seq:
        assert caches.find(seq, list(asked.work.prompt.ids)) == 128


def test_models_are_stopped_together() -> None:
    """Each waits for the other."""
    both = threading.Barrier(2, timeout=60)
    first, second = (cast(Worker, Mock(stop=Mock(side_effect=lambda seconds: both.wait()))) for _ in range(2))
    host = Host(Served("tiny", first), Mock(), list, 2)
    host.loaded.append(Served("other", second))
    host.stop(0.5)
    for each in (first, second):
        each.stop.assert_called_once_with(0.5)  # type: ignore[attr-defined]
    assert not both.broken


def test_texts_at_work_do_not_hold_up_the_end() -> None:
    gate, nobody = threading.Event(), cast(Worker, SimpleNamespace(stop=lambda seconds: None))
    host = Host(Served("tiny", nobody), Mock(), list, 1)
    at_work = [host._slow_texts.submit(gate.wait, 10.0) for _ in range(3)]
    host.stop(0.0)
    assert not at_work[0].done() and at_work[2].cancelled()
    gate.set()


def test_what_waits_too_long_for_slow_schemas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a queue of slow ones holds nobody up for longer than they may."""
    first, gate = served(open_engine()), threading.Event()
    host = Host(first, lambda name: first, lambda: [], 1)

    async def check() -> None:
        at_work = [asyncio.ensure_future(host.beside(lambda: gate.wait(30.0), True)) for _ in range(2)]
        await asyncio.sleep(0)
        monkeypatch.setattr(hostfile, "PATIENCE_S", 0.0)
        late = asyncio.ensure_future(host.beside(lambda: "late", True))
        assert await host.beside(lambda: "quick") == "quick"
        gate.set()
        assert all(await asyncio.gather(*at_work))
        with pytest.raises(Busy, match="wait for each other"):
            await late

    asyncio.run(check())
    host.stop(0.0)
