"""Several answers to one prompt: it is read once, they are decoded together, and shown one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcli.cli.answer import Job, result_of
from kvcli.cli.interrupt import FINISH
from kvcli.cli.outcome import MemoryFacts, Result
from kvcli.cli.report import prompt_stats
from kvcli.cli.sinks import Sink
from kvcli.errors import OutputError
from kvcli.runtime.engine.events import End, Event, Prefill, Token

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.request import Request


class InTurn:
    """What several answers write to a sink: that of a later one waits until those before it have ended."""

    def __init__(self, sink: Sink, count: int) -> None:
        self.sink, self.count = sink, count
        self._waiting: list[list[Callable[[], None]]] = [[] for _ in range(count)]
        self._ended = [False] * count
        self._at = 0
        sink.sample(1, count)

    def write(self, number: int, what: Callable[[], None], last: bool = False) -> None:
        """Have answer `number`, from 0, written to; `last`: it has ended."""
        self._waiting[number].append(what)
        self._ended[number] = last
        while self._at < self.count:
            waiting, self._waiting[self._at] = self._waiting[self._at], []
            for each in waiting:
                each()
            if not self._ended[self._at]:
                return
            self._at += 1
            if self._at < self.count:
                self.sink.sample(self._at + 1, self.count)


class _Sample:
    """One of the answers, as its events come."""

    def __init__(self, number: int, job: Job, turns: InTurn, request: Request) -> None:
        self.number, self.job, self.turns, self.request = number, job, turns, request
        self.parts: list[Token] = []
        self.result: Result | None = None
        self._write(lambda sink: sink.start(job.model, job.sampling))

    def _write(self, what: Callable[[Sink], None], last: bool = False) -> None:
        self.turns.write(self.number, lambda: what(self.turns.sink), last)

    def take(self, event: Event, engine: Engine, predicted: Callable[[], int]) -> None:
        """Show the event. The last one frees the sequence; `predicted()`: what the plan says of all answers by then."""
        if isinstance(event, Prefill):
            self._write(lambda sink: sink.prefill(event))
        elif isinstance(event, Token):
            self.job.interrupts.stage = FINISH
            self.parts.append(event)
            self._write(lambda sink: sink.token(event))
        else:
            self._end(event, engine, predicted)

    def _end(self, end: End, engine: Engine, predicted: Callable[[], int]) -> None:
        memory = MemoryFacts(predicted(), engine.plan.total)
        self.result = result = result_of(engine, self.request.seq, self.job, self.parts, end, memory)
        self.request.seq.close()
        self._write(lambda sink: sink.end(result), last=True)


def answers(engine: Engine, ids: list[int], job: Job, count: int) -> list[Result]:
    """`count` answers to the prompt `ids`; an interrupt ends all of them. Raises ContextOverflow, DoesNotFit."""
    from kvcli.runtime.engine.scheduler import Scheduler

    jobs = [replace(job, sampling=replace(job.sampling, sequence=number)) for number in range(count)]
    requests: list[Request] = []
    for each in reversed(jobs):  # the first one reads the prompt for those that exist already
        seq, cancelled = engine.new_sequence(), job.interrupts.cancelled
        twins = requests if each is jobs[0] else ()
        how = each.sampling, cancelled, False, twins, job.caches, job.thinking, job.marks, job.tools
        requests = [engine.request(seq, ids, *how), *requests]

    def predicted() -> int:
        longest = max(len(each.history) for each in requests)
        return engine.predict(longest, count, len(ids)).total

    turns, scheduler = InTurn(job.sink, count), Scheduler(engine, count)
    samples = {id(r): _Sample(n, jobs[n], turns, r) for n, r in enumerate(requests)}
    for request in requests:
        scheduler.submit(request)
    try:
        while not scheduler.idle:
            for request, events in scheduler.step():
                if request.error is not None:
                    raise request.error
                for event in events:
                    samples[id(request)].take(event, engine, predicted)
    except Exception as error:
        if not isinstance(error, OutputError):
            job.sink.broken()
        raise
    finally:
        for request in requests:
            request.abandon()
    return [each.result for each in samples.values() if each.result is not None]


def summary(results: list[Result]) -> str:
    """What all answers took, for the line of statistics."""
    first, ends = results[0].end, [each.end for each in results]
    tokens = sum(len(end.ids) for end in ends)
    decoded, longest = sum(end.timings.decode_tokens for end in ends), max(end.timings.decode_s for end in ends)
    rate = f", {decoded / longest:,.0f} tok/s together" if longest > 0 else ""
    read = f"{first.usage.prompt_tokens:,} prompt tokens"
    if first.usage.cache_read_tokens:
        read = f"a prompt, {prompt_stats(first)}"
    return (
        f"{len(results)} answers to {read} · {first.timings.prefill_s:.2f} s"
        f" | gen {tokens:,} tok{rate} | seed {results[0].params.seed}"
    )
