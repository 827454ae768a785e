"""Plans: predicted bytes are allocated bytes, the largest context is true, weights count as they are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcli.codecs import CODECS
from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache.grouplayout import CHUNK_BYTES
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import FULL, LATENT, RECURRENT, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.host import memory
from kvcli.runtime.host.memory import CPU, CUDA, Memory
from kvcli.runtime.plan import footprint, overheads
from kvcli.runtime.plan.footprint import WeightBytes
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.plan.plan import DEFAULT_MARGIN, Budget, Setting, engine_budget, per_rank, plan_for_engine

WEIGHTS = WeightBytes(100_000_000, 5_000_000, 90_000_000, "exact")


def config(layers: list[LayerConfig], heads: int = 8, trained: int = 32768) -> ModelConfig:
    return ModelConfig("llama", "x", 4096, 512, 1536, heads, trained, 1e-5, tuple(layers), 1.0)


def full(n: int, heads: int, dim_k: int, dim_v: int | None = None) -> list[LayerConfig]:
    return [LayerConfig(FULL, heads, dim_k, dim_k if dim_v is None else dim_v)] * n


CONFIGS = {
    "llama": config(full(30, 3, 64), 9),
    "gemma3": config(
        [LayerConfig(FULL, 1, 256, 256) if i % 6 == 5 else LayerConfig(SLIDING, 1, 256, 256, 512) for i in range(18)],
        4,
    ),
    "large window": config([*full(1, 2, 96), *[LayerConfig(SLIDING, 2, 96, 96, 1100)] * 2]),
    "odd window": config([*full(1, 1, 72, 40), LayerConfig(SLIDING, 1, 72, 40, 100)]),
    "MLA": config([LayerConfig(LATENT, 1, 64, 512)] * 3),
    "MQA": config(full(2, 1, 64), 71),
    "MHA": config(full(2, 8, 80)),
    "hybrid": config([LayerConfig(RECURRENT, 0, 0, 0, state_bytes=777), *full(1, 2, 128)] * 2),
    "shared": config([*full(2, 2, 64), LayerConfig(FULL, 2, 64, 64, shares_kv_with=1)]),
}
each_config = pytest.mark.parametrize("name", CONFIGS)
TYPES = tuple(CODECS)


def layout_of(name: str, type_k: str = "f16", type_v: str | None = None, page_size: int = 64, **more: int) -> KVLayout:
    return KVLayout.build(CONFIGS[name], type_k, type_v or type_k, page_size, **more)


# --- predicted == allocated ---


def steps(layout: KVLayout, tokens: int, chunk: int) -> Iterator[int]:
    """Steps as the engine cuts them, with one begun behind the sinks, and one where a window is just full: then most is
    held."""
    size = layout.page_size
    window = max((g.window for g in layout.groups), default=0)
    turns = sorted((layout.groups[0].sinks * size, -(-max(0, window - 1) // size) * size))
    start = 0
    while start < tokens:
        end = min([tokens, *(turn for turn in turns if turn > start)])
        stop = min(end, start + chunk, (start // size + -(-chunk // size)) * size)
        yield stop - start
        start = stop


def allocated(layout: KVLayout, tokens: int, chunk: int, sequences: int = 1) -> int:
    """Bytes that a real pool commits for sequences of `tokens`, with the open pages of sealed groups."""
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence

    pool = PagePool(layout)
    made = []
    for _ in range(sequences):
        seq = Sequence(pool)
        made.append(seq)
        for n in steps(layout, tokens, chunk):
            ids = [0] * n
            seq.reserve(ids)
            seq.commit(ids)
    assert all(seq.length == tokens for seq in made)
    return pool.committed_bytes + _room_for_checkpoints(pool, tokens, chunk, sequences)


def _room_for_checkpoints(pool: Any, tokens: int, chunk: int, sequences: int) -> int:
    """Bytes that are planned for checkpoints of other prompts, and for a live state that was not needed yet."""
    layout = pool.layout
    if layout.state_arenas is None:
        return 0
    pages, room = layout.arena_pages(tokens, chunk, sequences), 0
    for arena in layout.state_arenas:  # a step that ends with a page leaves its state in a checkpoint alone
        free = pages[arena] - pool.peak(arena)
        assert free >= 0
        room += free * layout.arenas[arena].page_bytes
    return room


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, int, int]:
    """A layout, a chunk and a context at or beside one of the layout's boundaries."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    type_k, type_v = draw(st.sampled_from(TYPES)), draw(st.sampled_from(TYPES))
    size = draw(st.sampled_from((16, 32, 64)))
    chunk = draw(st.sampled_from((1, 16, 100, 512)))
    tail, sinks = draw(st.sampled_from(((1, 1), (1, 0), (1, 3), (0, 1), (0, 2))))
    layout = layout_of(name, type_k, type_v, size, tail=tail, sinks=sinks)
    window = max((g.window for g in layout.groups), default=0)
    per_chunk = layout.groups[0].pages_per_chunk
    marks = [size, 3 * size, window, window + chunk, window + chunk + size, (per_chunk % 50) * size]
    tokens = max(1, draw(st.sampled_from(marks)) + draw(st.sampled_from((-1, 0, 1))))
    return layout, chunk, tokens


@pytest.mark.slow
@settings(max_examples=60)
@given(cases())
def test_predicted_bytes_are_allocated(case: tuple[KVLayout, int, int]) -> None:
    layout, chunk, tokens = case
    assert allocated(layout, tokens, chunk) == layout.pool_bytes(tokens, chunk)


@each_config
@pytest.mark.parametrize("kind", TYPES)
def test_predicted_bytes_are_allocated_for_every_type(name: str, kind: str) -> None:
    layout = layout_of(name, kind)
    assert allocated(layout, 700, 128) == layout.pool_bytes(700, 128)


@pytest.mark.parametrize("name", ["llama", "gemma3", "odd window"])
def test_predicted_bytes_of_several_sequences(name: str) -> None:
    layout = layout_of(name, "int8", "int4", 16)
    assert allocated(layout, 333, 64, sequences=3) == layout.pool_bytes(333, 64, sequences=3)


@pytest.mark.parametrize("kind", ("f32", "int4"))
@pytest.mark.parametrize(("tail", "sinks"), ((1, 1), (1, 0), (1, 4), (0, 1), (0, 4), (1, 20), (0, 20)))
def test_a_shared_prefix_is_allocated_once(kind: str, tail: int, sinks: int) -> None:
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence

    layout = layout_of("llama", kind, page_size=16, tail=tail, sinks=sinks)
    pool = PagePool(layout)
    first = Sequence(pool)
    for n in steps(layout, 150, 16):
        first.reserve([0] * n)
        first.commit([0] * n)
    others = [first.fork() for _ in range(9)]
    for seq in (first, *others):
        for n in (10, 5):  # to the end of the page, and on
            seq.reserve([1] * n)
            seq.commit([1] * n)
    planned = layout.arena_pages(165, 16, sequences=10, shared=150)
    assert [pool.peak(a) for a in range(len(layout.arenas))] == list(planned)
    assert pool.committed_bytes == layout.pool_bytes(165, 16, sequences=10, shared=150)
    assert pool.committed_bytes < layout.pool_bytes(165, 512, sequences=10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "MHA", "MQA"])
@pytest.mark.parametrize(("kind", "least"), [("int8", 704), ("int4", 384)])
def test_a_smaller_type_takes_less_at_every_context(name: str, kind: str, least: int) -> None:
    """From `least` tokens on, and never two pages more: a short prompt is open and sealed at the same time."""
    setting = Setting(CONFIGS[name], WEIGHTS)
    layout, base = layout_of(name, kind), layout_of(name)
    allowed = 2 * sum(g.page_bytes for g in base.groups)
    for tokens in range(1, 4096, 13):
        more = layout.bytes(tokens, setting.step(layout)) - base.bytes(tokens, setting.step(base))
        assert more < (0 if tokens >= least else allowed), tokens


def test_memory_is_committed_in_steps() -> None:
    group = layout_of("llama").groups[0]
    assert group.pages_per_chunk == max(1, CHUNK_BYTES // group.page_bytes) == 1
    small = layout_of("MQA").groups[0]
    assert small.pages_per_chunk == CHUNK_BYTES // small.page_bytes > 10
    assert small.committed_bytes(0) == 0
    assert small.committed_bytes(1) == small.committed_bytes(small.pages_per_chunk) <= CHUNK_BYTES
    assert small.committed_bytes(small.pages_per_chunk + 1) == 2 * small.committed_bytes(1)


# --- layouts ---


def test_small_windows_stay_in_16_bits() -> None:
    small, large = layout_of("gemma3", "int4"), layout_of("large window", "int4")
    assert {g.kind: g.codec_k.name for g in small.groups} == {"full": "int4", "sliding": "f16"}
    assert {g.kind: g.codec_v.name for g in large.groups} == {"full": "int4", "sliding": "int4"}
    assert {g.codec_k.name for g in layout_of("gemma3", "f32").groups} == {"f32"}
    assert len(small.arenas) == len(small.groups) + 1  # tail and sinks of the full group only


def test_latent_rows_are_kept_once() -> None:
    layout = layout_of("MLA")
    assert layout.token_bytes() == 3 * 576 * 2
    each = 512 + 2 + 64 * 2  # a latent with its scale, and in 16 bits what RoPE turns
    assert layout_of("MLA", "int8", "int4").token_bytes() == layout_of("MLA", "int8").token_bytes() == 3 * each


def test_recurrent_layers_keep_a_constant() -> None:
    layout = layout_of("hybrid")
    assert layout.state_bytes == 2 * 777
    assert [len(g.layers) for g in layout.groups] == [2]
    assert layout.bytes(64, 64) - layout.pool_bytes(0, 64) == 1554 + layout.groups[0].page_bytes


def test_layers_that_share_are_counted_once() -> None:
    layout = layout_of("shared")
    assert layout.groups[0].layers == (0, 1)
    assert layout.slots[2] == layout.slots[1]


@pytest.mark.parametrize(
    ("kind", "dim", "row"),
    [("int4", 70, 36), ("int6", 70, 54), ("int8", 71, 71), ("fp8", 71, 71), ("f16", 71, 142)],
)
def test_padding_counts(kind: str, dim: int, row: int) -> None:
    assert CODECS[kind].row_bytes(dim) == row


def test_what_a_sealed_cache_keeps_outside_its_pages() -> None:
    """The mean of centred keys in float32, or one scale a head."""
    group = layout_of("MHA", "int4").groups[0]
    assert group.static_bytes == 2 * 8 * group.dim_k * 4
    assert layout_of("MHA", "f16", "int4").groups[0].static_bytes == 0
    assert layout_of("MHA", "fp8").groups[0].static_bytes == 2 * 8 * 8


def test_unknown_cache_types() -> None:
    with pytest.raises(UsageError, match="unknown cache type"):
        KVLayout.build(CONFIGS["llama"], "f8", "f16")


def test_names_of_other_programs() -> None:
    assert layout_of("llama", "q8_0", "q4_0").groups[0].codec_k.name == "int8"
    assert layout_of("llama", "fp8_e4m3").groups[0].codec_v.name == "fp8"


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
    assert found == Budget(4 << 30, "free on a card (nvml)", DEFAULT_MARGIN, None, CUDA)
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


# --- weights ---


def test_workspace_grows_with_rows() -> None:
    model = CONFIGS["llama"]
    floats, fixed = 4 * (512 + 576 + 3 * 1536), 80 * 1536 // 32  # of a row; of the longest one in fixed point
    assert footprint.activation_bytes(model, 1) == floats + (1 + 8) * fixed
    assert footprint.activation_bytes(model, 512) == 512 * floats + (256 + 8) * fixed  # so many at a time
    one, two, three = (footprint.gpu_workspace_bytes(model, rows) for rows in (1024, 1536, 2048))
    assert 0 < two - one == three - two and one > footprint.activation_bytes(model, 1024)
    more = footprint.gpu_workspace_bytes(model, 1024, 2) - one  # second queries, and three more parts
    assert more >= 3 * 1024 * 4 * model.n_heads * (model.layers[0].dim_v + 2)
    assert footprint.logit_bytes(model) >= 4 * model.vocab_size


@pytest.mark.models
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_interleaved_weights_are_counted_as_the_engine_keeps_them(fixture: str, request: pytest.FixtureRequest) -> None:
    """Matrices of the loaded model and the file's vectors add up to `packed`, decoded vectors to `copies`."""
    import torch

    from kvcli import kernels
    from kvcli.kernels.cpu.interleaved import Interleaved
    from kvcli.runtime.formats.gguf import GGUFFile
    from kvcli.runtime.model.archs import from_gguf
    from kvcli.runtime.model.loading import load
    from kvcli.runtime.model.weights import Weights

    file = GGUFFile.open(request.getfixturevalue(fixture))
    model_config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    ops = kernels.backend("auto", 1)[0]
    if getattr(ops, "exact", True):
        pytest.skip("nothing is interleaved on this processor")
    counted = footprint.weights_of_tensors(file.tensors, model_config, CPU)
    values = list(_reachable(load(model_config, Weights(file), ops)))
    matrices = {x.blocks.data_ptr(): x.nbytes for x in values if isinstance(x, Interleaved)}
    vectors = {x.data_ptr(): 4 * x.numel() for x in values if isinstance(x, torch.Tensor)}
    in_file = sum(t.nbytes for t in file.tensors.values() if len(t.shape) == 1)
    assert counted.packed == sum(matrices.values()) + in_file
    assert counted.copies == sum(vectors.values())


@pytest.mark.models
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_weights_are_counted_as_the_engine_keeps_them(fixture: str, request: pytest.FixtureRequest) -> None:
    """Every tensor of the loaded model: mapped ones add up to `packed`, all others to `copies`."""
    import torch

    from kvcli import kernels
    from kvcli.kernels import QuantTensor
    from kvcli.runtime.formats.gguf import GGUFFile
    from kvcli.runtime.model.archs import from_gguf
    from kvcli.runtime.model.loading import load
    from kvcli.runtime.model.weights import Weights

    path: Path = request.getfixturevalue(fixture)
    file = GGUFFile.open(path)
    model_config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    counted = footprint.weights_of_tensors(file.tensors, model_config, CPU, interleaved=False)
    mapped = {file.data(name).ctypes.data: t.nbytes for name, t in file.tensors.items()}
    model = load(model_config, Weights(file), kernels.backend("reference", 1)[0])
    kept: dict[int, int] = {}
    for value in _reachable(model):
        tensor = value.blocks if isinstance(value, QuantTensor) else value
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    assert len(kept) == len(file.tensors)
    copies = sum(size for address, size in kept.items() if address not in mapped)
    assert counted.packed == sum(mapped.values())
    assert counted.copies == copies
    assert all(mapped[address] == size for address, size in kept.items() if address in mapped)


def _reachable(value: object, depth: int = 6) -> Iterator[object]:
    """The object and what its attributes and lists hold, without operations and configs."""
    yield value
    if depth == 0 or not type(value).__module__.startswith(
        ("kvcli.runtime.model.decoder", "kvcli.kernels.attend", "builtins")
    ):
        return
    inner = value if isinstance(value, (list, tuple)) else list(getattr(value, "__dict__", {}).values())
    for each in inner:
        yield from _reachable(each, depth - 1)
