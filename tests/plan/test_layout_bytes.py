"""What a layout keeps of each kind of layer, and in which type."""

from __future__ import annotations

import pytest
from plancases import CONFIGS, layout_of

from kvcli.codecs import CODECS
from kvcli.errors import UsageError
from kvcli.runtime.cache.layout import KVLayout

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
