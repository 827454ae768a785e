"""`NextToken`: what all graphs of single tokens have in common, whichever kernels they launch.

What changes from token to token (token, position, page tables) stands in device memory, so one graph serves a whole
range of contexts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kvcli.kernels.gpu import past
from kvcli.kernels.gpu.choosing import summarize
from kvcli.kernels.gpu.seal import seal_step
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pagelist import Layers
from kvcli.runtime.cache.sequence import Part, Sequence
from kvcli.runtime.engine.graph.capture import captured
from kvcli.runtime.engine.graph.legs import graph_legs
from kvcli.runtime.engine.graph.pages import GraphPages
from kvcli.runtime.engine.graph.stepgraph import SMALLEST_BUCKET
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.sealing import fixes_basis
from kvcli.runtime.model.summarizing import missing, settle, summarize_group

SEALING = (0, False)


class NextToken:
    """The model's next-token computation for one sequence at a time: `run` it row after row. `launch` is for subclasses
    to write."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout, self.ctx_size = model, layout, ctx_size
        self.device: torch.device = model.ops.device
        self.token, self.position = (torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(2))
        self.logits = self._floats(model.config.vocab_size)
        self._pages = GraphPages(model, layout, ctx_size, self.position)
        self._legs = graph_legs(layout, 1, self.device)
        # By context, and whether probabilities are noted; SEALING: of the page that got full; -1 - g: of its
        # summaries in group g.
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._next: tuple[Sequence | None, int] = (None, -1)

    def launch(self, bucket: int) -> None:
        """Every kernel of a token, for up to `bucket` rows: from `token` and `position` to `logits`."""
        raise NotImplementedError

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.float32, device=self.device)

    def unbind(self) -> None:
        """Forget which sequence comes next: position, means and scales are set again."""
        self._next = (None, -1)

    @torch.inference_mode()
    def run(self, seq: Sequence, token: int | None = None) -> torch.Tensor:
        """Compute the next row of `seq`, whose token is `token` or, if None, stands in `self.token` -> logits [vocab].

        The row is committed under the id `token`, or -1. Raises DoesNotFit. Nothing waits for the device, except when a
        graph is captured.
        """
        rows = seq.rows_seen
        part = seq.reserve([-1 if token is None else token], answering=True)
        if token is not None:
            self.token.fill_(token)
        bucket = max(SMALLEST_BUCKET, 1 << (rows - 1).bit_length())
        if self._pages.bind(part, bucket):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._graphs.clear()
        if self._next != (seq, part.start):
            self.position.fill_(part.start)
            self._pages.bind_bases(part)
        if self._legs is not None:
            self._legs.bind(part)
        self._summarize(part)
        logits = self._replay(bucket, part)
        if any(fixes_basis(layers[0], part.end) for layers in part.groups):  # this row sees the page in 16 bits yet
            self._pages.fix_bases()
            self._pages.take_bases(part)
        self._seal(part.start + 1)
        seq.commit([-1 if token is None else token])
        self._next = (seq, part.start + 1)
        self.position.add_(1)
        return logits

    def _summarize(self, part: Part) -> None:
        """Make the summaries by which the row's queries choose; those of one page, which got full, by a graph."""
        for g, (layers, group) in enumerate(zip(part.groups, self.layout.groups, strict=True)):
            which = missing(layers)
            if len(which) == 1:
                self._make_summary(g, layers, int(which[0]))
                settle(layers, which)
                continue
            summarize_group(self.model, layers, group.layers, which)
            told = layers[0].entries.summaries
            if told and layers[0].choice and (-1 - g, False) not in self._graphs and self.device.type == "cuda":
                self._make_summary(g, layers, int(told.addresses.argmax()))  # captured before a token waits for it

    def _make_summary(self, group: int, layers: Layers, which: int) -> None:
        """Make that of the entry at this place."""
        self._pages.tables[group].summarize_next(layers, which)
        key, launch = (-1 - group, False), partial(self._launch_summaries, group)
        if self.device.type != "cuda":
            launch()
        else:
            (self._graphs.get(key) or self._capture(key, launch)).replay()

    def _launch_summaries(self, group: int) -> None:
        for pages, means in self._pages.summarized(group):
            keys, _ = past.stage(pages, 0, 1)
            assert pages.summary is not None
            summarize(keys, means, pages.layer * pages.summary.bytes, pages.summary)

    def _replay(self, bucket: int, part: Part) -> torch.Tensor:
        """Compute the part's row, which sees up to `bucket` rows, by the graph for that many."""
        noting = bool(part.watches)
        self._pages.set_noting(noting)
        if self.device.type != "cuda":  # Triton's interpreter
            self._pages.note(part)
            self.launch(bucket)
            return self.logits
        graph = self._graphs.get((bucket, noting))
        if graph is None:
            self._pages.note(None)  # what is added up must not be added twice
            graph = self._capture((bucket, noting), lambda: self.launch(bucket))
        self._pages.note(part)
        graph.replay()
        return self.logits

    def _seal(self, rows: int) -> None:
        """Encode what leaves the 16-bit tail as the last of `rows` rows comes."""
        leaving = (g.newly_sealed(rows - 1, rows) for g in self.layout.groups if g.sealed and g.tail)
        if all(first >= last for first, last in leaving):
            return
        if self.device.type != "cuda":
            self._launch_sealing()
            return
        graph = self._graphs.get(SEALING)
        if graph is None:
            graph = self._capture(SEALING, self._launch_sealing)
        graph.replay()

    def _launch_sealing(self) -> None:
        for pages, layers, strides in self._pages.sealed_runs():
            seal_step(pages, layers=layers, strides=strides)

    def _capture(self, key: tuple[int, bool], launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        self._graphs[key] = graph = captured(launch, self._legs, self._memory)
        return graph

    def dry_run(self) -> None:
        """Launch what a token launches, whatever its context."""
        bucket = SMALLEST_BUCKET
        self.launch(bucket)
        while bucket < self.ctx_size:
            bucket *= 2
            self.launch(bucket)
        if self._pages.notes:
            self._pages.set_noting(True)
            self.launch(bucket)
            self._pages.set_noting(False)
        self._launch_sealing()
        for g in range(len(self.layout.groups)):
            self._launch_summaries(g)
