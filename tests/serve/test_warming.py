"""A server on a GPU makes itself ready where nobody asks, and gives way to those who do."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest
import torch
from serving import ignore, open_engine

from kvcli.errors import KVError
from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.cache.sequence import Part, Step
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.prompt import Prompt
from kvcli.runtime.host.memory import CUDA
from kvcli.serve import warming
from kvcli.serve.warming import Warming
from kvcli.serve.worker import Work, Worker


class OneByOne:
    """What computes answers together, and leaves all to others; `seen`: how many there were at a time."""

    reason = ""

    def __init__(self) -> None:
        self.seen = Counter[int]()

    def step(self, work: Any) -> Any:
        self.seen[len([1 for request, _ in work if request.answering])] += 1
        return work


class Graphs:
    """What reads prompts together: `seen`: of how many sequences."""

    joins, sizes = True, (16, 32)

    def __init__(self, engine: Engine) -> None:
        self.engine, self.joined, self.seen = engine, set[tuple[int, int]](), list[int]()

    def run(self, part: Part) -> None:
        return None

    def together(self, parts: tuple[Part, ...]) -> torch.Tensor:
        self.seen.append(len(parts))
        return self.engine.model.hidden(Step(parts))


def as_if_on_a_gpu(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> OneByOne:
    engine.device, engine.batches = replace(engine.device, kind=CUDA), OneByOne()  # type: ignore[assignment]
    monkeypatch.setattr(engine, "synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.set_device", ignore)
    engine.steps = Graphs(engine)  # type: ignore[assignment]
    return engine.batches  # type: ignore[return-value]


def test_every_number_of_answers_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = open_engine(), list[str]()
    assert Warming(engine, 6).over
    batches = as_if_on_a_gpu(engine, monkeypatch)
    found = Warming(engine, 6, Tell(ignore, ignore, told.append))
    rows = Counter[int]()
    while not found.over:
        found.step()
        rows[sum(request.n_prompt for request in found._requests)] += 1
        if len(told) == 0 and found._requests and rows.total() == 9:
            found.put_off()
            engine.pool.check([])
    assert {1, 2, 4, 6} <= set(batches.seen) and {16, 32, 4, 8, 12} <= set(rows)
    graphs: Any = engine.steps
    assert graphs.joined == {(16, 2), (16, 4), (32, 2), (32, 4)} and graphs.seen == [4, 4, 2, 2]
    assert len(told) == 1 and told[0].startswith("ready for 6 answers at a time")
    engine.pool.check([])


@pytest.mark.parametrize("fails", [KVError("no room"), RuntimeError("out of memory")])
def test_what_cannot_be_made_ready_is_left(fails: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine()
    as_if_on_a_gpu(engine, monkeypatch)
    found = Warming(engine, 4)
    found.step()

    def fail(requests: Any) -> None:
        raise fails

    graphs: Any = engine.steps
    found._rounds = deque([(16, 4)])
    found.put_off()
    found.step()
    assert graphs.joined == {(16, 4)}
    monkeypatch.setattr(engine, "step", fail)
    found.step()
    assert found.over and not graphs.joined
    engine.pool.check([])


def test_no_round_is_begun_too_late_and_one_that_was_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine()
    as_if_on_a_gpu(engine, monkeypatch)
    monkeypatch.setattr(warming, "MOST_S", -1.0)
    found, graphs = Warming(engine, 4), engine.steps
    found._rounds = deque([(16, 4), (32, 4)])
    for _ in range(20):
        if not found.over:
            found.step()
    assert found.over and isinstance(graphs, Graphs)
    assert graphs.joined == {(16, 4)} and graphs.seen == [4]  # what is joined has its graph
    engine.pool.check([])


def test_whoever_asks_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the answer that there is without."""
    ends, ids = list[list[int]](), list(range(5, 25))
    for gpu in (False, True):
        engine, answers = open_engine(), Queue[Any]()
        if gpu:
            as_if_on_a_gpu(engine, monkeypatch)
        caches = engine.prompt_caches(PromptCacheOptions(memory=True), Tell(ignore, ignore, ignore))
        worker = Worker(engine, caches, 4, 4)
        options = worker.settled(SampleOptions(temperature=0.0, max_tokens=6, ignore_eos=True))
        assert worker._warming.due_s == (0 if gpu else None)
        if gpu:
            worker._warming.step()
            worker._warming.put_off()
            assert 0 < worker._warming.due_s <= warming.QUIET_S
        work = Work(Prompt(ids), options, lambda number, event, to=answers: to.put(event))
        worker.submit(work)
        worker.start()
        while not isinstance(event := answers.get(timeout=60), End):
            assert not isinstance(event, KVError)
        ends.append(event.ids)
        end = time.monotonic() + 60
        while not worker._warming.over and time.monotonic() < end:
            time.sleep(0.01)
        assert worker._warming.over and worker.counts.requests == 1
        worker.stop(5.0)
    assert ends[0] == ends[1] and len(ends[0]) == 6
