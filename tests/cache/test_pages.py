"""Pages and sequences by example: sharing, copying on write, windows, full pools."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from cachecases import SIZE, WINDOW, SmallPool, append, check_rows, read, tiny_layout, write

from kvcli.errors import DoesNotFit
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import NO_PAGE, PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig


@pytest.fixture
def small_steps() -> Iterator[None]:
    """The pool commits one page at a time."""
    with mock.patch.object(layouts, "CHUNK_BYTES", 1):
        yield


def test_replay_gives_the_same_bytes(small_steps: None):
    pool, tokens = PagePool(tiny_layout()), list(range(1, 61))
    straight, rewound = Sequence(pool), Sequence(pool)
    append(straight, tokens)
    append(rewound, tokens[:50])
    rewound.rewind(37)
    append(rewound, [777] * 9)
    rewound.rewind(37)
    append(rewound, tokens[37:])
    for layer in range(3):
        a, b = (seq.views()[g][i] for seq in (straight, rewound) for g, i in [((0, 0), (1, 0), (0, 1))[layer]])
        for x, y in zip(read(a, 40, 60), read(b, 40, 60), strict=True):
            assert torch.equal(x, y)


def test_a_shared_page_is_copied_once_and_by_the_one_who_writes(small_steps: None):
    pool = PagePool(tiny_layout())
    seq = Sequence(pool)
    append(seq, list(range(20)))
    twin = seq.fork()
    assert (pool.used(1), [pool.refcount(1, p) for g, p in seq.holds() if g == 1]) == (2, [2, 2])
    append(twin, [100])
    assert pool.used(1) == 3
    append(seq, [200])  # alone with its page now: no copy
    assert pool.used(1) == 3
    check_rows(seq, [*range(20), 200])
    check_rows(twin, [*range(20), 100])
    twin.close()
    assert pool.used(1) == 2


def test_a_fork_at_a_page_edge_shares_all_and_copies_nothing(small_steps: None):
    pool = PagePool(tiny_layout())
    seq = Sequence(pool)
    append(seq, list(range(32)))
    twin = seq.fork()
    append(twin, [1])
    append(seq, [2])
    assert pool.used(1) == 4
    check_rows(seq, [*range(32), 2])
    check_rows(twin, [*range(32), 1])


def test_a_fork_of_an_unfinished_step_does_not_share_its_rows(small_steps: None):
    pool = PagePool(tiny_layout())
    seq = Sequence(pool)
    append(seq, list(range(16)))
    write(seq.reserve([9] * 10), [9] * 10)  # never committed
    twin = seq.fork()
    append(seq, list(range(50, 60)))
    append(twin, list(range(70, 80)))
    check_rows(seq, [*range(16), *range(50, 60)])
    check_rows(twin, [*range(16), *range(70, 80)])


@pytest.mark.parametrize("extra", (0, 256))
def test_a_full_pool_leaves_the_sequence_as_it_was(small_steps: None, extra: int):
    """`extra` decides in which group the pool ends: one page of the full group is 256 bytes, of the other 512."""
    pool = PagePool(tiny_layout(), 3 * 512 + 2 * 256 + extra)
    seq = Sequence(pool)
    append(seq, list(range(30)))
    with pytest.raises(DoesNotFit, match="pool is full"):
        seq.reserve(list(range(40)))
    assert seq.tokens == list(range(30)) and (seq.pages(0), seq.pages(1)) == (2, 2)
    check_rows(seq, list(range(30)))
    append(seq, [30, 31])  # what still fits goes on
    check_rows(seq, list(range(32)))


def test_a_copy_that_does_not_fit_leaves_no_page_behind(small_steps: None):
    """The sliding group gets its pages, then the full group has no page for the copy."""
    pool = PagePool(tiny_layout(), 4 * 512 + 2 * 256)
    seq = Sequence(pool)
    append(seq, list(range(20)))
    twin = seq.fork()
    with pytest.raises(DoesNotFit):
        twin.reserve([1] * 13)  # a copy and a new page for group 0, which fit; a copy for group 1, which does not
    pool.check([*seq.holds(), *twin.holds()])
    assert (twin.pages(0), twin.pages(1)) == (2, 2)
    check_rows(twin, list(range(20)))
    check_rows(seq, list(range(20)))


def test_windows_slide_and_come_back_only_as_far_as_their_pages_do(small_steps: None):
    seq = Sequence(PagePool(tiny_layout()))
    append(seq, list(range(70)))
    assert seq.pages(0) == 5 and seq.drop() == 3  # a query at 70 sees rows 50.. of page 3
    assert seq.rewindable(68) == 68  # sees 48..
    assert seq.rewindable(67) == 0  # would see 47
    assert seq.rewindable(1000) == 70 and seq.rewindable(0) == 0
    seq.rewind(0)
    assert (seq.pages(0), seq.pages(1), seq.tokens) == (0, 0, [])
    append(seq, [1, 2, 3])
    check_rows(seq, [1, 2, 3])


def test_chunks_by_layer():
    """Each layer's records of a chunk stand together, and a chunk comes whole or not at all."""
    with mock.patch.object(layouts, "RUN_BYTES", 600):
        layout = tiny_layout().by_layer(True)
        group = layout.groups[1]
        per_chunk = -(-600 // group.layer_bytes)
        assert group.pages_per_chunk == per_chunk > 1 and group.layer_stride == per_chunk * group.layer_bytes
        pool = PagePool(layout, sum(g.committed_bytes(1) for g in layout.groups) + group.page_bytes)
        pages = [pool.take(1) for _ in range(per_chunk)]
        for page, address in zip(pages, pool.addresses(1, pages).tolist(), strict=True):
            found = [layer.data_ptr() for layer in pool.page(1, page)]
            assert found == [address + i * group.layer_stride for i in range(len(group.layers))]
        pool.take(0)
        with pytest.raises(DoesNotFit):  # there is room for a page more, and not for a chunk
            pool.take(1)
        assert pool.committed_bytes == pool.budget_bytes - group.page_bytes
        for page in pages:
            pool.release(1, page)
        seq = Sequence(pool)
        append(seq, list(range(20)))
        check_rows(seq, list(range(20)))


def test_the_pool_counts():
    layout = tiny_layout()
    pool = PagePool(layout, 1 << 30)
    assert pool.committed_bytes == pool.used_bytes == 0
    page = pool.take(1)
    assert pool.committed_bytes == layout.groups[1].committed_bytes(1) == layouts.CHUNK_BYTES
    assert pool.addresses(1, [page, NO_PAGE]).tolist() == [pool.page(1, page).data_ptr(), 0]
    assert pool.page(1, page).numel() == 256
    pool.page(1, page).fill_(7)
    pool.retain(1, page)
    twin = pool.copy(1, page)
    assert torch.equal(pool.page(1, twin), pool.page(1, page)) and twin != page
    assert (pool.refcount(1, page), pool.refcount(1, twin), pool.used(1), pool.used_bytes) == (2, 1, 2, 512)
    pool.check([(1, page), (1, page), (1, twin)])
    for wrong in (
        [(1, page), (1, twin)],
        [(1, page)] * 3 + [(1, twin)],
        [(1, page), (1, page), (1, twin), (1, twin + 1)],
    ):
        with pytest.raises(ValueError, match="references"):
            pool.check(wrong)
    for each in (page, page, twin):
        pool.release(1, each)
    assert (pool.used(1), pool.peak(1), pool.committed_bytes) == (0, 2, layouts.CHUNK_BYTES)
    for refused in (pool.release, pool.retain):
        with pytest.raises(ValueError, match="free"):
            refused(1, page)


def test_the_last_pages_of_a_budget_are_not_wasted():
    """Memory is committed in large steps, but a budget that ends within one is used to its end."""
    layout = tiny_layout()
    pool = PagePool(layout, 5 * 256 + 255)
    assert len({pool.take(1) for _ in range(5)}) == 5
    with pytest.raises(DoesNotFit):
        pool.take(1)


def test_utilization_is_the_share_of_rows_that_are_of_use() -> None:
    """Of full layers and of windows, by bytes; what a window has left behind counts for nothing."""
    pool = SmallPool(tiny_layout())
    seq = Sequence(pool)
    assert seq.page_utilization is None
    append(seq, list(range(5)))
    assert seq.page_utilization == 5 / SIZE
    append(seq, list(range(5, 59)))
    sliding, full = (pool.layout.arenas[g].page_bytes for g in (0, 1))
    held = sum(arena == 0 for arena, _ in seq.holds())
    used = (WINDOW - 1) * sliding + 59 * full  # the next token sees 20 rows before it
    assert held * SIZE > 59 - WINDOW and seq.page_utilization == used / (SIZE * (held * sliding + 4 * full))
    seq.close()
    assert pool.layout.contiguous_bytes(100) == 100 * pool.layout.token_bytes()


@pytest.mark.parametrize("k", ["f16", "int4"])
def test_utilization_where_rows_are_evicted(k: str) -> None:
    layer = LayerConfig(FULL, 1, 32, 32, 0)
    config = ModelConfig("llama", "tiny", 10, 64, 64, 1, 4096, 1e-5, (layer,), 1.0)
    plain = KVLayout.build(config, k, k, SIZE)
    assert [plain.arenas[0].rows_in_use(n, 40) for n in range(4)] == [16, 16, 8, 0]
    arena = plain.evicting(Rolling(4, 32, SIZE)).arenas[0]
    assert [arena.rows_in_use(n, 40) for n in range(3)] == [16, 16, 8], "nothing is gone yet"
    assert [arena.rows_in_use(n, 100) for n in range(7)] == [4, 0, 0, 0, 16, 16, 4]
    assert [plain.evicting(Rolling(20, 32, SIZE)).arenas[0].rows_in_use(n, 100) for n in range(3)] == [16, 4, 0]
