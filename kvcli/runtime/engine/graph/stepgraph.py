"""Some rows of a sequence on a GPU, as a CUDA graph: short prompts and the ends of long ones, whose kernels take less
time than launching them.

A graph is the decoder's own pass over buffers that never move, captured once for a number of rows; a step has the rows
of the next larger graph, of which the last may be spare. Long steps keep a GPU busy as they are.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch

from kvcli.kernels.gpu import latentpast
from kvcli.kernels.gpu.legs import BoundLegs
from kvcli.kernels.gpu.pages import BoundStretch
from kvcli.kernels.gpu.shares import NoRoom
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Part, Step
from kvcli.runtime.engine.graph.capture import captured, launched_ahead
from kvcli.runtime.engine.graph.legs import GraphLegs, graph_legs
from kvcli.runtime.engine.graph.pages import GraphPages
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.sealing import fixes_basis

ROWS = (16, 32, 64, 128, 256, 512, 1024)  # of a graph; see also plan/footprint.py
ROWS_OF_OTHER_KINDS = 128  # with more the kernels are the same ones
SMALLEST_BUCKET = 1024  # tokens of context; a graph serves contexts up to a power of two


@dataclass(frozen=True)
class BoundPart:
    """Rows whose pages and states a graph finds on the device; see `Part` and `Step`, which it stands for. `fixes`: see
    `BoundStretch`."""

    ids: torch.Tensor
    pages: GraphPages
    bucket: int
    fixes: bool = False
    legs: GraphLegs | None = None

    @property
    def rows(self) -> tuple[tuple[tuple[int, int], BoundPart], ...]:
        """The part, with its rows among those of the step: all."""
        return (((0, len(self.ids)), self),)

    def stretch(self, layer: int, lo: int, hi: int) -> BoundStretch:
        """See `Part.stretch`."""
        tables, _ = self.pages.of(layer)
        return BoundStretch(lo, hi, self.pages.layers[layer], tables.parts(self.bucket), tables.sealing, self.fixes)

    def carried(self, index: int, lo: int) -> list[BoundLegs]:
        """See `Part.carried`."""
        assert self.legs is not None
        return [self.legs.of(index)]


class Rows:
    """The buffers and graphs of steps of so many rows."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int, rows: int) -> None:
        self.model, device = model, model.ops.device
        self.ids, self.position = (torch.zeros(n, dtype=torch.int64, device=device) for n in (rows, 1))
        self.pages = GraphPages(model, layout, ctx_size, self.position, rows)
        self.legs = graph_legs(layout, rows, device)
        self.hidden = torch.zeros(rows, model.config.d_model, device=device)
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def bind(self, part: Part, bucket: int) -> None:
        """Have the rows of a part computed next. Raises NoRoom."""
        if self.pages.bind(part, bucket):
            self.graphs.clear()
        self.pages.bind_bases(part)
        if self.legs is not None:
            self.legs.bind(part)
        self.position.fill_(part.start)
        self.ids[: len(part.ids)] = part.ids.to(self.ids.device, non_blocking=True)

    def launch(self, bucket: int, fixes: bool = False) -> None:
        """Every kernel of a step that sees up to `bucket` rows."""
        step = cast(Step, BoundPart(self.ids, self.pages, bucket, fixes, self.legs))  # all that the decoder asks of one
        with nullcontext() if fixes else launched_ahead(self.model):  # else what is fixed is read at once
            self.hidden.copy_(self.model.hidden(step))

    def replay(self, bucket: int, fixes: bool, memory: Any) -> None:
        """Compute a step by its graph, captured at the first time; `memory`: the pool that graphs share."""
        if self.hidden.device.type != "cuda":  # Triton's interpreter
            self.launch(bucket, fixes)
            return
        if (bucket, fixes) not in self.graphs:
            self.graphs[bucket, fixes] = captured(lambda: self.launch(bucket, fixes), self.legs, memory)
        self.graphs[bucket, fixes].replay()


class StepGraph:
    """The model's pass over up to ROWS[-1] rows of one sequence at a time."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout, self.ctx_size = model, layout, ctx_size
        self.sizes = tuple(rows for rows in ROWS if rows % layout.grain == 0)
        self._rows: dict[int, Rows] = {}
        self._memory = torch.cuda.graph_pool_handle() if model.ops.device.type == "cuda" else None

    def run(self, part: Part) -> torch.Tensor | None:
        """Hidden states float32 [T, d_model] of the part, whose rows are stored.

        None where queries are to be noted or choose what they read; where its rows are too many or seal one by one,
        where its lists are too long, where what layers give is read, and where it sees so many latents that it should
        not be absorbed.
        """
        by_row = any(group.sealed and not group.tail for group in self.layout.groups)
        if self.model.config.latents is not None and len(part.ids) * part.start >= latentpast.WORTH:
            return None
        if part.watches or part.chooses or self.model.taps or len(part.ids) > ROWS[-1] or by_row:
            return None
        fixes = any(fixes_basis(layers[0], part.end) for layers in part.groups)
        count = next(n for n in self.sizes if n >= len(part.ids))
        rows, bucket = self._of(count), SMALLEST_BUCKET
        while bucket < max(group.rows_seen(part.end) for group in self.layout.groups):
            bucket *= 2
        try:
            rows.bind(part, bucket)
        except NoRoom:
            del self._rows[count]  # some groups may be bound, for kinds of work that its graphs lack
            return None
        rows.replay(bucket, fixes, self._memory)
        if fixes:
            rows.pages.take_bases(part)
        return rows.hidden[: len(part.ids)].clone()

    def dry_run(self, shortest: bool = False) -> None:
        """Launch the kernels of every kind of step, or of the shortest, with no rows in any."""
        mixture = self.model.config.experts is not None  # whose kernels have tiles of any number of rows
        for count in self.sizes[: 1 if shortest else None]:
            if mixture or count <= max(ROWS_OF_OTHER_KINDS, self.sizes[0]):
                for fixes in {False, any(group.sealed for group in self.layout.groups)}:
                    self._of(count).launch(SMALLEST_BUCKET, fixes)

    def _of(self, count: int) -> Rows:
        if count not in self._rows:
            self._rows[count] = Rows(self.model, self.layout, self.ctx_size, count)
        return self._rows[count]
