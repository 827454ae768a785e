"""`Journal`: what it takes to have a state again as it was some rows ago, while these may have to be taken back.

The state before them is kept, and what each layer computes the rows from: the products that its convolution and its
recurrence read. To go back to any of the rows, those that stay are carried on once more from there; no weights are
read. States behind every row would take as many times the memory of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvcli.kernels import Carried
from kvcli.runtime.cache.pool import PagePool

# Carries states on over rows as `Inputs` have them.
Again = Callable[[torch.Tensor, Sequence[Carried]], object]
# By index among layers that have a state: how it goes on, and what from, float32 [T, n].
Inputs = dict[int, tuple[Again, torch.Tensor]]


class Journal:
    """That of one sequence. `room`: the page of the state before its rows, taken among checkpoints; None = it has
    none, and cannot begin."""

    def __init__(self, pool: PagePool) -> None:
        assert pool.layout.state_arenas is not None
        self._pool, self._arena = pool, pool.layout.state_arenas[1]
        self.room: int | None = None
        self._start = self._end = 0  # rows that it has
        self._zeros = True  # there was no row before them
        self._inputs: dict[int, tuple[Again, list[torch.Tensor]]] = {}
        self._runs = False

    def has(self, length: int, now: int) -> bool:
        """Whether the state behind `length` rows can be had again, of `now` in all."""
        return self._runs and self._end == now and self._start <= length <= now

    def begin(self, start: int, state: torch.Tensor | None) -> None:
        """Row `start` is the first that may be taken back; `state`: the one before it, None = zeros."""
        assert self.room is not None
        self._runs, self._start, self._end, self._zeros, self._inputs = True, start, start, state is None, {}
        if state is not None:
            with torch.inference_mode():
                self._pool.page(self._arena, self.room).copy_(state)

    def goes_on(self, start: int, end: int) -> bool:
        """Whether it began with row `start` and has all rows up to `end`."""
        return self._runs and (self._start, self._end) == (start, end)

    def add(self, inputs: Inputs, rows: int) -> None:
        """So many rows more are computed. Buffers of a step may be those of the next: their contents are kept."""
        self._end += rows
        for index, (again, found) in inputs.items():
            self._inputs.setdefault(index, (again, []))[1].append(found.clone())

    def restore(self, length: int, live: torch.Tensor) -> None:
        """Leave the state behind `length` rows in a page; no later row can be had again."""
        n = length - self._start
        before = None if self._zeros or self.room is None else self._pool.page(self._arena, self.room)
        with torch.inference_mode():
            if n == 0:
                live.zero_() if before is None else live.copy_(before)
            for index, (again, found) in self._inputs.items() if n else ():
                source = None if before is None else before[index].view(torch.float32)
                again(torch.cat(found)[:n], [Carried(0, n, source, live[index].view(torch.float32))])
        self._inputs = {i: (again, [torch.cat(found)[:n]]) for i, (again, found) in self._inputs.items()}
        self._end = length

    def stop(self) -> None:
        """No row can be taken back any more."""
        self._runs, self._inputs = False, {}
        if self.room is not None:
            self._pool.release(self._arena, self.room)
            self.room = None
