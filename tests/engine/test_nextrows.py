"""Which rows come next, and which of them a GPU computes in one pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvcli.runtime.engine.nextrows import Turns, dealt, wanted


@dataclass(eq=False)
class Wants:
    """A request that wants so many rows."""

    rows: int
    answering: bool = False
    n_prompt: int = 100
    seq: Any = field(default_factory=lambda: SimpleNamespace(length=0))

    def wants(self, budget: int) -> list[int]:
        return [0] * min(self.rows, budget)


def rows(work: Any) -> list[int]:
    return [len(ids) for _, ids in work]


@pytest.mark.parametrize(
    ("prompts", "answers", "first", "found"),
    [
        ([250] * 6, [1, 1], False, [1, 1, 250, 250, 250, 250]),
        ([250] * 6, [1, 1], True, [250, 250, 250, 250]),
        ([3000, 5], [1], True, [3000]),
        ([3000, 5], [1], False, [1, 3000]),
        ([5000], [1], False, [1, 4095]),
        ([0], [1, 1], True, [0, 1, 1]),
        ([], [1, 1], True, [1, 1]),
        ([30, 500, 30], [], True, [30, 500, 30]),
        ([400] * 3, [], True, [400, 400]),
    ],
)
def test_whose_rows_come_next(prompts: list[int], answers: list[int], first: bool, found: list[int]) -> None:
    requests: Any = [*map(Wants, prompts), *(Wants(n, True) for n in answers)]
    assert rows(wanted(requests, 4096, 1024, first)) == [n for n in found if n]
    everything = wanted(requests, 4096, math.inf, False)
    assert sum(rows(everything)) == min(4096, sum(prompts) + sum(answers))


def test_as_many_as_a_graph_reads_come_at_once() -> None:
    requests: Any = [Wants(400) for _ in range(6)]
    for joined, found in ((set(), 2), ({(512, 4), (64, 8)}, 4), ({(64, 8)}, 2)):
        assert len(Turns().of(requests, 4096, True, SimpleNamespace(joined=joined))) == found  # type: ignore[arg-type]
    assert len(Turns().of(requests, 4096, False)) == 6


def test_prompts_of_which_there_is_a_graph_are_read_together() -> None:
    steps: Any = SimpleNamespace(sizes=(16, 256), joined={(256, 2), (256, 4), (16, 2)})
    again = Wants(9, seq=SimpleNamespace(length=100))  # rows of an answer that were lost
    work: Any = [(each, each.wants(999)) for each in (*map(Wants, (250, 9, 200, 17, 300, 256, 12, 250)), again)]
    work.append((Wants(1, True), [7]))
    passes = [[len(ids) for _, ids in each] for each in dealt(work, steps)]
    assert sorted(passes) == [[1], [9], [9, 12], [250], [250, 200, 17, 256], [300]]
    for no in (None, SimpleNamespace(sizes=(16, 256), joined=set())):
        assert [len(each) for each in dealt(work, no)] == [1] * len(work)  # type: ignore[arg-type]
