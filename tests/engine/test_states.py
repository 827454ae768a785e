"""Sequences of models in which layers keep a state: cut, gone back in, forked and found again, with the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelcases import one_thread

from kvcli.errors import DoesNotFit
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.cache.statelayout import CHECKPOINT_BYTES, MOST_CHECKPOINTS, StateLayout, checkpoints_of
from kvcli.runtime.plan.footprint import guess_bytes

PAGE = 16


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module", params=["lfm2", "qwen35", "granitehybrid-dense", "falcon-h1"])
def loaded(request: pytest.FixtureRequest) -> Loaded:
    return Loaded(tiny.make(request.param).path, "")


@pytest.fixture(scope="module")
def whole(loaded: Loaded) -> torch.Tensor:
    with one_thread():
        return loaded.run(Sequence(loaded.pool), IDS)


@torch.inference_mode()
def _fail(loaded: Loaded, seq: Sequence, ids: list[int]) -> None:
    """A step that is computed, and not committed."""
    loaded.model.hidden(Step((seq.reserve(ids),)))


def _guess(loaded: Loaded, seq: Sequence, whole: torch.Tensor, stay: int, steps: int) -> None:
    """Rows up to the end of a page, but for its last one, in some steps, of which only some stay."""
    start, ids = seq.length, IDS[seq.length : -(-(seq.length + 1) // PAGE) * PAGE - 1]
    if not ids or seq.states is None or not seq.states.can_guess():
        return
    seq.certain = start
    for i in range(0, len(ids), each := max(1, len(ids) // (1 + steps))):
        found = loaded.run(seq, ids[i : i + each])
        assert torch.equal(found, whole[seq.length - len(found) : seq.length])
    for length in range(seq.length, start + min(stay, len(ids)) - 1, -1):
        seq.rewind(length)
    seq.certain = None


actions = st.one_of(
    st.tuples(st.just("go on"), st.integers(1, 40)),
    st.tuples(st.just("go back"), st.integers(0, 90)),
    st.tuples(st.just("fork"), st.integers(1, 20)),
    st.tuples(st.just("fail"), st.integers(1, 20)),
    st.tuples(st.just("guess"), st.integers(0, 255)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(actions, max_size=12), st.sampled_from((2, 3, 64)))
def test_rows_are_the_same_whatever_happened(
    loaded: Loaded, whole: torch.Tensor, todo: list[tuple[str, int]], checkpoints: int
) -> None:
    """With room for many checkpoints and for few, and with steps that did not come to their end."""
    layout = loaded.pool.layout
    live, kept = layout.states
    states = live, StateLayout(kept.layers, kept.page_bytes, kept.page_size, checkpoints)
    pool = PagePool(KVLayout(layout.groups, layout.page_size, states, layout.slots))
    seqs = [Sequence(pool)]
    for what, n in todo:
        seq = seqs[0]
        ids = IDS[seq.length : seq.length + n]
        if what == "go back":
            length = seq.rewind_to(n)
            assert length <= n and length == seq.length
        elif what == "fork":
            seqs.insert(0, seq.fork())
            for old in seqs[3:]:
                old.close()
            del seqs[3:]
        elif what == "guess":
            _guess(loaded, seq, whole, n % 16, n // 16)
        elif ids and what == "fail":
            _fail(loaded, seq, ids)
            seq.rewind_to(seq.length)
        elif ids:
            found = loaded.run(seq, ids)
            assert torch.equal(found, whole[seq.length - len(ids) : seq.length])
        pool.check(held for each in seqs for held in each.holds())
    for seq in seqs:
        if ids := IDS[seq.length : seq.length + 5]:
            assert torch.equal(loaded.run(seq, ids), whole[seq.length - len(ids) : seq.length])


def test_the_ends_of_prompts_and_answers_can_be_gone_back_to(loaded: Loaded, whole: torch.Tensor) -> None:
    """To the end of a page before them; a regular checkpoint is not needed."""
    seq = Sequence(loaded.pool)
    for start in range(0, 40, 8):
        loaded.run(seq, IDS[start : start + 8])
    for i in range(40, 70):
        loaded.run(seq, IDS[i : i + 1])
    loaded.run(seq, IDS[70:90])
    assert [seq.rewindable(n) for n in (90, 89, 79, 69, 63, 47, 15)] == [90, 80, 64, 64, 48, 32, 0]
    assert seq.rewind_to(69) == 64 and torch.equal(loaded.run(seq, IDS[64:80]), whole[64:80])
    seq.close()


def test_a_state_that_a_failed_step_changed_is_lost(loaded: Loaded) -> None:
    seq = Sequence(loaded.pool)
    loaded.run(seq, IDS[:40])
    _fail(loaded, seq, IDS[40:43])
    with pytest.raises(ValueError, match="is lost"):
        seq.reserve(IDS[40:43])
    with pytest.raises(ValueError, match="is lost"):
        seq.fork()
    assert seq.rewindable(40) == 32
    seq.close()
    part = seq.reserve(IDS[:3])  # and one that was not begun is not
    assert part.start == 0 and seq.reserve(IDS[:5]).start == 0
    seq.close()


def test_rows_that_cannot_be_taken_back_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork goes on with the live state, and there is no room for another one."""
    loaded = Loaded(tiny.make("lfm2").path, "")
    whole = loaded.run(first := Sequence(loaded.pool), IDS[:30])
    loaded.run(seq := Sequence(loaded.pool), IDS[:16])
    assert seq.states is not None and seq.states.can_guess()
    seq.certain = 16
    loaded.run(seq, IDS[16:20])
    twin = seq.fork()
    with monkeypatch.context() as patched, pytest.raises(DoesNotFit):
        patched.setattr(loaded.pool, "take", Mock(side_effect=DoesNotFit("no room")))
        seq.rewind(18)
    loaded.pool.check(held for each in (first, seq, twin) for held in each.holds())
    assert seq.length == 20
    seq.rewind(18)
    seq.certain = None
    for each in (seq, twin):
        assert torch.equal(loaded.run(each, IDS[each.length : 30]), whole[18 if each is seq else 20 :])
    for each in (first, seq, twin):
        each.close()
    loaded.pool.check([])


@pytest.mark.parametrize(
    ("variant", "backend"),
    [*((variant, "") for variant in ("lfm2-biased", "qwen3next", "nemotron_h")), ("lfm2-biased", "reference"),
     pytest.param("qwen3next", "reference", marks=pytest.mark.thorough)],
)  # fmt: skip
def test_any_of_a_steps_rows_can_be_taken_back(variant: str, backend: str) -> None:
    """The state is to the bit what it is without them, of a step of fifteen rows beside rows of another sequence."""
    loaded = Loaded(tiny.make(variant).path, backend)
    whole = loaded.run(first := Sequence(loaded.pool), IDS[:40])
    first.close()
    for stay in range(16):
        seq, other = Sequence(loaded.pool), Sequence(loaded.pool)
        loaded.run(seq, IDS[:16])
        assert seq.states is not None and seq.states.can_guess()
        seq.certain = 16
        with torch.inference_mode():
            loaded.model.hidden(Step((other.reserve(IDS[:9]), seq.reserve(IDS[16 : 16 + stay] + [5] * (15 - stay)))))
        other.commit(IDS[:9])
        seq.commit(IDS[16 : 16 + stay] + [5] * (15 - stay))
        kept = [rows for _, found in seq.states._journal._inputs.values() for rows in found]
        assert 16 * sum(rows.nbytes for rows in kept) == 15 * guess_bytes(loaded.config)
        assert [seq.rewindable(n) for n in (31, 24, 15)] == [31, 24, 0]
        seq.rewind(16 + stay)
        seq.certain = None
        assert torch.equal(loaded.run(seq, IDS[16 + stay : 40]), whole[16 + stay :])
        assert seq.rewindable(20) == 16 or stay == 15
        loaded.pool.check(held for each in (seq, other) for held in each.holds())
        seq.close()
        other.close()
    loaded.pool.check([])


def test_a_batch_is_its_single_runs(loaded: Loaded, whole: torch.Tensor) -> None:
    one, two = Sequence(loaded.pool), Sequence(loaded.pool)
    loaded.run(two, IDS[:33])
    with torch.inference_mode():
        parts = one.reserve(IDS[:20]), two.reserve(IDS[33:60])
        found = loaded.model.logits(loaded.model.hidden(Step(parts)))
    one.commit(IDS[:20])
    two.commit(IDS[33:60])
    assert torch.equal(found, torch.cat([whole[:20], whole[33:60]]))
    assert torch.equal(loaded.run(one, IDS[20:21]), whole[20:21]) and torch.equal(loaded.run(two, IDS[60:]), whole[60:])
    one.close()
    two.close()


def test_state_bytes_are_those_of_the_plan(loaded: Loaded) -> None:
    layout = loaded.pool.layout
    live, kept = layout.state_arenas or (0, 0)
    mamba = 3 * 128 + 6 * 8 * 16
    sizes = {"lfm2": 2 * 48, "qwen35": 3 * 80 + 4 * 8 * 12, "granitehybrid": mamba, "falcon-h1": mamba}
    each = sizes[loaded.config.arch]  # rows and columns, matrices
    layers = 3 if loaded.config.arch == "falcon-h1" else 2
    assert layout.state_bytes == layers * each * 4
    pool = PagePool(layout)
    seqs = [Sequence(pool) for _ in range(3)]
    for seq in seqs:
        loaded.run(seq, IDS)
    assert pool.committed([live]) == 3 * layout.state_bytes == layout.pool_bytes(0, 1, 3)
    assert pool.used(kept) <= layout.arena_pages(len(IDS), 512, 3)[kept] <= MOST_CHECKPOINTS
    assert checkpoints_of(CHECKPOINT_BYTES) == 3 and checkpoints_of(120 << 20) == 4
