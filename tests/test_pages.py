"""Pages and sequences: whatever is taken, forked, rewound and dropped, every row that can still be seen is right."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvcli.errors import DoesNotFit
from kvcli.kernels import PagedKV
from kvcli.kernels.store import store
from kvcli.runtime import layout as layouts
from kvcli.runtime.config import FULL, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.engine import Engine
from kvcli.runtime.layout import KVLayout
from kvcli.runtime.pages import PagePool
from kvcli.runtime.sequence import Sequence, Step

SIZE, WINDOW = 16, 21
KINDS = (SLIDING, FULL, SLIDING)  # groups are numbered as they appear: 0 slides, 1 is full


def tiny_layout(window: int = WINDOW, size: int = SIZE) -> KVLayout:
    layers = tuple(LayerConfig(kind, 1, 2, 2, window if kind == SLIDING else 0) for kind in KINDS)
    config = ModelConfig("llama", "tiny", 10, 2, 2, 1, 4096, 1e-5, layers, 1.0)
    return KVLayout.build(config, "f32", "f32", size)


@pytest.fixture
def small_steps() -> Iterator[None]:
    """The pool commits one page at a time."""
    with mock.patch.object(layouts, "CHUNK_BYTES", 1):
        yield


def chunks(start: int, end: int, ubatch: int, size: int = SIZE) -> Iterator[tuple[int, int]]:
    """As the engine cuts a prompt."""
    return Engine.chunks(SimpleNamespace(layout=SimpleNamespace(page_size=size), ubatch=ubatch), start, end)  # type: ignore[arg-type]


def rows(tokens: list[int], start: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the test keeps for tokens at positions start..: [T, 1, 2] keys and values that name both and the layer."""
    token, position = torch.tensor(tokens, dtype=torch.float32), torch.arange(start, start + len(tokens)).float()
    return torch.stack([token, position], 1)[:, None], torch.stack([token + 0.5, position + 1000 * layer], 1)[:, None]


def write(step: Step, tokens: list[int]) -> None:
    for layer in range(len(KINDS)):
        store(*rows(tokens, step.start, layer), step.kv(layer), step.start)


def append(seq: Sequence, tokens: list[int]) -> None:
    write(seq.reserve(tokens), tokens)
    seq.commit(tokens)


def read(kv: PagedKV, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, end) of a layer, float32 [T, 1, 2] each."""
    size, parts = kv.record.page_size, []
    for page in range(start // size, -(-end // size)):
        k, v = kv.slots(page, max(0, start - page * size), min(size, end - page * size))
        parts.append([x[0].contiguous().view(torch.float32) for x in (k, v)])
    k, v = (torch.cat(x)[:, None] for x in zip(*parts, strict=True))
    return k, v


def check_rows(seq: Sequence, tokens: list[int]) -> None:
    """Every row that a query at the sequence's end, or a later one, can see."""
    assert seq.tokens == tokens and seq.length == len(tokens)
    index = {0: 0, 1: 0}
    for layer, kind in enumerate(KINDS):
        group = 0 if kind == SLIDING else 1
        first = max(0, seq.length - WINDOW + 1) if kind == SLIDING else 0
        if first < seq.length:
            kv = seq._view(group)[index[group]]
            for found, expected in zip(read(kv, first, seq.length), rows(tokens[first:], first, layer), strict=True):
                assert torch.equal(found, expected), f"layer {layer} of {len(tokens)} tokens"
        index[group] += 1


class PagesMachine(RuleBasedStateMachine):
    """Sequences on one pool that is too small for all of them; the oracle is the list of each one's tokens."""

    sequences = Bundle("sequences")
    budget = 28 * 512  # pages of 1 x 256 or 2 x 256 bytes

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(layouts, "CHUNK_BYTES", 1)
        self.patch.start()
        self.layout = tiny_layout()
        self.pool = PagePool(self.layout, self.budget)
        self.live: dict[int, tuple[Sequence, list[int]]] = {}
        self.tokens = iter(range(1, 1 << 24))
        self.refused = 0

    def teardown(self) -> None:
        for seq, _ in self.live.values():
            seq.close()
        self.pool.check([])
        assert [self.pool.used(g) for g in (0, 1)] == [0, 0]
        self.patch.stop()

    def _new(self, seq: Sequence, tokens: list[int]) -> int:
        self.live[id(seq)] = seq, tokens
        return id(seq)

    def _append(self, key: int, tokens: list[int], ubatch: int) -> None:
        seq, known = self.live[key]
        done = len(known)
        for start, end in chunks(done, done + len(tokens), ubatch):
            ids = tokens[start - done : end - done]
            try:
                step = seq.reserve(ids)
            except DoesNotFit:
                assert self.pool.committed_bytes > self.budget - 512
                return self._unchanged(seq, known)
            assert step.start == start and step.ids.tolist() == ids
            held = tuple(seq.pages(g) for g in (0, 1))
            assert all(h <= most for h, most in zip(held, self.layout.pages(end, ubatch), strict=True)), held
            write(step, ids)
            seq.commit(ids)
            known += ids

    def _unchanged(self, seq: Sequence, known: list[int]) -> None:
        assert seq.tokens == known and seq.rewindable(len(known)) == len(known)
        assert seq.pages(1) == -(-len(known) // SIZE)
        assert seq.pages(0) <= -(-len(known) // SIZE)

    @initialize(target=sequences)
    def first(self) -> int:
        return self._new(Sequence(self.pool), [])

    @rule(target=sequences)
    def new(self) -> int:
        return self._new(Sequence(self.pool), [])

    @rule(key=sequences, n=st.integers(1, 60), ubatch=st.sampled_from((1, 7, 16, 17, 32, 40)))
    def append(self, key: int, n: int, ubatch: int) -> None:
        self._append(key, [next(self.tokens) for _ in range(n)], ubatch)

    @rule(key=sequences, n=st.integers(1, 40))
    def give_up_a_step(self, key: int, n: int) -> None:
        """Interrupted between reserve and commit: rows were written, and none of them count."""
        seq, known = self.live[key]
        try:
            write(seq.reserve([0] * n), [0] * n)
        except DoesNotFit:
            self._unchanged(seq, known)

    @rule(target=sequences, key=sequences)
    def fork(self, key: int) -> int:
        seq, known = self.live[key]
        used = [self.pool.used(g) for g in (0, 1)]
        twin = seq.fork()
        assert [self.pool.used(g) for g in (0, 1)] == used
        return self._new(twin, list(known))

    @rule(key=sequences, share=st.floats(0, 1), replay=st.booleans(), ubatch=st.sampled_from((1, 9, 64)))
    def rewind(self, key: int, share: float, replay: bool, ubatch: int) -> None:
        seq, known = self.live[key]
        wanted = int(share * len(known))
        kept = seq.rewindable(wanted)
        assert kept in (0, wanted)
        if kept != wanted:
            with pytest.raises(ValueError, match="cannot go back"):
                seq.rewind(wanted)
        seq.rewind(kept)
        undone, known[:] = known[kept:], known[:kept]
        assert seq.pages(1) == -(-kept // SIZE)
        if replay:
            self._append(key, undone, ubatch)

    @rule(key=sequences)
    def drop(self, key: int) -> None:
        seq, known = self.live[key]
        seq.drop()
        assert seq.drop() == 0
        assert seq.pages(1) >= -(-len(known) // SIZE)

    @rule(key=consumes(sequences))
    def close(self, key: int) -> None:
        seq, _ = self.live.pop(key)
        seq.close()
        assert seq.tokens == [] and list(seq.holds()) == []

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        self.pool.check(holding for seq, _ in self.live.values() for holding in seq.holds())
        assert self.pool.used_bytes <= self.pool.committed_bytes <= self.budget
        assert all(self.pool.used(g) <= self.pool.peak(g) for g in (0, 1))

    @invariant()
    def every_row_is_right(self) -> None:
        for seq, known in self.live.values():
            check_rows(seq, known)


PagesMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_machine = PagesMachine.TestCase


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
        a, b = (seq._view(g)[i] for seq in (straight, rewound) for g, i in [((0, 0), (1, 0), (0, 1))[layer]])
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


def test_the_pool_counts():
    layout = tiny_layout()
    pool = PagePool(layout, 1 << 30)
    assert pool.committed_bytes == pool.used_bytes == 0
    page = pool.take(1)
    assert pool.committed_bytes == layout.groups[1].committed_bytes(1) == layouts.CHUNK_BYTES
    assert pool.address(1, page) == pool.page(1, page).data_ptr() and pool.page(1, page).numel() == 256
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
