"""Eviction on a GPU: what kernels make of lists with gaps, and of those of a token graph, is what plain torch makes of
them. Pages are full of NaN where nothing was written, and so is the page that unused places of its tables lead to.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpucases import DEVICE, OPS, Layer, error, memory_of, position
from kernelcases import one_thread

from kvcli.kernels.gpu.attention import Partials, attend
from kvcli.kernels.gpu.combine import combine
from kvcli.kernels.gpu.pages import DevicePages
from kvcli.kernels.gpu.rows import LOG2_E
from kvcli.kernels.gpu.seal import seal, seal_step
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.engine.graph.pages import PAGES_EACH, GroupTables
from kvcli.runtime.plan import footprint

SIZE, FAR = 16, 10_000_000
F16, INT8, INT4 = (("f16", "f16"), ("int8", "int8"), ("int4", "int4"))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class Evicting(Layer):
    """A layer whose old rows are evicted; the rows of all steps but the last come from the reference."""

    def fill(self, steps: tuple[int, ...]) -> None:
        for t in steps:
            at = self.cache.seq.length
            k = self.random(t, self.kv_heads, self.dims[0]) + self.mean
            OPS.rope_(k, *self.cache.rope.at(at, t))
            self.cache.append(k, self.random(t, self.kv_heads, self.dims[1]))

    @property
    def mean(self) -> torch.Tensor:
        return 2 * torch.randn(self.dims[0], generator=torch.manual_seed(1))

    def far(self) -> None:
        """As if FAR tokens had gone by; what is kept stays."""
        self.cache.seq.tokens.extend([0] * FAR)
        self.cache.seq.drop()

    def begin(self, t: int, graph: bool, splits: int = 3) -> tuple[int, np.ndarray | None, DevicePages]:
        """Where the last step starts, the shifts of its rows, and its pages."""
        cache, start = self.cache, self.cache.seq.length
        part = self.step(t)
        kv, shift = part.kv(0), part.shifts[0]
        if kv.basis.centre is not None:
            cache.angles = cache.rope.centres(kv)
        pages = cache.on_device(start, t, self.heads, 0, splits, shift)
        return start, shift, self.in_a_graph(start, shift, pages, splits) if graph else pages

    def in_a_graph(self, start: int, shift: np.ndarray | None, pages: DevicePages, splits: int) -> DevicePages:
        """The same pages as a token graph has them, with no more room than they need."""
        cache, bucket = self.cache, splits * SIZE * PAGES_EACH
        poison = self.poison = torch.full((1 << 16,), 0xFF, dtype=torch.uint8, device=DEVICE)
        tables = GroupTables(cache.layout.groups[0], SIZE * len(cache.there.entries), position(start), 1)
        tables.head.fill_(poison.data_ptr())
        tables.lists.table.fill_(poison.data_ptr())
        angles = tables.centres.of(cache.rope) if tables.centres else None
        tables.bind(SimpleNamespace(groups=((cache.there,),), shifts=(shift,), start=start), 0, bucket)
        self.partials = Partials.empty(1, self.heads, pages, tables.parts(bucket))
        opened = replace(pages.open, lists=tables.lists) if pages.open else None
        return replace(pages, lists=tables.lists, open=opened, angles=None if pages.angles is None else angles)

    def seal(self, start: int, t: int) -> None:
        """What the last step seals, by the kernel."""
        group = self.cache.layout.groups[0]
        first, last = (max(group.sealed_rows(n), group.sinks * SIZE) for n in (start, start + t))
        if group.sealed and first < last:
            if t == 1:
                seal_step(self.pages, by_row=not group.tail)
            else:
                seal(self.pages, first, last)


def check(layer: Evicting, t: int, graph: bool, splits: int = 3, softcap: float = 0.0) -> np.ndarray | None:
    """The last step's queries and what they get, against plain torch over the same pages; returns their shifts."""
    cache, (start, shift, pages) = layer.cache, layer.begin(t, graph, splits)
    qkv = layer.projections(t)
    queries = layer.prepare(qkv, start, pages)
    _, q, _, _ = layer.rows(qkv, start)
    turned_q = q if shift is None else layer.turned_queries(qkv, start, shift)
    assert queries.q.shape[0] == t * (1 + pages.lists.turns) and pages.lists.turns >= (shift is not None)
    for found, expected in zip(queries.q.split(t), (q, turned_q), strict=False):
        assert error(found.float(), expected * layer.scale * LOG2_E) < 4e-4
    layer.seal(start, t)
    partials = attend(queries, pages, softcap=softcap, out=layer.partials if graph else None)
    assert partials.out.shape[2] <= footprint.PREFILL_PARTS[pages.lists.turns] + (t == 1) * splits
    found = combine(partials, pages)
    cache.back()
    expected = OPS.attention(q, cache.kv, start, 0, layer.scale, softcap, cache.angles, turned_q)
    if pages.rotated[1]:
        OPS.rotate_(expected.view(t, layer.heads, -1))
    assert found is not None and error(found, expected) < 2e-3
    return shift


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "heads", "retention", "steps", "more", "graph"),
    [
        (F16, (2, 4), (0, 40), (100,), {}, True),
        (F16, (1, 3), (4, 40), (150, 21), {}, False),
        (F16, (1, 1), (70, 40), (230,), {}, True),
        (INT8, (1, 3), (4, 40), (100,), {}, True),
        (INT8, (2, 4), (70, 40), (150, 21), {}, False),
        (INT8, (1, 1), (70, 40), (150, 21), {}, True),
        (INT8, (1, 2), (64, 40), (150, 3), {"sinks": 2}, True),
        (INT8, (1, 2), (20, 40), (150, 3), {"sinks": 5}, False),
        (INT8, (1, 1), (70, 40), (150, 21), {"tail": 0}, True),
        (INT4, (1, 2), (0, 40), (100,), {}, True),
        (INT4, (1, 2), (70, 40), (150,), {"sinks": 2}, True),
        (("fp8", "int6"), (1, 2), (40, 40), (150,), {"sinks": 0}, True),
    ],
)
def test_one_query(types, heads, retention, steps, more, graph):
    layer = Evicting(types, (64, 64), *heads, norm=True, retention=Rolling(*retention, SIZE), **more)
    layer.fill(steps)
    assert layer.cache.seq.evicted
    check(layer, 1, graph)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "keep", "rows", "more"),
    [
        (F16, 70, 3, {}),
        (F16, 70, 75, {}),
        (F16, 70, 126, {}),
        (F16, 32, 60, {}),
        (INT8, 70, 30, {}),
        (INT8, 70, 76, {}),
        (INT8, 70, 118, {}),
        (INT8, 70, 119, {}),
        (INT8, 32, 60, {}),
        (INT8, 70, 78, {"tail": 0}),
        (INT8, 70, 110, {"tail": 0}),
    ],
)
def test_before_and_at_the_first_eviction(types, keep, rows, more):
    """Kept pages that are the query's own, that are not there yet, and from which nothing is gone yet."""
    layer = Evicting(types, (64, 64), 1, 2, retention=Rolling(keep, 40, SIZE), **more)
    layer.fill((rows,))
    shift = check(layer, 1, True, splits=1)
    assert (0 if shift is None else shift[0]) == (10 if rows >= 119 else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "heads", "retention", "steps", "t", "more"),
    [
        (F16, (1, 2), (0, 40), (100,), 20, {}),
        (F16, (1, 4), (20, 40), (68,), 5, {}),
        (F16, (1, 3), (70, 40), (113,), 8, {}),
        (INT8, (1, 2), (4, 40), (100,), 5, {}),
        (INT8, (1, 1), (70, 40), (113, 3), 13, {"sinks": 2}),
        (INT8, (1, 1), (20, 40), (100,), 6, {"tail": 0}),
        (INT4, (1, 2), (20, 40), (68,), 9, {}),
    ],
)
def test_blocks_of_queries(types, heads, retention, steps, t, more):
    """Within a block some see more than others."""
    layer = Evicting(types, (64, 64), *heads, retention=Rolling(*retention, SIZE), **more)
    layer.fill(steps)
    shift = check(layer, t, False, splits=1, softcap=3.0)
    assert (len(set(shift)) > 1) if retention[0] else shift is None


@pytest.mark.slow
@pytest.mark.parametrize(("types", "t", "graph"), [(F16, 1, True), (INT8, 1, True), (INT4, 5, False)])
def test_positions_beyond_ten_million(types, t, graph):
    layer = Evicting(types, (64, 64), 1, 2, retention=Rolling(20, 40, SIZE))
    layer.fill((48,))
    layer.far()
    layer.fill((48, 35))
    check(layer, t, graph)


@pytest.mark.parametrize(("types", "more"), [(INT8, {}), (("fp8", "int8"), {}), (INT8, {"tail": 0})])
def test_sealing_in_a_graph(types, more):
    """The same bytes as the reference."""
    sealed = []
    for kernel in (True, False):
        layer = Evicting(types, (64, 64), 1, 1, retention=Rolling(20, 40, SIZE), **more)
        cache = layer.cache
        layer.fill((150, 9))
        start, shift, _ = layer.begin(1, True)
        OPS.store(layer.random(1, 1, 64), layer.random(1, 1, 64), cache.kv, start)
        if kernel:
            pages = layer.in_a_graph(start, shift, cache.on_device(start), 1)  # with the row just stored
            seal_step(pages, by_row=not cache.layout.groups[0].tail)
            cache.back()
        else:
            OPS.seal(cache.kv, start - (15 if cache.layout.groups[0].tail else 0), start + 1, cache.angles)
        sealed.append([p for p in memory_of(cache.kv) if p is not None])
    for a, b in zip(*sealed, strict=True):
        assert (a != b).float().mean() <= (0 if DEVICE == "cpu" else 0.01)
