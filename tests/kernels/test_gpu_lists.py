"""Lists that no policy makes yet, against float64 over what they show: pages compacted to nominal positions, pages of
which some slots are shown, others that are shown to some queries only, and rows that the turned queries score."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gpucases import DEVICE, MORE, GpuCache, attention_over, error, position
from kernelcases import one_thread
from sealedcases import gaussian

from kvcli.kernels import NEVER, Entries, PagedKV
from kvcli.kernels.gpu.attention import Partials, attend
from kvcli.kernels.gpu.combine import combine
from kvcli.kernels.gpu.pages import half_angles
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.reference.rotation import rotate_
from kvcli.runtime.config import FULL, SLIDING, RopeConfig
from kvcli.runtime.engine.graph.pages import PAGES_EACH, CentreAngles, GroupTables
from kvcli.runtime.model.rope import RopeTable

SIZE, HEADS, ROWS = 16, 4, 170
F16, INT8, INT4 = ("f16", "f16"), ("int8", "fp8"), ("int4", "int4")


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def edited(entries: Entries, start: int, t: int, random: np.random.Generator) -> Entries:
    """Some of the pages, closer together, in one entry or in two."""
    columns: list[tuple[int, ...]] = []
    for at in range(len(entries)):
        if random.random() < 0.2:
            continue
        first, turned = (at // 2) * SIZE, int(random.random() < 0.3)
        cut, when = (int(random.integers(n)) for n in (SIZE, t + 1))
        if random.random() < 0.5:
            columns.append((at, first, 0, SIZE, 0, NEVER, turned))
        elif random.random() < 0.5:
            columns += [(at, first, 0, cut, 0, NEVER, turned), (at, first, cut, SIZE, 0, start + when, 0)]
        else:
            columns += [(at, first, cut, SIZE, start + when, NEVER, turned)]
    at, *others = np.array([c for c in columns if c[2] < c[3] and c[4] < c[5]], np.int64).T
    return Entries(entries.addresses[at], *others, [entries.memory[i] for i in at])


def check(kv: PagedKV, cache: GpuCache, start: int, t: int, window: int, graph: bool) -> None:
    shift = np.full(t, 5)  # what turned queries are does not matter here: they are drawn
    cache.kv, cache.angles = kv, cache.rope.centres(kv) if kv.basis.centre is not None else None
    pages, out = cache.on_device(start, t, HEADS, window, 3, shift), None
    if graph:
        group = replace(cache.layout.groups[0], window=window, kind=SLIDING if window else FULL)
        tables = GroupTables(group, SIZE * sum(len(each.entries) for each in kv.classes), position(start), 1)
        angles = tables.centres.of(cache.rope) if tables.centres else None
        part = SimpleNamespace(groups=((cache.there,),), shifts=(shift,), start=start)
        assert tables.bind(part, 0, 3 * SIZE * PAGES_EACH) and not tables.bind(part, 0, 3 * SIZE * PAGES_EACH)
        opened = replace(pages.open, lists=tables.lists) if pages.open else None
        pages = replace(pages, lists=tables.lists, open=opened, angles=angles)
        out = Partials.empty(1, HEADS, pages, tables.parts(3 * SIZE * PAGES_EACH))
    both, made = zip(*(cache.queries(gaussian(t, HEADS, 64, seed=seed), pages) for seed in (3, 4)), strict=True)
    queries = Queries(*(torch.cat([getattr(x, name) for x in made]) for name in ("q", "qc", "qb")))
    expected = attention_over(kv, *both, start, window, 0.0, cache.angles).float()
    if pages.rotated[1]:
        rotate_(expected.view(t, HEADS, -1))
    found = combine(attend(queries, pages, window, out=out), pages)
    assert found is not None and error(found, expected) < 2e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "t", "window", "graph"),
    [
        (F16, 1, 0, False),
        (INT8, 1, 0, True),
        (INT4, 1, 40, True),
        (INT8, 9, 0, False),
        (INT4, 5, 40, False),
        *(
            pytest.param(types, *case, marks=MORE)
            for case, more in (
                ((1, 0, False), (INT8, INT4)),
                ((1, 0, True), (F16, INT4)),
                ((1, 40, True), (F16, INT8)),
                ((9, 0, False), (F16, INT4)),
                ((5, 40, False), (F16, INT8)),
            )
            for types in more
        ),
    ],
)
def test_a_list_made_by_hand(types, t, window, graph):
    cache, random = GpuCache(types, (64, 64), 2), np.random.default_rng(t + window)
    kv = cache.append(gaussian(ROWS, 2, 64) + 2 * gaussian(64, seed=1), gaussian(ROWS, 2, 64, seed=2))
    start = ROWS // SIZE // 2 * SIZE - 8
    classes = [replace(each, entries=edited(each.entries, start, t, random), descriptors={}) for each in kv.classes]
    kv = replace(classes[0], open=classes[1]) if kv.open else classes[0]
    assert any(each.entries.turned.any() for each in kv.classes) and any(
        (each.entries.lo > 0).any() for each in kv.classes
    )
    check(kv, cache, start, t, window, graph)


def test_slots_of_angles() -> None:
    """Page n has slot n, and where there are no more slots the angles of a new page take the place of others."""
    rope = RopeTable(RopeConfig(10000.0, 8))
    centres = CentreAngles(6, 32, torch.device(DEVICE))
    angles = centres.of(rope)
    for pages in ([0, 1, 2], [5, 0], [0, 6, 7, 8], [0, 7, 8, 9, 10, 11], [11, 0], [0, 1, 2, 10_000_000]):
        slots = centres.place(np.array(pages))
        assert len(set(slots.tolist())) == len(pages) and (max(pages) > 5 or slots.tolist() == pages)
        expected = half_angles(rope.at_positions(np.add.outer(np.array(pages) * 32, [7.5, 23.5]).flatten()), "cpu")
        assert torch.equal(angles.cpu().view(6, 2, 8)[slots].flatten(0, 1), expected)
