"""PagePool and Sequence as a state machine: whatever is done, every row that can still be seen is right."""

from __future__ import annotations

from unittest import mock

import pytest
from cachecases import SIZE, check_rows, chunks, tiny_layout, write
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from kvcli.errors import DoesNotFit
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence


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


PagesMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
test_machine = pytest.mark.slow(PagesMachine.TestCase)
