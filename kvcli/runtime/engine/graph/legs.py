"""The states of a graph's rows: lists on the device that stay where they are while sequences come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from kvcli.kernels.gpu.legs import BEHIND, NUMBERS, BoundLegs, Legs, lists
from kvcli.kernels.gpu.shares import NoRoom
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Part
from kvcli.runtime.engine.graph.pages import sent


class GraphLegs:
    """The states of steps of up to `rows` rows; see `Legs`. `bind` them to a sequence."""

    def __init__(self, layout: KVLayout, rows: int, device: torch.device, apart: bool = False) -> None:
        self.layer_bytes = layout.states[0].layer_bytes
        self.legs = Legs.empty(rows, device, apart)
        self._sent = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def of(self, index: int) -> BoundLegs:
        """Those of a layer, by its index among layers with a state."""
        return BoundLegs(replace(self.legs, offset=index * self.layer_bytes))

    def bind(self, part: Part) -> None:
        """Have the part's rows carry its sequence's states on, which they are about to change. Raises NoRoom."""
        found, places = lists(part.legs()), (self.legs.table, self.legs.chunks)
        if any(len(numbers) > len(to) for numbers, to in zip(found, places, strict=True)):
            raise NoRoom("more states to keep than planned")
        for numbers, before, to in zip(found, self._sent, places, strict=True):
            if not np.array_equal(numbers, before):
                whole = np.zeros(to.shape, np.int64)
                whole[: len(numbers)] = numbers
                to.copy_(sent(torch.from_numpy(whole), to.device))
        self._sent = found

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Inside, launches leave no states."""
        kept = self.legs.table.clone()
        self.legs.table[:, BEHIND] = 0
        try:
            yield
        finally:
            self.legs.table.copy_(kept)


class BatchLegs(GraphLegs):
    """The states of single rows of sequences of their own: `set` rows, then `send` what was set."""

    def __init__(self, layout: KVLayout, rows: int, device: torch.device) -> None:
        super().__init__(layout, rows, device, apart=True)
        self._table = np.zeros((rows, NUMBERS), np.int64)

    def set(self, row: int, part: Part | None) -> None:
        """Have a row carry a sequence's state on, which it is about to change, or nobody's."""
        self._table[row] = 0
        if part is not None:
            ((_, _, source, target),) = part.legs()
            self._table[row] = row, row + 1, source, target, row, source, 0

    def in_place(self, row: int) -> bool:
        """Whether a row leaves its state where it finds it."""
        return bool(self._table[row, 2] == self._table[row, BEHIND] != 0)

    def send(self) -> None:
        """Bring what was set to the device."""
        self.legs.table.copy_(sent(torch.from_numpy(self._table.copy()), self.legs.table.device))


def graph_legs(layout: KVLayout, rows: int, device: torch.device) -> GraphLegs | None:
    """None where no layer has a state."""
    return GraphLegs(layout, rows, device) if layout.states else None
