"""An engine with another context or another policy takes the place of one: rows that are the same under both go over,
and all that follows is as if it had been so from the start. No part of an engine is replaced while it is open."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import DRAWN, open_tiny, run, states
from kernelcases import same_bits
from reusecases import FOUR, Told

from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import FORGET_NOTHING, CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches

SIZE = 16
TEXT = torch.randint(3, 370, (180,), generator=torch.manual_seed(9)).tolist()
SINK, WINDOW = EvictOptions("sink", 0, 5), EvictOptions("window", 20)
NONE = FORGET_NOTHING


def opened(variant: str, types: tuple[str, str], ctx_size: int, evict: EvictOptions) -> Engine:
    return open_tiny(variant, "native", CacheOptions(ctx_size, *types, page_size=SIZE, evict=evict))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types"), [("llama", ("f16", "f16")), ("llama", ("int8", "int4")), ("gemma3", ("f16", "f16"))]
)
@pytest.mark.parametrize(
    ("n", "before", "after", "kept"),
    [
        (70, (80, NONE), (160, NONE), 70),
        (70, (80, NONE), (80, SINK), 63),  # 16 + 48 - 1 rows see everything
        (80, (80, NONE), (80, WINDOW), 35),
        (60, (80, SINK), (160, NONE), 60),
        (150, (80, SINK), (160, NONE), 16),  # the page that is kept
        (150, (80, SINK), (176, SINK), 16),
        (60, (80, SINK), (70, WINDOW), 35),
        (150, (80, EvictOptions("sink", 40, 5)), (160, EvictOptions("sink", 40, 5)), 150),
    ],
)
def test_all_is_as_from_the_start(variant, types, n, before, after, kept):
    engine, other = opened(variant, types, *before), opened(variant, types, *after)
    seq, twin = engine.new_sequence(), other.new_sequence()
    states(engine, seq, TEXT[: n - 1])
    states(engine, seq, TEXT[n - 1 : n])
    engine = engine.reopened(*after)
    seq = engine.carried(seq)
    length = seq.length
    if variant == "gemma3":  # what its sliding windows let go of is gone
        assert length in (0, kept)
    else:
        assert length == (kept if types[0] == "f16" or kept == n else kept // SIZE * SIZE)
    engine.pool.check(seq.holds())
    end = after[0] if after[1] is NONE else len(TEXT)
    whole = states(other, twin, TEXT[:end])
    assert same_bits(states(engine, seq, TEXT[length:end]), whole[length:])
    assert (seq.tokens, seq.evicted) == (twin.tokens, twin.evicted)
    assert (engine.ctx_size, engine.retention, engine.layout) == (other.ctx_size, other.retention, other.layout)
    assert engine.plan.rows == other.plan.rows
    seq.close()
    engine.pool.check([])


def test_on_a_gpu_rows_of_another_policy_are_not_kept():
    """Its kernels round in another way where some rows stay: what gets into the store is what would be computed."""
    terms = opened("llama", ("f16", "f16"), 80, NONE).terms
    setting, budget = replace(terms.setting, kind=CUDA), replace(terms.budget, kind=CUDA)
    terms = replace(terms, setting=setting, budget=budget)
    assert terms.changed(160, NONE).same_rows(None, 70) == 70
    sink = terms.changed(80, SINK)
    assert terms.same_rows(sink.layout.retention, 70) == sink.same_rows(None, 70) == 0


def test_what_cannot_be_changes_nothing():
    engine = open_tiny("llama", "native", CacheOptions(80, page_size=SIZE), "2GiB")
    seq = engine.new_sequence()
    states(engine, seq, TEXT[:70])
    before = vars(engine).copy()
    with pytest.raises(UsageError, match="too short to evict"):
        engine.reopened(40, EvictOptions("sink"))
    with pytest.raises(DoesNotFit, match="a context of 400,000,000 needs"):
        engine.reopened(400_000_000, NONE)
    assert vars(engine) == before and seq.length == 70
    engine = engine.reopened(600, NONE)
    assert engine.notices == ["context 600 is beyond the 512 tokens the model was trained on"]
    assert engine.pool.budget_bytes is not None and engine.plan.tokens == 600


def test_nothing_of_an_engine_is_assigned_while_it_is_open():
    """Nor of its model, but for what is noticed of it."""
    engine = opened("llama", ("int8", "int4"), 80, SINK)
    before, loaded = vars(engine).copy(), vars(engine.loaded).copy()
    with closing(engine.prompt_caches(PromptCacheOptions(memory=True), Told())) as caches:
        for length in (30, 70):
            seq = engine.new_sequence()
            run(engine, seq, TEXT[:length], replace(DRAWN, max_tokens=30), caches=caches)
            seq.close()
    assert_same_objects(vars(engine), before)
    other = engine.reopened(160, NONE)
    assert_same_objects(vars(other.loaded), loaded)
    assert other.pool is not engine.pool and other.layout is not engine.layout


def assert_same_objects(now: dict[str, object], before: dict[str, object]) -> None:
    assert now.keys() == before.keys()
    assert all(now[name] is before[name] for name in now)


def test_find_says_what_restore_will_have(tmp_path: Path):
    """In the sequence, in the pool, in the store, and after a change of what is evicted."""
    engine = opened("llama", ("f16", "f16"), 80, NONE)
    options = PromptCacheOptions(store=tmp_path / "prompts", min_tokens=8, memory=True)

    def found(caches: Caches, seq: Sequence, tokens: list[int]) -> int:
        told = caches.find(seq, tokens)
        seq.close() if seq.length and told == 0 else None
        assert run(engine, seq, [*tokens, 7], FOUR, caches=caches).usage.cache_read_tokens == told
        return told

    seq = engine.new_sequence()
    assert LIVE_ROWS.find(seq, TEXT[:60]) == 0
    run(engine, seq, TEXT[:60], FOUR)
    assert LIVE_ROWS.find(seq, TEXT[:50]) == 50, "rows of the sequence itself"
    with closing(engine.prompt_caches(options, Told())) as caches:
        assert found(caches, seq, TEXT[:60]) == 60
        caches.save(seq)
        seq.close()
        assert found(caches, seq, TEXT[:59]) == 59, "of the pool"
    engine = engine.reopened(160, NONE)
    seq = engine.carried(seq)
    assert seq.length > 59
    seq.close()
    assert LIVE_ROWS.find(seq, TEXT[:60]) == 0
    with closing(engine.prompt_caches(options, Told())) as caches:
        assert found(caches, seq, TEXT[:60]) == 60, "of the store, whatever the context's size"
        assert found(caches, seq, [*TEXT[:30], *TEXT[:20]]) == 30
    for evict, stored, live in ((SINK, 60, 8), (WINDOW, 35, 0)):  # of 63 and of 35 rows that see everything
        engine = engine.reopened(80, evict)
        seq.close()
        seq = engine.new_sequence()
        with closing(engine.prompt_caches(options, Told())) as caches:
            assert found(caches, seq, TEXT[:60]) == stored, "of the store, whatever is evicted for later rows"
            assert caches.find(seq, TEXT[:8]) == live, "the first rows of a window are gone"
    seq.close()
    engine.pool.check([])
