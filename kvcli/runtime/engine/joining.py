"""Which rows a GPU computes in one pass: prompts of several requests together, where that pays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvcli.options import READ_ALL

if TYPE_CHECKING:
    from kvcli.runtime.cache.layout import KVLayout
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.request import Request

MOST = 16  # prompts of a pass
LEAST_BYTES = 24 << 20  # of a layer's weights: of smaller ones, launching a pass that is no graph takes longer than it
Work = list[tuple["Request", list[int]]]


def answers(request: Request) -> bool:
    """Whether the rows that come next are those of an answer."""
    return request.seq.length >= request.n_prompt


def notes(seq: Sequence) -> bool:
    """Whether the query of the next row is noted itself, which the fast way of single tokens does not do."""
    return seq.selector is not None and seq.selector.notes_queries(seq.length + 1)


def joins(layout: KVLayout, weights: int) -> bool:
    """Whether prompts are computed together; `weights`: bytes of a layer's. Not where a row's bits must not depend on
    its neighbours, nor where queries choose what they read, or are noted."""
    alike = layout.grain == 1 and layout.selection is None and layout.attend == READ_ALL
    return alike and weights >= LEAST_BYTES


def dealt(work: Work, together: bool) -> Iterator[Work]:
    """Cut what requests want into passes: MOST prompts at a time `together`, all others one by one."""
    prompts = [each for each in work if together and not each[0].answering and not answers(each[0])]
    if len(prompts) > 1:
        yield from (prompts[i : i + MOST] for i in range(0, len(prompts), MOST))
    joined = {id(request) for request, _ in prompts if len(prompts) > 1}
    yield from ([each] for each in work if id(each[0]) not in joined)
