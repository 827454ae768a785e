"""One row each of several sequences on a GPU, as a CUDA graph: the decoder's own pass over rows that stand apart, whose
positions and page lists are of sequences of their own, and their logits.

A graph is captured for a number of rows, the last of which may be spare; whoever has a row keeps it from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from kvcli.kernels.gpu.forked import compile_all
from kvcli.kernels.gpu.launching import collecting
from kvcli.kernels.gpu.legs import BoundLegs
from kvcli.kernels.gpu.pages import BoundStretch
from kvcli.kernels.gpu.seal import seal_step
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Part, Sequence, Step
from kvcli.runtime.engine.graph.batchpages import BatchPages
from kvcli.runtime.engine.graph.capture import captured, launched_ahead
from kvcli.runtime.engine.graph.legs import BatchLegs
from kvcli.runtime.engine.graph.pages import sent
from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.sealing import fixes_basis


@dataclass(frozen=True)
class RowsApart:
    """Rows of sequences of their own, whose pages and states a graph finds on the device; see `Step` and `Part`, which
    it stands for."""

    ids: torch.Tensor
    pages: BatchPages
    legs: BatchLegs | None

    @property
    def rows(self) -> tuple[tuple[tuple[int, int], RowsApart], ...]:
        """All rows at once."""
        return (((0, len(self.ids)), self),)

    def stretch(self, layer: int, lo: int, hi: int) -> BoundStretch:
        """See `Part.stretch`."""
        tables = self.pages.tables_of(layer)
        return BoundStretch(lo, hi, self.pages.layers[layer], tables.parts, tables.sealing)

    def carried(self, index: int, lo: int) -> list[BoundLegs]:
        """See `Part.carried`."""
        assert self.legs is not None
        return [self.legs.of(index)]

    def keep(self, *of_layer: object) -> None:
        """See `Part.keep`: rows of graphs are not taken back."""


class BatchGraph:
    """The next rows of up to `rows` sequences: `seat` them, then `run` all of them again and again."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int, rows: int, memory: Any = None) -> None:
        """`memory`: what graphs are captured in, those of other numbers of rows, too."""
        self.model, self.layout, self.rows, self._memory = model, layout, rows, memory
        self.device: torch.device = model.ops.device
        self._head = torch.zeros(2, rows, dtype=torch.int64, device=self.device)
        self.tokens, self.position = self._head
        self.logits = torch.zeros(rows, model.config.vocab_size, device=self.device)
        self.pages = BatchPages(model, layout, ctx_size, self.position)
        self.legs = BatchLegs(layout, rows, self.device) if layout.states else None
        self._seats: list[Sequence | None] = [None] * rows
        self._parts: list[Part | None] = [None] * rows  # that lists were made for
        self._changed = False  # whether other sequences have seats than the device knows of
        self._graphs: dict[object, torch.cuda.CUDAGraph] = {}

    def seat(self, row: int, seq: Sequence | None) -> None:
        """Give the row to a sequence, or to nobody."""
        self._seats[row], self._parts[row], self._changed = seq, None, True
        self.pages.set(row, None)
        if self.legs is not None:
            self.legs.set(row, None)

    @torch.inference_mode()
    def run(self, ids: Mapping[int, int] | None = None) -> torch.Tensor:
        """Compute the next row of every sequence that has a seat -> logits [rows, vocab]; those of empty seats mean
        nothing.

        `ids`: the tokens, by row; None = they stand in `tokens`, which is for no sequence that has just been seated. A
        row is committed under its id, or under -1. Raises DoesNotFit, with no sequence changed for the worse, and
        NoRoom. Nothing waits for the device, except when a graph is captured.
        """
        there = {row: seq for row, seq in enumerate(self._seats) if seq is not None}
        stale = [row for row, seq in there.items() if not self._holds(row, seq)]
        self._set({row: there[row].reserve([-1], answering=True) for row in stale})
        if ids is not None:
            head = [[ids.get(row, 0) for row in range(self.rows)], [0] * self.rows]
            for row, seq in there.items():
                head[1][row] = seq.length
            self._head.copy_(sent(torch.tensor(head), self.device))
        self._replay()
        self._fix(there)
        self._seal(there)
        for row, seq in there.items():
            seq.commit([-1 if ids is None else ids[row]])
        self.position.add_(1)
        return self.logits

    def _holds(self, row: int, seq: Sequence) -> bool:
        """Whether what the device knows of a row's sequence is right for its next row."""
        if self._parts[row] is None or seq.length >= self.pages.end(row):
            return False
        if self.legs is None or seq.states is None:
            return True
        return self.legs.in_place(row) and seq.states.steady(seq.length)

    def _set(self, parts: dict[int, Part]) -> None:
        """Have lists on the device that are right for these rows, and none of sequences without a seat."""
        self._changed = self._changed or bool(parts)
        for row, part in parts.items():
            self.pages.set(row, part)
            if self.legs is not None:
                self.legs.set(row, part)
            if self._parts[row] is None:
                self.pages.set_bases(row, part)
            self._parts[row] = part
        if self._changed:
            self.pages.send()
            if self.legs is not None:
                self.legs.send()
            self._changed = False

    def launch(self) -> None:
        """Every kernel of a step."""
        rows = RowsApart(self.tokens.clamp(min=0), self.pages, self.legs)
        step = cast(Step, rows)  # all that the decoder asks of one
        with launched_ahead(self.model):
            self.logits.copy_(self.model.logits(self.model.hidden(step)))

    def _replay(self) -> None:
        if self.device.type != "cuda":  # Triton's interpreter
            self.launch()
            return
        kinds = self.pages.kinds
        if kinds not in self._graphs:
            if not self._graphs:
                self._compile()
            self._graphs[kinds] = captured(self.launch, self.legs, self._memory)
        self._graphs[kinds].replay()

    def _compile(self) -> None:
        """Compile what a step launches, in parallel; nothing is run."""
        with collecting() as variants:
            self.dry_run()
        compile_all(variants, len(usable_cpus()))

    def dry_run(self) -> None:
        """Launch every kernel, with no row in any."""
        self.launch()
        self._launch_sealing([0])

    def _fix(self, there: dict[int, Sequence]) -> None:
        """Find what first pages fix that have just been filled; their last rows saw them in 16 bits."""
        for row, seq in there.items():
            part = self._parts[row]
            if part is not None and any(fixes_basis(layers[0], seq.length + 1) for layers in part.groups):
                self.pages.fix_row(row, part)

    def _seal(self, there: dict[int, Sequence]) -> None:
        """Encode what leaves the 16-bit tails of sequences as their rows come."""
        groups = [g for g in self.layout.groups if g.sealed and g.tail]
        ends = {row: seq.length + 1 for row, seq in there.items()}
        ranges = {row: [g.newly_sealed(end - 1, end) for g in groups] for row, end in ends.items()}
        if rows := [row for row, each in ranges.items() if any(first < last for first, last in each)]:
            self._launch_sealing(rows)

    def _launch_sealing(self, rows: list[int]) -> None:
        sealing = sent(torch.tensor(rows), self.device)
        for pages, layers, strides in self.pages.sealed_by(sealing):
            seal_step(pages, layers=layers, strides=strides)
