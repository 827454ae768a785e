"""Bytes and pages of the cache: by hand for two models' shapes, and against what sequences really hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from cachecases import SmallPool, chunks, tiny_layout

from kvcli.codecs import CODECS, RecordLayout, Section
from kvcli.errors import UsageError
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import PAGE_SIZES, KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, RECURRENT, SLIDING, LayerConfig, ModelConfig


def model(layers: tuple[LayerConfig, ...]) -> ModelConfig:
    return ModelConfig("llama", "m", 100, 64, 64, 1, 8192, 1e-5, layers, 1.0)


SMOLLM2 = model((LayerConfig(FULL, 3, 64, 64),) * 30)
_LOCAL, _GLOBAL = LayerConfig(SLIDING, 1, 256, 256, 512), LayerConfig(FULL, 1, 256, 256)
GEMMA3 = model(((_LOCAL,) * 5 + (_GLOBAL,)) * 3)


@pytest.mark.parametrize(
    ("types", "token_bytes", "page_bytes"),
    [
        (("f32", "f32"), 46_080, 2_949_120),  # 30 layers x 3 heads x 128 x 4 bytes, times 64 rows
        (("f16", "f16"), 23_040, 1_474_560),
        (("bf16", "f16"), 23_040, 1_474_560),
        (("f32", "f16"), 34_560, 2_211_840),
    ],
)
def test_smollm2_by_hand(types: tuple[str, str], token_bytes: int, page_bytes: int):
    layout = KVLayout.build(SMOLLM2, *types)
    (group,) = layout.groups
    assert (layout.token_bytes(), group.page_bytes) == (token_bytes, page_bytes)
    assert (group.kind, group.layers, layout.slots) == (
        FULL,
        tuple(range(30)),
        tuple((0, i) for i in range(30)),
    )
    assert layout.pages(100, 512) == (2,) and layout.bytes(100, 512) == 2 * page_bytes
    assert layout.bytes(2048, 512) == 2048 * token_bytes and layout.bytes(0, 512) == 0
    assert group.record.v_offset == 64 * 64 * (4 if types[0] == "f32" else 2)


def test_gemma3_by_hand():
    layout = KVLayout.build(GEMMA3, "f16", "f16")
    sliding, full = layout.groups
    assert (len(sliding.layers), full.layers) == (15, (5, 11, 17))
    assert layout.slots[4:7] == ((0, 4), (1, 0), (0, 5))
    assert layout.token_bytes() == 18_432  # 18 layers x 512 x 2 bytes
    assert (sliding.page_bytes, full.page_bytes) == (983_040, 196_608)
    assert layout.pages(4096, 512) == (16, 64)  # ceil(511 / 64) + 512 / 64
    assert layout.bytes(4096, 512) == 16 * 983_040 + 64 * 196_608 == 28_311_552
    assert layout.pages(32_768, 512) == (16, 512) and layout.pages(200, 512) == (4, 4)
    assert layout.read_bytes(4096) == 15 * 512 * 1024 + 3 * 4096 * 1024


@pytest.mark.parametrize(
    ("dim_k", "dim_v", "page_size", "record_bytes"),
    [(5, 5, 16, 384), (64, 64, 16, 4096), (192, 128, 64, 40_960), (1, 1, 16, 128), (80, 80, 32, 10_240)],
)
def test_records_are_rounded_up_to_128_bytes(dim_k: int, dim_v: int, page_size: int, record_bytes: int):
    layer = LayerConfig(FULL, 2, dim_k, dim_v)
    (group,) = KVLayout.build(model((layer,) * 3), "f16", "f16", page_size).groups
    assert (group.record.record_bytes, group.layer_bytes) == (record_bytes, 2 * record_bytes)
    assert group.page_bytes == 6 * record_bytes


def test_which_layers_share_a_group():
    layers = (
        LayerConfig(FULL, 2, 8, 8),
        LayerConfig(SLIDING, 2, 8, 8, 0),  # no window: it sees everything
        LayerConfig(RECURRENT, 0, 0, 0, state_bytes=1000),
        LayerConfig(SLIDING, 2, 8, 8, 32),
        LayerConfig(FULL, 1, 8, 8),  # other heads
        LayerConfig(SLIDING, 2, 8, 8, 32, shares_kv_with=3),
        LayerConfig(SLIDING, 2, 8, 8, 64),  # another window
    )
    layout = KVLayout.build(model(layers), "f32", "f32", 16)
    assert layout.slots == ((0, 0), (0, 1), None, (1, 0), (2, 0), (1, 0), (3, 0))
    assert [g.layers for g in layout.groups] == [(0, 1), (3,), (4,), (6,)]
    assert layout.state_bytes == 1000 and layout.bytes(0, 1) == 1000


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_first_page_that_a_query_sees(page_size: int):
    for window in (1, 2, 15, 16, 17, 100):
        sliding, full = tiny_layout(window, page_size).groups
        for position in range(0, 300):
            oldest = max(0, position - window + 1)
            assert sliding.first_page(position) * page_size <= oldest < (sliding.first_page(position) + 1) * page_size
            assert full.first_page(position) == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", (16, 32))
@pytest.mark.parametrize("window", (1, 2, 15, 16, 17, 18, 21, 64, 100))
def test_pages_are_what_a_sequence_holds_at_its_peak(window: int, size: int):
    """Prompts cut as the engine cuts them, then tokens one by one."""
    layout = tiny_layout(window, size)
    pool, chunk_sizes = SmallPool(layout), (1, 7, 16, 17, 40, 64, 100)
    for ubatch, prompt in product(chunk_sizes, (1, 15, 16, 17, 60, 100, 900)):
        seq, peak, end = Sequence(pool), [0, 0], 0
        steps = [*chunks(0, prompt, ubatch, size), *((p, p + 1) for p in range(prompt, prompt + 20))]
        for start, end in steps:
            assert 0 < end - start <= ubatch and start == seq.length
            seq.reserve([0] * (end - start))
            peak = [max(most, seq.pages(g)) for g, most in enumerate(peak)]
            seq.commit([0] * (end - start))
        planned = layout.pages(end, ubatch)
        assert peak[1] == planned[1]
        assert peak[0] <= planned[0], (ubatch, prompt)
        if prompt == 900:  # long enough for chunks to begin at every place in a page
            assert peak[0] == planned[0], (ubatch, peak, planned)
        seq.close()
    pool.check([])


def test_long_contexts_cost_a_sliding_group_nothing():
    sliding = KVLayout.build(GEMMA3, "f16", "f16").groups[0]
    assert sliding.pages(1024, 512) == sliding.pages(1 << 20, 512) == 16
    assert sliding.pages(1 << 20, 1) == 9 and sliding.pages(64, 512) == 1
    assert replace(sliding, window=1).pages(1 << 20, 64) == 1


def test_where_every_layer_slides_there_is_nothing_to_evict():
    """A flag that would do nothing is refused."""
    retention, slides = Rolling(4, 100, 64), KVLayout.build(model((_LOCAL,) * 3), "f16", "f16")
    assert slides.evicting(None) == slides
    with pytest.raises(UsageError, match="nothing to evict"):
        slides.evicting(retention)
    assert KVLayout.build(GEMMA3, "f16", "f16").evicting(retention).retention == retention


@pytest.mark.parametrize("name", ("f64", "", "f-16", "auto", "int3"))
def test_unknown_types_are_refused(name: str):
    with pytest.raises(UsageError, match="unknown cache type") as refused:
        KVLayout.build(SMOLLM2, "f16", name)
    assert "bf16" in refused.value.hint
    with pytest.raises(UsageError, match=f"'{name}'"):
        KVLayout.build(SMOLLM2, name, "f16")


@pytest.mark.parametrize("size", (0, 1, 8, 48, 63, 256, -64))
def test_other_page_sizes_are_refused(size: int):
    with pytest.raises(UsageError, match=f"page size {size} ") as refused:
        KVLayout.build(SMOLLM2, "f16", "f16", size)
    assert "16, 32, 64, 128" in refused.value.hint


def test_a_record_is_its_sections():
    record = RecordLayout.of(32, 1, 64, 48, CODECS["int8"], CODECS["int4"])
    assert record.sections == (Section("k", 64), Section("v", 24), Section("k_scales", 2), Section("v_scales", 2))
    assert (record.v_offset, record.k_scales, record.v_scales) == (2048, 2816, 2880)
    assert (record.token_bytes, record.record_bytes) == (92, 2944)
    groups, once = Section("means", 100, 16), Section("mark", 8, 32)  # for each 16 rows, and for the page
    wider = replace(record, sections=(groups, *record.sections[:2], once, *record.sections[2:]))
    assert (wider.v_offset, wider.k_scales, wider.v_scales) == (2248, 3024, 3088)
    assert (wider.token_bytes, wider.record_bytes) == (92, 3200)
    plain = RecordLayout.of(16, 1, 64, 0, CODECS["f16"], CODECS["int8"])
    assert (plain.k_scales, plain.v_scales, plain.record_bytes) == (0, 0, 2048)
