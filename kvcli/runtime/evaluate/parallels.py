"""Tokens a second of several sequences that are written at a time, each behind rows of its own."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import DoesNotFit
from kvcli.options import SampleOptions
from kvcli.runtime.evaluate.rates import WARMUP_TOKENS, Rates
from kvcli.words import human_bytes

if TYPE_CHECKING:
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.request import Request


@dataclass(frozen=True)
class Parallel(Rates):
    """`sequences` at a time, each of which wrote `tokens` behind `depth` ones. `rates`: tokens a second of all, of each
    repetition. `read_bytes`: what a step reads, half-way: weights once, and the rows of every sequence."""

    sequences: int
    depth: int
    tokens: int
    rates: tuple[float, ...]
    read_bytes: int

    @property
    def step_s(self) -> float:
        """The time of a step, which gives each sequence a token."""
        return self.sequences / self.median

    def limit(self, bandwidth: float | None) -> float | None:
        """Tokens a second if nothing but reading at `bandwidth` (10^9 bytes/s) took time; None = not known."""
        return self.sequences * bandwidth * 1e9 / self.read_bytes if bandwidth else None


def rows(depth: int, tokens: int) -> int:
    """Of the context that a sequence needs."""
    return depth + tokens + 2


def run(
    engine: Engine,
    counts: list[int],
    wanted: list[tuple[int, int]],
    repetitions: int,
    warmup: bool,
    tell: Callable[[str], None],
) -> Iterator[Parallel]:
    """Measure each (depth, tokens) of `wanted` with so many sequences at a time. `tell` hears what begins. Raises
    DoesNotFit where their pages have no room, before anything of that is computed."""
    for depth, tokens in wanted:
        with ExitStack() as held:
            seqs: list[tuple[Sequence, list[int]]] = []
            for count in counts:
                _check_room(engine, count, rows(depth, tokens))
                tell(f"{count} x {tokens} tokens @ d{depth}")
                while len(seqs) < count:
                    seqs.append(_deep(engine, depth, len(seqs)))
                    held.callback(seqs[-1][0].close)
                if warmup:
                    _once(engine, seqs[:count], depth, min(tokens, WARMUP_TOKENS), -1)
                rates = tuple(_once(engine, seqs[:count], depth, tokens, number) for number in range(repetitions))
                yield Parallel(count, depth, tokens, rates, _read_bytes(engine, count, depth + 1 + tokens // 2))


def _check_room(engine: Engine, count: int, length: int) -> None:
    """Raises DoesNotFit."""
    budget = engine.pool.budget_bytes
    needed = engine.layout.pool_bytes(length, engine.ubatch, count)
    if budget is not None and needed > budget:
        raise DoesNotFit(
            f"{count} sequences of {length:,} tokens need {human_bytes(needed)} of pages, there is room for"
            f" {human_bytes(budget)}",
            "measure fewer, or less depth",
        )


def _deep(engine: Engine, depth: int, number: int) -> tuple[Sequence, list[int]]:
    """A sequence with so many rows, and their ids, which no other number has."""
    ids = random.Random(f"depth {number}").choices(range(engine.config.vocab_size), k=depth)
    seq = engine.new_sequence()
    for start, end in engine.chunks(0, depth):
        engine.forward(seq, ids[start:end])
    return seq, ids


def _once(engine: Engine, seqs: list[tuple[Sequence, list[int]]], depth: int, tokens: int, number: int) -> float:
    """Tokens a second from the step in which all have their first token to the last token of all."""
    options = SampleOptions(temperature=0.0, max_tokens=1 + tokens, ignore_eos=True, spec="off")
    requests = []
    for i, (seq, ids) in enumerate(seqs):
        kept = seq.rewind_to(min(depth, seq.length))
        for start, end in engine.chunks(kept, depth):
            engine.forward(seq, ids[start:end])
        fresh = random.Random(f"{i} {number}").choices(range(engine.config.vocab_size), k=1)
        requests.append(engine.request(seq, ids + fresh, options))
    while not all(request.answering for request in requests):
        _step(engine, requests)
    engine.synchronize()
    before, began = _written(requests), time.perf_counter()
    while any(not request.finished for request in requests):
        _step(engine, requests)
    return (_written(requests) - before) / (time.perf_counter() - began)


def _step(engine: Engine, requests: list[Request]) -> None:
    engine.step([request for request in requests if not request.finished])
    for request in requests:
        if request.error is not None:
            raise request.error


def _written(requests: list[Request]) -> int:
    return sum(len(request.history) - request.n_prompt for request in requests)


def _read_bytes(engine: Engine, count: int, length: int) -> int:
    weights = engine.terms.setting.weights.read
    return weights + count * (engine.bytes_per_token(length) - weights)
