"""PrefixTree, pages held for a writer, and sequences on one pool: what is reused is right, and no page is lost."""

from __future__ import annotations

from unittest import mock

import pytest
from cachecases import SIZE, check_rows, chunks, tiny_layout, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcli.errors import DoesNotFit
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.held import HeldPages
from kvcli.runtime.promptcache.prefix import PrefixTree
from kvcli.runtime.promptcache.prefixpages import common_length


class PrefixMachine(RuleBasedStateMachine):
    """Prompts come that share beginnings of any length; the oracle is the list of each sequence's tokens."""

    budget = 40 * 512

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(layouts, "CHUNK_BYTES", 1)
        self.patch.start()
        self.layout = tiny_layout()
        self.pool = PagePool(self.layout, self.budget)
        self.tree = PrefixTree(self.pool)
        self.pool.lend(self._make_room, self.budget // 2)
        self.live: list[Sequence] = []
        self.writing: list[tuple[HeldPages, dict[tuple[int, int], bytes]]] = []
        self.known: list[list[int]] = [[]]
        self.tokens = iter(range(1, 1 << 24))

    def _make_room(self, arena: int, last_resort: bool) -> None:
        if not self.tree.evict(arena) and last_resort:
            self.tree.clear()
            while self.writing:
                self.written(0)

    def teardown(self) -> None:
        self.tree.clear()
        while self.writing:
            self.written(0)
        for seq in self.live:
            seq.close()
        self.pool.check([])
        self.patch.stop()

    @rule(which=st.integers(0, 99), share=st.floats(0, 1), n=st.integers(1, 50), ubatch=st.sampled_from((7, 16, 40)))
    def prompt(self, which: int, share: float, n: int, ubatch: int) -> None:
        base = self.known[which % len(self.known)]
        prompt = [*base[: int(share * len(base) + 0.5)], *(next(self.tokens) for _ in range(n))]
        seq = Sequence(self.pool)
        length, pages, bases = self.tree.find(prompt[:-1])
        assert length <= max(common_length(other, prompt[:-1]) for other in self.known)
        seq.adopt(prompt[:length], pages, bases)
        assert length == 0 or seq.rewindable(length) == length
        self.live.append(seq)
        for start, end in chunks(length, len(prompt), ubatch):
            try:
                write(seq.reserve(prompt[start:end]), prompt[start:end])
            except DoesNotFit:
                return
            seq.commit(prompt[start:end])
        self.tree.insert(seq, whole=n % 2 == 0)
        held = HeldPages(seq, {}, seq.numbered())
        self.writing.append((held, {key: bytes(held.buffer(key)) for key in seq.numbered()}))
        self.known.append(prompt)

    @precondition(lambda self: self.writing)
    @rule(which=st.integers(0, 99))
    def written(self, which: int) -> None:
        """Whatever became of the sequence meanwhile, what was to be written is what it was."""
        held, expected = self.writing.pop(which % len(self.writing))
        assert {key: bytes(held.buffer(key)) for key in expected} == expected
        held.close()

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99), n=st.integers(1, 20))
    def answer(self, which: int, n: int) -> None:
        """Rows that go into pages which others hold, too."""
        seq = self.live[which % len(self.live)]
        ids = [next(self.tokens) for _ in range(n)]
        try:
            write(seq.reserve(ids), ids)
        except DoesNotFit:
            return
        seq.commit(ids)
        self.tree.insert(seq)
        self.known.append(list(seq.tokens))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 99))
    def close(self, which: int) -> None:
        self.live.pop(which % len(self.live)).close()

    @rule(arena=st.integers(0, 1))
    def evict(self, arena: int) -> None:
        before = self.pool.used(arena)
        freed = self.tree.evict(arena)
        assert self.pool.used(arena) < before if freed else self.pool.used(arena) == before

    @rule()
    def clear(self) -> None:
        self.tree.clear()
        assert list(self.tree.holds()) == []

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        holders = [*self.live, *(held for held, _ in self.writing), self.tree]
        self.pool.check(holding for holder in holders for holding in holder.holds())
        assert self.pool.committed_bytes <= self.budget

    @invariant()
    def every_row_is_right(self) -> None:
        for seq in self.live:
            check_rows(seq, seq.tokens)


PrefixMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
test_machine = pytest.mark.slow(PrefixMachine.TestCase)


def test_a_partly_shared_page_is_copied_on_write() -> None:
    pool = PagePool(tiny_layout())
    tree, seq = PrefixTree(pool), Sequence(pool)
    first = list(range(1, 3 * SIZE + 5))
    write(seq.reserve(first), first)
    seq.commit(first)
    tree.insert(seq)
    twin = Sequence(pool)
    length, pages, bases = tree.find(first[: SIZE * 2 + 9])
    assert length == SIZE * 2 + 9, "sixteen bits and more reuse to the token"
    twin.adopt(first[:length], pages, bases)
    before = pool.used(1)
    more = [900] * 3
    write(twin.reserve(more), more)
    twin.commit(more)
    assert pool.used(1) == before + 1
    check_rows(seq, first)
    check_rows(twin, [*first[:length], *more])
