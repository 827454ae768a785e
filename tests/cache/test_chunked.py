"""Layers whose queries see their own chunk alone: who sees which rows, and which pages are held."""

from __future__ import annotations

import numpy as np
import pytest

from kvcli.kernels import NEVER
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.cache.shown import Shown
from kvcli.runtime.config import CHUNKED, FULL, LayerConfig, ModelConfig

SIZE = 16


def layout(chunk: int, types: str = "f32") -> KVLayout:
    layers = (LayerConfig(CHUNKED, 1, 8, 8, chunk), LayerConfig(FULL, 1, 8, 8))
    return KVLayout.build(ModelConfig("llama4", "", 10, 8, 8, 1, 4096, 1e-5, layers, 1.0), types, types, SIZE)


@pytest.mark.parametrize("chunk", (5, 16, 20, 32, 37, 1000))
def test_each_row_is_shown_to_the_queries_of_its_chunk(chunk: int):
    pages = np.array([0, 1, 2, 5, 6])
    shown = Shown.whole(pages, SIZE).chunked(chunk, SIZE)
    assert np.all(np.diff(shown.page) >= 0) and np.all(shown.lo < shown.hi)
    seen = {}
    for page, lo, hi, since, until in zip(shown.page, shown.lo, shown.hi, shown.since, shown.until, strict=True):
        for row in range(page * SIZE + lo, page * SIZE + hi):
            assert row not in seen and since <= row
            seen[row] = until
    assert seen == {row: (row // chunk + 1) * chunk for page in pages for row in range(page * SIZE, (page + 1) * SIZE)}


def test_what_is_seen_no_longer_stays_so():
    zeros = np.zeros(2, np.int64)
    shown = Shown(np.array([0, 1]), zeros, zeros + SIZE, zeros, np.array([7, NEVER]), zeros).chunked(20, SIZE)
    assert shown.until.tolist() == [7, 20, 40] and shown.lo.tolist() == [0, 0, 4]


@pytest.mark.parametrize("types", ("f32", "int8"))
@pytest.mark.parametrize("chunk", (20, 32, 5))
def test_pages_of_chunks_that_are_over_are_let_go_of(chunk: int, types: str):
    made = layout(chunk, types)
    pool, group = PagePool(made), made.groups[0]
    seq, most = Sequence(pool), [0] * len(made.arenas)
    for step in (30, 1, 1, 17, 40, 3, 1, 60):
        seq.reserve([1] * step)
        held = [seq.pages(arena) for arena in range(len(made.arenas))]
        most = [max(x) for x in zip(most, held, strict=True)]
        seq.commit([1] * step)
        kv, at = seq.views()[0][0], seq.length
        shown = sum(int(each.entries.shows(np.array([at])).sum()) for each in kv.classes)
        own = at % SIZE > 0  # its page is there
        assert shown == at - at // chunk * chunk + own, "a query sees its chunk up to itself"
        assert group.rows_seen(at) == (at - 1) % chunk + 1 and group.first_page(at) == at // chunk * chunk // SIZE
    planned = made.arena_pages(seq.length, 60 + SIZE)  # steps begin in the middle of pages
    assert all(n <= limit for n, limit in zip(most, planned, strict=True))
    assert seq.rewindable(seq.length - 1) in (0, seq.length - 1)
