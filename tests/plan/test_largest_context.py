"""The largest context is true, and what the engine takes of it; on a GPU, and on several."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plancases import CONFIGS, TYPES, WEIGHTS, each_config, layout_of

from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.host import memory
from kvcli.runtime.host.memory import CPU, CUDA, Memory
from kvcli.runtime.plan import footprint, overheads
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.plan.plan import DEFAULT_MARGIN, Budget, Setting, engine_budget, per_rank, plan_for_engine

# --- the largest context ---


@each_config
@pytest.mark.parametrize("kind", ["f32", "f16", "int8", "int4"])
def test_plans_grow_with_the_context(name: str, kind: str) -> None:
    setting = Setting(CONFIGS[name], WEIGHTS)
    layout = layout_of(name, kind)
    totals = [setting.plan(layout, tokens).total for tokens in range(0, 4000, 37)]
    assert all(a <= b for a, b in pairwise(totals)) and totals[0] < totals[-1]


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CONFIGS)), st.sampled_from(TYPES), st.sampled_from((16, 32, 64)),
    st.integers(0, 200 << 20), st.integers(1, 20000),
)  # fmt: skip
def test_the_largest_context_is_the_last_that_fits(name: str, kind: str, size: int, extra: int, limit: int) -> None:
    setting = Setting(CONFIGS[name], WEIGHTS)
    layout = layout_of(name, kind, page_size=size)
    budget = setting.plan(layout, 0).needed + extra
    largest = setting.largest_context(layout, budget, limit)
    assert 0 <= largest <= limit
    assert largest == limit or largest % size == 0
    assert largest == 0 or setting.plan(layout, largest).needed <= budget
    if largest < limit:
        assert setting.plan(layout, min(limit, largest + size)).needed > budget


def test_a_sliding_cache_has_two_slopes() -> None:
    """Past window + chunk only the full layers cost: each further page adds one page of theirs."""
    layout = layout_of("gemma3", "f32")
    sliding, whole = layout.groups
    assert (sliding.kind, whole.kind) == ("sliding", "full")
    early = layout.bytes(640, 512) - layout.bytes(576, 512)
    late = layout.bytes(6400, 512) - layout.bytes(6336, 512)
    assert (early, late) == (sliding.page_bytes + whole.page_bytes, whole.page_bytes)


def test_several_sequences_fit_shorter_contexts() -> None:
    layout = layout_of("llama")
    budget = 2 << 30
    lengths = [
        Setting(CONFIGS["llama"], WEIGHTS, sequences=n).largest_context(layout, budget, 1 << 20) for n in (1, 2, 4)
    ]
    assert lengths[0] > lengths[1] > lengths[2] > 0


# --- the engine's plan ---


def test_the_engine_takes_the_training_context_if_it_fits() -> None:
    planned = plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(), Budget(64 << 30, "free"))
    size, plan, notice = planned.ctx_size, planned.plan, planned.notice
    assert (size, notice) == (32768, "")
    assert plan.kv_bytes == layout_of("llama").pool_bytes(32768, 512)
    assert plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(), None).ctx_size == 32768


def test_the_engine_takes_what_fits_and_says_so() -> None:
    budget = Budget(1200 << 20, "free")
    planned = plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(), budget)
    size, plan, notice = planned.ctx_size, planned.plan, planned.notice
    assert 0 < size < 32768 and size % 64 == 0
    assert plan.needed <= budget.bytes
    assert f"context {size:,} of 32,768 trained" in notice
    with pytest.raises(DoesNotFit) as refused:
        plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(ctx_size=size + 64), budget)
    assert refused.value.exit_code == 4
    assert f"`ctx={size}`;" in refused.value.hint
    assert plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(ctx_size=size), budget).ctx_size == size


def test_an_explicit_context_may_exceed_the_trained_one() -> None:
    assert (
        plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(ctx_size=40000), Budget(64 << 30, "free")).ctx_size
        == 40000
    )


def test_a_model_that_does_not_fit_at_all() -> None:
    with pytest.raises(DoesNotFit, match="without any context"):
        plan_for_engine(CONFIGS["llama"], WEIGHTS, CacheOptions(), Budget(200 << 20, "free"))


def test_margin_is_left_free() -> None:
    setting = Setting(CONFIGS["llama"], WEIGHTS, margin=512 << 20)
    plan = setting.plan(layout_of("llama"), 1024)
    assert plan.needed - plan.total == 512 << 20
    assert plan.row("weights").source == "exact"
    assert plan.row("runtime and libraries").source == "assumed"
    measured = Setting(CONFIGS["llama"], WEIGHTS, runtime_bytes=7).plan(layout_of("llama"), 1024)
    assert measured.row("runtime and libraries").bytes == 7
    assert measured.row("runtime and libraries").source == "measured"


# --- on a GPU ---


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cards = [Memory(CUDA, name, 80 << 30, free << 20, "nvml") for name, free in (("a small card", 9), ("a card", 4096))]
    monkeypatch.setattr(memory, "gpus", lambda: cards)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def test_the_budget_of_a_gpu(gpu: None) -> None:
    found = engine_budget(None, CUDA, 1)
    assert found == Budget(4 << 30, "free on a card (nvml)", DEFAULT_MARGIN, None, CUDA, grows=True)
    overheads.store("a card", Overheads(runtime_bytes=500))
    assert engine_budget("6G", CUDA, 1) == Budget(6 << 30, "allowed by `memory_limit`", 0, 500, CUDA)
    assert engine_budget("0.5", CUDA, 1).bytes == 40 << 30
    assert engine_budget("6G").kind == CPU


def test_an_engine_on_a_gpu_is_planned_as_kv_estimate_plans(gpu: None) -> None:
    model, budget = CONFIGS["llama"], engine_budget(None, CUDA, 1)
    planned = plan_for_engine(model, WEIGHTS, CacheOptions(), budget)
    size, plan, notice = planned.ctx_size, planned.plan, planned.notice
    layout = layout_of("llama").by_layer(True)
    assert (size, notice) == (32768, "") and plan.kv_bytes == layout.pool_bytes(32768, 4096)
    assert plan == Setting(model, WEIGHTS, CUDA, 4096).plan(layout, 32768)
    assert [row.name for row in plan.rows][-3:] == ["CUDA context + libraries", "KV pool", "tables and token ids"]
    assert plan.row("tables and token ids").bytes == 8 * sum(layout.arena_pages(32768, 4096))
    work = footprint.gpu_workspace_bytes(model, 4096) + footprint.logit_bytes(model)
    assert plan.row("workspace").bytes == work
    with pytest.raises(DoesNotFit, match="9 MiB are free on a small card"):
        plan_for_engine(model, WEIGHTS, CacheOptions(), engine_budget(None, CUDA, 0))


@pytest.mark.parametrize("types", ["f16", "int4"])
def test_steps_on_a_gpu_are_as_long_as_the_context_leaves_room_for(types: str) -> None:
    """The context never shrinks for the sake of longer steps, and one that was asked for is taken."""
    model, cache = CONFIGS["llama"], CacheOptions(ctx_size=8192, type_k=types, type_v=types)
    layout = layout_of("llama", types)
    needed = {n: Setting(model, WEIGHTS, CUDA, n).whole(layout, 8192).needed for n in (512, 1024, 2048, 4096)}
    assert needed[512] < needed[1024] < needed[2048] < needed[4096]
    rooms = (needed[4096], 4096), (needed[4096] - 1, 2048), (needed[2048] - 1, 1024), (needed[1024] - 1, 512)
    for room, rows in (*rooms, (needed[512], 512)):
        planned = plan_for_engine(model, WEIGHTS, cache, Budget(room, "free", kind=CUDA))
        assert (planned.setting.step(layout), planned.ctx_size) == (rows, 8192)
        assert planned.plan.needed <= room
    with pytest.raises(DoesNotFit):
        plan_for_engine(model, WEIGHTS, cache, Budget(needed[512] - 1, "free", kind=CUDA))
    with pytest.raises(DoesNotFit):
        plan_for_engine(model, WEIGHTS, replace(cache, ubatch=2048), Budget(needed[1024], "free", kind=CUDA))
    for kind, asked, rows in ((CUDA, 100, 100), (CPU, 0, 512), (CPU, 2048, 2048)):
        budget = Budget(64 << 30, "free", kind=kind)
        assert plan_for_engine(model, WEIGHTS, replace(cache, ubatch=asked), budget).setting.chunk == rows


# --- tensor parallelism ---


def test_heads_are_divided_and_latents_repeated() -> None:
    four = per_rank(CONFIGS["MHA"], 4)
    assert four.layers[0].kv_heads == 2 and four.n_heads == 2
    latent = per_rank(CONFIGS["MLA"], 8)
    assert latent.layers[0].kv_heads == 1
    assert KVLayout.build(latent, "f16", "f16").token_bytes() == layout_of("MLA").token_bytes()
    with pytest.raises(UsageError, match="does not divide"):
        per_rank(CONFIGS["MHA"], 3)
