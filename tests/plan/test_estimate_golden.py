"""The cache formulas against figures published by others or computed by hand: every row to the byte."""

from __future__ import annotations

import csv
import math
from fractions import Fraction
from pathlib import Path

import pytest
from estimatecases import IdealGroup, ideal_bytes, ideal_token_bytes

from kvcli.codecs import CODECS
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import LATENT, LayerConfig, ModelConfig
from kvcli.runtime.plan.plan import heads_per_rank

GOLDENS = Path(__file__).parents[1] / "data" / "estimate_goldens.csv"
ROWS = list(csv.DictReader(GOLDENS.open(encoding="utf-8")))
GIB = 1 << 30


def groups_of(row: dict[str, str]) -> list[IdealGroup]:
    heads, dim_k, dim_v = (int(row[key]) for key in ("kv_heads", "dim_k", "dim_v"))
    groups = [
        IdealGroup(int(row["layers_full"]), heads, dim_k, dim_v),
        IdealGroup(int(row["layers_swa"]), heads, dim_k, dim_v, int(row["window"])),
    ]
    return [group for group in groups if group.layers]


def test_the_file_is_whole() -> None:
    assert len(ROWS) == 52
    assert {row["type"] for row in ROWS} >= {
        "bf16",
        "f16",
        "fp8-bare",
        "int8-bare",
        "int4-bare",
        "q8_0",
        "q4_0",
    }


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_row(row: dict[str, str]) -> None:
    groups = groups_of(row)
    assert ideal_token_bytes(groups, row["type"]) == int(row["bytes_per_token"])
    total = ideal_bytes(groups, int(row["ctx"]), row["type"], sequences=int(row["batch"]))
    assert total == int(row["total_bytes"])
    assert f"{float(total / GIB):.4f}" == row["total_GiB"]


@pytest.mark.parametrize("row", [r for r in ROWS if r["type"] in CODECS], ids=lambda r: r["id"])
def test_the_layout_agrees_with_the_formula(row: dict[str, str]) -> None:
    """Rows of types that we have: the allocator's class gives the same bytes per token."""
    heads, dim_k, dim_v = (int(row[key]) for key in ("kv_heads", "dim_k", "dim_v"))
    kind = "full" if dim_v else LATENT
    layers = (LayerConfig(kind, heads, dim_k, dim_v),) * int(row["layers_full"])
    layers += (LayerConfig("sliding", heads, dim_k, dim_v, int(row["window"])),) * int(row["layers_swa"])
    config = ModelConfig("x", "x", 1000, 1024, 4096, heads, 1 << 20, 1e-5, layers, 1.0)
    layout = KVLayout.build(config, row["type"], row["type"])
    assert layout.token_bytes() == int(row["bytes_per_token"])
    assert layout.read_bytes(int(row["ctx"])) * int(row["batch"]) == int(row["total_bytes"])


def test_own_types_at_the_8b_shape() -> None:
    layers = (LayerConfig("full", 8, 128, 128),) * 32
    config = ModelConfig("x", "x", 1000, 4096, 14336, 32, 1 << 17, 1e-5, layers, 1.0)
    expected = {"f32": 262144, "f16": 131072, "bf16": 131072, "fp8": 65536, "fp8_e5m2": 65536,
                "int8": 66560, "int6": 50176, "int5": 41984, "int4": 33792}  # fmt: skip
    assert {t: KVLayout.build(config, t, t).token_bytes() for t in CODECS} == expected
    assert KVLayout.build(config, "int8", "int4").token_bytes() == 32 * 8 * 196
    assert KVLayout.build(config, "int6", "int4").token_bytes() == 32 * 8 * 164


@pytest.mark.parametrize(("page", "tokens", "pages", "unused"), [(16, 35, 3, 13), (16, 1000, 63, 8), (16, 500, 32, 12)])
def test_pages_of_a_sequence(page: int, tokens: int, pages: int, unused: int) -> None:
    layout = KVLayout.build(_one_layer(), "f16", "f16", page)
    assert layout.pages(tokens, 512) == (pages,)
    assert pages * page - tokens == unused


def test_pages_of_four_requests() -> None:
    layout = KVLayout.build(_one_layer(), "f16", "f16", 16)
    requests = [100 + 50, 3000 + 200, 20 + 10, 8000 + 1000]
    pages = [layout.pages(tokens, 512)[0] for tokens in requests]
    assert pages == [10, 200, 2, 563]
    assert f"{sum(requests) / (16 * sum(pages)):.2%}" == "99.84%"


@pytest.mark.parametrize(
    ("sequences", "tokens", "shared", "saving"), [(100, 4000, 2000, 0.4950), (1000, 3072, 2048, 0.6660)]
)
def test_sharing_a_prefix(sequences: int, tokens: int, shared: int, saving: float) -> None:
    layout = KVLayout.build(_one_layer(), "f16", "f16", 16)
    alone, together = (layout.arena_pages(tokens, 512, sequences, n)[0] for n in (0, shared))
    assert round(1 - together / alone, 4) == saving


def test_a_shared_prefix_is_rounded_down_to_pages() -> None:
    layout = KVLayout.build(_one_layer(), "f16", "f16", 16)
    assert layout.arena_pages(165, 512, sequences=1, shared=150) == layout.arena_pages(165, 512)
    # 150 tokens are 9 whole pages of 16 (144 tokens); each of the ten needs the other two of its eleven
    # itself.
    assert layout.arena_pages(165, 512, sequences=10, shared=150) == (9 + 10 * 2,)
    assert round(144 / 165, 4) == 0.8727


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (3, 3)])
def test_heads_are_divided_and_then_repeated(ranks: int, heads: int) -> None:
    assert heads_per_rank(8, ranks) == heads
    group = IdealGroup(32, 8, 128, 128)
    assert ideal_token_bytes([group.per_rank(ranks)], "f16") == 32 * heads * 256 * 2


def test_mla_beside_multi_head_attention() -> None:
    latent, expanded = IdealGroup(61, 1, 576, 0), IdealGroup(61, 128, 192, 128)
    assert ideal_token_bytes([expanded], "bf16") == 4880 * 1024
    assert math.isclose(2 * 128 * 128 / 576, 56.9, rel_tol=1e-3)
    assert ideal_token_bytes([latent], "bf16") == 70272


@pytest.mark.parametrize(("tokens", "billions"), [(4096, "0.40"), (8192, "0.48"), (32768, "0.99"), (131072, "3.00")])
def test_the_prefill_chunk_belongs_to_a_sliding_cache(tokens: int, billions: str) -> None:
    """A 26B model, 5 full layers of 4,096 B/token and 25 of 8,192 B with a window of 1,024, chunks of 512."""
    layers = (LayerConfig("full", 2, 512, 512),) * 5 + (LayerConfig("sliding", 8, 256, 256, 1024),) * 25
    config = ModelConfig("x", "x", 1000, 1024, 4096, 8, 1 << 18, 1e-5, layers, 1.0)
    layout = KVLayout.build(config, "f16", "f16")
    assert [g.token_bytes // len(g.layers) for g in layout.groups] == [4096, 8192]
    assert f"{layout.bytes(tokens, 512) / 1e9:.2f}" == billions


@pytest.mark.parametrize(("tokens", "gib"), [(32768, "4.5"), (262144, "36.0")])
def test_a_published_dense_model(tokens: int, gib: str) -> None:
    assert f"{float(ideal_bytes([IdealGroup(36, 8, 128, 128)], tokens, 'f16') / GIB):.1f}" == gib


def test_gpt_oss_with_and_without_its_windows() -> None:
    full, sliding = IdealGroup(12, 8, 64, 64), IdealGroup(12, 8, 64, 64, 128)
    assert ideal_bytes([full], 131072, "f16") == 3 * GIB
    assert ideal_bytes([IdealGroup(24, 8, 64, 64)], 131072, "f16") == 6 * GIB
    assert ideal_bytes([full, sliding], 131072, "f16") == 3 * GIB + 12 * 2048 * 128
    assert isinstance(ideal_bytes([full], 1, "q4_0"), Fraction)


def _one_layer() -> ModelConfig:
    layers = (LayerConfig("full", 1, 64, 64),)
    return ModelConfig("x", "x", 1000, 64, 256, 1, 1 << 20, 1e-5, layers, 1.0)
