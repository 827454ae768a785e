"""Which rows an engine computes next, and which of them a GPU computes in one pass."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvcli.runtime.plan.footprint import STEP_ROWS

if TYPE_CHECKING:
    from kvcli.runtime.cache.sequence import Sequence as Rows
    from kvcli.runtime.engine.graph.stepgraph import StepGraph
    from kvcli.runtime.engine.request import Request

READING_S = 0.25  # that answers on a GPU may stand still while prompts are read
Work = list[tuple["Request", list[int]]]


def answers(request: Request) -> bool:
    """Whether the rows that come next are those of an answer."""
    return request.seq.length >= request.n_prompt


def notes(seq: Rows) -> bool:
    """Whether the query of the next row is noted itself, which the fast way of single tokens does not do."""
    return seq.selector is not None and seq.selector.notes_queries(seq.length + 1)


def wanted(requests: Sequence[Request], budget: int, enough: float, prompts: bool) -> Work:
    """The next rows of requests, at most `budget` in all: answers come first; `prompts` alone, where there are any.

    `enough`: rows of several prompts, each up to a power of two, as graphs have them; who comes behind so many has a
    step sooner than all would be done.
    """
    work, read, count = list[tuple["Request", list[int]]](), 0, 0
    for request in sorted(requests, key=lambda each: each.answering == prompts):
        if (prompts and count and request.answering) or (count and read + read // count > enough):
            break
        if ids := request.wants(budget):
            work.append((request, ids))
            budget -= len(ids)
            read, count = (read, count) if request.answering else (read + (1 << (len(ids) - 1).bit_length()), count + 1)
    return work


class Turns:
    """Whose turn it is where prompts come first: when answers last went on."""

    def __init__(self) -> None:
        self._answered_s = 0.0

    def of(self, requests: Sequence[Request], budget: int, gpu: bool, steps: StepGraph | None = None) -> Work:
        """See `wanted`. On a GPU prompts come first, but answers do not stand still for longer than READING_S and a
        step. `steps`: what reads several prompts in one pass there."""
        now = time.monotonic()
        together = max((rows * count for rows, count in steps.joined), default=0) if steps else 0
        enough = max(together, STEP_ROWS[-1]) if gpu else math.inf
        prompts = gpu and now < self._answered_s + READING_S
        work = wanted(requests, budget, enough, prompts)
        if any(request.answering for request, _ in work) or not any(request.answering for request in requests):
            self._answered_s = now
        return work


def dealt(work: Work, steps: StepGraph | None) -> Iterator[Work]:
    """Cut what requests want into passes: prompts of which `steps` has graphs together, all others one by one."""
    by_rows: dict[int, Work] = {}
    for request, ids in work:
        reads = steps is not None and steps.joined and not request.answering and not answers(request)
        rows = next((n for n in steps.sizes if n >= len(ids)), 0) if steps and reads else 0
        by_rows.setdefault(rows, []).append((request, ids))
    for rows, some in by_rows.items():
        counts = sorted((n for of, n in steps.joined if of == rows), reverse=True) if steps else []
        while some:
            count = next((n for n in counts if n <= len(some)), 1)
            yield some[:count]
            some = some[count:]
