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
from kvcli.runtime.plan import graphs

SHORT_ROWS = 16  # whose kernels are wanted first
ROWS_OF_OTHER_KINDS = 128  # with more the kernels are the same ones
SMALLEST_BUCKET = 1024  # tokens of context; a graph serves contexts up to a power of two


@dataclass(frozen=True)
class BoundPart:
    """Rows of a sequence whose pages and states a graph finds on the device; see `Part`, which it stands for. `fixes`:
    see `BoundStretch`."""

    pages: GraphPages
    bucket: int
    fixes: bool = False
    legs: GraphLegs | None = None

    def stretch(self, layer: int, lo: int, hi: int) -> BoundStretch:
        """See `Part.stretch`."""
        tables, _ = self.pages.of(layer)
        return BoundStretch(lo, hi, self.pages.layers[layer], tables.parts(self.bucket), tables.sealing, self.fixes)

    def carried(self, index: int, lo: int) -> list[BoundLegs]:
        """See `Part.carried`."""
        assert self.legs is not None
        return [self.legs.of(index)]

    def keep(self, *of_layer: object) -> None:
        """See `Part.keep`: rows of graphs are not taken back."""


@dataclass(frozen=True)
class BoundStep:
    """All that the decoder asks of a `Step`."""

    ids: torch.Tensor
    rows: tuple[tuple[tuple[int, int], BoundPart], ...]


class Place:
    """The buffers of up to `rows` rows of one sequence."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int, rows: int) -> None:
        self.position = torch.zeros(1, dtype=torch.int64, device=model.ops.device)
        self.pages = GraphPages(model, layout, ctx_size, self.position, rows)
        self.legs = graph_legs(layout, rows, model.ops.device)

    def bind(self, part: Part, bucket: int) -> bool:
        """Have the rows of a part computed next. Returns as `GraphPages.bind`. Raises NoRoom."""
        more = self.pages.bind(part, bucket)
        self.pages.bind_bases(part)
        if self.legs is not None:
            self.legs.bind(part)
        self.position.fill_(part.start)
        return more


class Rows:
    """The buffers and graphs of steps of so many rows, of each of `count` sequences. `hidden` [count * rows, d_model]:
    what they give."""

    def __init__(
        self, model: Decoder, layout: KVLayout, ctx_size: int, rows: int, count: int, hidden: torch.Tensor
    ) -> None:
        self.model, self.rows, self.hidden = model, rows, hidden
        self.ids = torch.zeros(count * rows, dtype=torch.int64, device=model.ops.device)
        self.places = [Place(model, layout, ctx_size, rows) for _ in range(count)]
        self.graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def bind(self, parts: tuple[Part, ...], bucket: int) -> None:
        """Have the rows of parts computed next, one of each sequence. Raises NoRoom."""
        for i, (place, part) in enumerate(zip(self.places, parts, strict=True)):
            if place.bind(part, bucket):
                self.graphs.clear()
            ids = self.ids[i * self.rows : i * self.rows + len(part.ids)]
            ids.copy_(part.ids.to(ids.device, non_blocking=True))

    def launch(self, bucket: int, fixes: bool = False) -> None:
        """Every kernel of a step that sees up to `bucket` rows."""
        parts = (BoundPart(place.pages, bucket, fixes, place.legs) for place in self.places)
        step = BoundStep(self.ids, tuple(((i * self.rows, (i + 1) * self.rows), x) for i, x in enumerate(parts)))
        with nullcontext() if fixes else launched_ahead(self.model):  # else what is fixed is read at once
            self.hidden.copy_(self.model.hidden(cast(Step, step)))

    def replay(self, bucket: int, fixes: bool, memory: Any) -> None:
        """Compute a step by its graph, captured at the first time; `memory`: the pool that graphs share."""
        if self.hidden.device.type != "cuda":  # Triton's interpreter
            self.launch(bucket, fixes)
            return
        if (bucket, fixes) not in self.graphs:
            self.graphs[bucket, fixes] = captured(lambda: self.launch(bucket, fixes), self.places[0].legs, memory)
        self.graphs[bucket, fixes].replay()

    def found(self, parts: tuple[Part, ...]) -> torch.Tensor:
        """The hidden states of all parts, one after the other."""
        return torch.cat([self.hidden[i * self.rows :][: len(part.ids)] for i, part in enumerate(parts)])


class StepGraph:
    """The model's pass over up to STEP_ROWS[-1] rows of one sequence at a time, or TOGETHER_ROWS of several: `joined`
    says of how many rows of how many there are graphs, which take long to be captured."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout, self.ctx_size = model, layout, ctx_size
        self.sizes = graphs.sizes(layout)
        self.joined: set[tuple[int, int]] = set()
        self._rows: dict[tuple[int, int], Rows] = {}
        self._hidden: torch.Tensor | None = None  # one for all graphs
        self._memory = torch.cuda.graph_pool_handle() if model.ops.device.type == "cuda" else None

    @property
    def joins(self) -> bool:
        """Whether there can be graphs of several sequences."""
        return graphs.joins(self.layout)

    def run(self, part: Part) -> torch.Tensor | None:
        """Hidden states float32 [T, d_model] of the part, whose rows are stored.

        None where queries are to be noted or choose what they read; where its rows may be taken back from states; where
        they are too many or seal one by one, where its lists are too long, where what layers give is read, and where it
        sees so many latents that it should not be absorbed.
        """
        return self._run((part,)) if self._takes(part) else None

    def together(self, parts: tuple[Part, ...]) -> torch.Tensor:
        """The same of several parts, one after the other: by one graph, or by as many as there are parts."""
        count = self._count(max(len(part.ids) for part in parts))
        alike = all(map(self._takes, parts)) and len(set(map(_fixes, parts))) == 1
        hidden = self._run(parts) if alike and (count, len(parts)) in self.joined else None
        if hidden is not None:
            return hidden
        each = ((part, self.run(part)) for part in parts)
        return torch.cat([self.model.hidden(Step((part,))) if own is None else own for part, own in each])

    def _takes(self, part: Part) -> bool:
        if self.model.config.latents is not None and len(part.ids) * part.start >= latentpast.WORTH:
            return False
        if part.watches or part.chooses or (part.states and part.states.inputs is not None):
            return False
        return not (self.model.taps or len(part.ids) > graphs.STEP_ROWS[-1] or graphs.by_row(self.layout))

    def _run(self, parts: tuple[Part, ...]) -> torch.Tensor | None:
        """None where lists are too long."""
        size = self._count(max(len(part.ids) for part in parts)), len(parts)
        rows, bucket, fixes = self._of(*size), SMALLEST_BUCKET, _fixes(parts[0])
        while bucket < max(group.rows_seen(part.end) for group in self.layout.groups for part in parts):
            bucket *= 2
        try:
            rows.bind(parts, bucket)
        except NoRoom:
            del self._rows[size]  # some groups may be bound, for kinds of work that its graphs lack
            return None
        rows.replay(bucket, fixes, self._memory)
        for place, part in zip(rows.places, parts, strict=True):
            if fixes:
                place.pages.take_bases(part)
        return rows.found(parts)

    def dry_run(self, shortest: bool = False) -> None:
        """Launch the kernels of every kind of step, or of short ones, with no rows in any."""
        mixture = self.model.config.experts is not None  # whose kernels have tiles of any number of rows
        most = SHORT_ROWS if shortest else graphs.STEP_ROWS[-1] if mixture else ROWS_OF_OTHER_KINDS
        for count in self.sizes:
            if count <= max(most, self.sizes[0]):
                for fixes in {False, any(group.sealed for group in self.layout.groups)}:
                    self._of(count, 1).launch(SMALLEST_BUCKET, fixes)

    def _count(self, rows: int) -> int:
        """Rows of the graph that so many fit into."""
        return next((n for n in self.sizes if n >= rows), 0)

    def _of(self, rows: int, count: int) -> Rows:
        if (rows, count) not in self._rows:
            sizes = self.model, self.layout, self.ctx_size, rows, count
            self._rows[rows, count] = Rows(*sizes, self._room(rows * count))
        return self._rows[rows, count]

    def _room(self, rows: int) -> torch.Tensor:
        """For what steps give, which is taken from there before the next one."""
        if self._hidden is None or len(self._hidden) < rows:
            size = max(rows, graphs.STEP_ROWS[-1]), self.model.config.d_model
            self._hidden = torch.zeros(size, device=self.model.ops.device)
        return self._hidden[:rows]


def _fixes(part: Part) -> bool:
    return any(fixes_basis(layers[0], part.end) for layers in part.groups)
