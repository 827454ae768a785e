"""Shape recipes in models/: they parse, add up, and give the published KV bytes and parameter counts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.headers.shapes import config_from_recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODELS = Path(__file__).resolve().parents[2] / "models"

# name -> (KV bytes per token at 2 bytes per element in layers that keep every token, the same in sliding
# layers, window). Written by hand: layers x KV heads x (K dim + V dim) x 2.
KV_BYTES = {
    "llama-2-7b": (524_288, 0, 0),
    "llama-2-13b": (819_200, 0, 0),
    "llama-2-70b": (327_680, 0, 0),
    "llama-3-8b": (131_072, 0, 0),
    "llama-3-70b": (327_680, 0, 0),
    "llama-3.1-8b": (131_072, 0, 0),
    "llama-3.1-70b": (327_680, 0, 0),
    "llama-3.1-405b": (516_096, 0, 0),
    "llama-3.2-1b": (32_768, 0, 0),
    "llama-3.2-3b": (114_688, 0, 0),
    "llama-3.3-70b": (327_680, 0, 0),
    "mistral-7b-v0.1": (0, 131_072, 4096),
    "mistral-7b-v0.3": (131_072, 0, 0),
    "mistral-nemo-12b": (163_840, 0, 0),
    "mistral-small-24b": (163_840, 0, 0),
    "mixtral-8x7b": (131_072, 0, 0),
    "qwen2.5-0.5b": (12_288, 0, 0),
    "qwen2.5-1.5b": (28_672, 0, 0),
    "qwen2.5-3b": (36_864, 0, 0),
    "qwen2.5-7b": (57_344, 0, 0),
    "qwen2.5-14b": (196_608, 0, 0),
    "qwen2.5-32b": (262_144, 0, 0),
    "qwen2.5-72b": (327_680, 0, 0),
    "qwen3-0.6b": (114_688, 0, 0),
    "qwen3-1.7b": (114_688, 0, 0),
    "qwen3-4b": (147_456, 0, 0),
    "qwen3-8b": (147_456, 0, 0),
    "qwen3-14b": (163_840, 0, 0),
    "qwen3-32b": (262_144, 0, 0),
    "qwen3-30b-a3b": (98_304, 0, 0),
    "qwen3-235b-a22b": (192_512, 0, 0),
    "gemma-2-2b": (53_248, 53_248, 4096),
    "gemma-2-9b": (172_032, 172_032, 4096),
    "gemma-2-27b": (188_416, 188_416, 4096),
    "gemma-3-1b": (4_096, 22_528, 512),
    "gemma-3-4b": (20_480, 118_784, 1024),
    "gemma-3-12b": (65_536, 327_680, 1024),
    "gemma-3-27b": (81_920, 425_984, 1024),
    "phi-3-mini": (0, 393_216, 2047),
    "phi-3-mini-128k": (393_216, 0, 0),
    "phi-3-medium": (0, 204_800, 2047),
    "phi-4": (204_800, 0, 0),
    "gpt-oss-20b": (24_576, 24_576, 128),
    "gpt-oss-120b": (36_864, 36_864, 128),
    "falcon-7b": (8_192, 0, 0),
    "falcon-40b": (122_880, 0, 0),
    "deepseek-v2-lite": (31_104, 0, 0),
    "deepseek-v2": (69_120, 0, 0),
    "deepseek-v3": (70_272, 0, 0),
    "smollm2-360m": (40_960, 0, 0),
    "smollm2-1.7b": (196_608, 0, 0),
    "tinyllama-1.1b": (22_528, 0, 0),
    "smollm3-3b": (73_728, 0, 0),
    "phi-4-mini": (131_072, 0, 0),
    "ministral-3-8b": (139_264, 0, 0),
    "glm-4-9b": (40_960, 0, 0),
    "qwen3-4b-2507": (147_456, 0, 0),
    "qwen3-vl-8b": (147_456, 0, 0),
    "qwen2.5-coder-7b": (57_344, 0, 0),
    "deepseek-r1-distill-qwen-7b": (57_344, 0, 0),
    "deepseek-r1-distill-llama-8b": (131_072, 0, 0),
    "qwq-32b": (262_144, 0, 0),
    "granite-3.3-8b": (163_840, 0, 0),
    "olmo-3-7b": (131_072, 393_216, 4096),
    "seed-oss-36b": (262_144, 0, 0),
    "qwen3-coder-30b-a3b": (98_304, 0, 0),
    "falcon-h1-0.5b": (18_432, 0, 0),
    "falcon-h1-7b": (45_056, 0, 0),
    "nemotron-h-8b": (16_384, 0, 0),
    "nemotron-nano-9b-v2": (16_384, 0, 0),
    "nemotron-3-nano-30b-a3b": (6_144, 0, 0),
    "lfm2-1.2b": (12_288, 0, 0),
    "granite-4.0-h-micro": (8_192, 0, 0),
}
# Bytes of a sequence's state, float32: layers x (rows before the convolution + the matrices of heads).
STATE_BYTES = {
    "falcon-h1-0.5b": 36 * 4 * (3 * (24 * 64 + 2 * 128) + 24 * 64 * 128),
    "falcon-h1-7b": 44 * 4 * (3 * (24 * 128 + 2 * 256) + 24 * 128 * 256),
    "nemotron-h-8b": 24 * 4 * (3 * (128 * 64 + 2 * 8 * 128) + 128 * 64 * 128),
    "nemotron-nano-9b-v2": 27 * 4 * (3 * (128 * 80 + 2 * 8 * 128) + 128 * 80 * 128),
    "nemotron-3-nano-30b-a3b": 23 * 4 * (3 * (64 * 64 + 2 * 8 * 128) + 64 * 64 * 128),
    "lfm2-1.2b": 10 * 4 * 2 * 2048,
    "granite-4.0-h-micro": 36 * 4 * (3 * (64 * 64 + 2 * 128) + 64 * 64 * 128),
}
# Recipes of files to download: where one describes its layers in groups too, it is held to the same.
DOWNLOADS = {"smollm2": (23_040, 0, 0), "gemma-3-270m": (3_072, 15_360, 512)}

# Parameter counts published elsewhere, not computed from our dims: keras-hub presets, checkpoint counts,
# or half of total_size in a checkpoint's index (falcon-40b: less the second copy of its head).
PUBLISHED_EXACT = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 141_107_412_992 // 2,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 141_107_412_992 // 2,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 6_425_499_648 // 2,
    "llama-3.3-70b": 141_107_412_992 // 2,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 24_495_564_800 // 2,
    "mistral-small-24b": 47_144_806_400 // 2,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 29_540_067_328 // 2,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 3_880_099_328,
    "gemma-3-12b": 11_765_788_416,
    "gemma-3-27b": 27_009_002_240,
    "phi-3-mini": 3_821_079_552,
    "phi-3-mini-128k": 3_821_079_552,
    "phi-4": 29_319_014_400 // 2,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "falcon-40b": 83_671_941_120 // 2 - 65_024 * 8_192,
    "deepseek-v2-lite": 31_412_968_448 // 2,
    "deepseek-v3": 671_026_419_200,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm3-3b": 3_075_098_624,
    "phi-4-mini": 3_836_021_760,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-vl-8b": 8_190_735_360,
    "qwen2.5-coder-7b": 7_615_616_512,
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
    "deepseek-r1-distill-llama-8b": 8_030_261_248,
    "qwq-32b": 32_763_876_352,
    "qwen3-coder-30b-a3b": 30_532_122_624,
    "smollm2": 134_515_008,
    "gemma-3-270m": 268_098_176,
    "lfm2-1.2b": 1_170_340_608,
}
# Counts found only as rounded by the publisher: (billions, half a unit of the last digit given).
PUBLISHED_ROUNDED = {
    "llama-2-13b": (13, 0.5),
    "llama-2-70b": (70, 5),
    "phi-3-medium": (14, 0.5),
    "falcon-7b": (7, 0.5),
    "deepseek-v2": (236, 0.5),
    "ministral-3-8b": (8, 0.5),
    "glm-4-9b": (9, 0.5),
    "granite-3.3-8b": (8.2, 0.05),
    "olmo-3-7b": (7, 0.5),
    "seed-oss-36b": (36, 0.5),
    "falcon-h1-0.5b": (0.521, 0.0005),
    "falcon-h1-7b": (7.59, 0.005),
    "nemotron-h-8b": (8.1, 0.05),
    "nemotron-nano-9b-v2": (8.9, 0.05),
    "nemotron-3-nano-30b-a3b": (31.6, 0.05),
    "granite-4.0-h-micro": (3, 0.5),
}
# MLA sizes that the cache does not depend on: query rank (0 = none), leading dense layers, router bias.
MLA = {"deepseek-v2-lite": (0, 1, False), "deepseek-v2": (1536, 1, False), "deepseek-v3": (1536, 3, True)}
MLA_NOPE_DIM = MLA_VALUE_DIM = 128

KINDS = {"full", "sliding", "latent", "state", "none"}
QKV_BIAS, FOUR_NORMS = {"qwen2", "seed_oss"}, {"gemma2", "gemma3", "glm4"}
QK_NORM = {"qwen3", "qwen3vl", "qwen3moe", "gemma3", "lfm2"}
NEMOTRON_H = {"nemotron_h", "nemotron_h_moe"}  # each layer is one part, behind one norm; no gates


def load(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return tomllib.load(file)


def _with_shape() -> dict[str, dict[str, Any]]:
    """All recipes with a [shape]; a download is exempt while its shape is left to the file itself."""
    recipes = {path.stem: load(path) for path in sorted(MODELS.glob("*.toml"))}
    return {
        stem: recipe
        for stem, recipe in recipes.items()
        if "shape" in recipe and (stem not in DOWNLOADS or "groups" in recipe["shape"])
    }


RECIPES = _with_shape()
each_recipe = pytest.mark.parametrize("name", RECIPES)


def _attention(arch: str, hidden: int, heads: int, kv_heads: int, dim: int) -> int:
    """Parameters of one layer's attention, its biases and its q/k norms; no layer norms."""
    rows = (heads + 2 * kv_heads) * dim
    count = hidden * rows + heads * dim * hidden
    if arch in QKV_BIAS or arch == "gpt-oss":
        count += rows
    if arch == "gpt-oss":
        count += hidden + heads  # output bias, sinks
    if arch in QK_NORM:
        count += 2 * dim
    if arch == "olmo2":  # over all heads together
        count += (heads + kv_heads) * dim
    return count


def _latent_attention(name: str, hidden: int, heads: int, rank: int, rope: int) -> int:
    query = heads * (MLA_NOPE_DIM + rope)
    q_rank = MLA[name][0]
    count = hidden * q_rank + q_rank + q_rank * query if q_rank else hidden * query
    count += hidden * (rank + rope) + rank + rank * heads * (MLA_NOPE_DIM + MLA_VALUE_DIM)
    return count + heads * MLA_VALUE_DIM * hidden


def _state_layer(arch: str, hidden: int, state: dict[str, Any]) -> int:
    """Parameters of what keeps a state in one layer; no layer norms."""
    if state["kind"] == "conv":
        return 3 * hidden * hidden + hidden * state["kernel"] + hidden * hidden
    heads, inner = state["heads"], state["heads"] * state["dim"]
    channels = inner + 2 * state["groups"] * state["state"]
    norm = 0 if arch == "falcon-h1" else inner
    return hidden * (inner + channels + heads) + channels * (state["kernel"] + 1) + 3 * heads + norm + inner * hidden


def _feed_forward(name: str, shape: dict[str, Any]) -> int:
    """Parameters of all layers' feed-forward parts, routers included."""
    arch, layers, hidden = shape["arch"], shape["layers"], shape["hidden"]
    matrices = 2 if arch == "falcon" or arch in NEMOTRON_H else 3
    if arch in NEMOTRON_H:
        layers = sum(group["layers"] for group in shape["groups"] if group["kind"] == "none")
    if "moe" not in shape:
        return layers * matrices * hidden * shape["ffn"]
    moe = shape["moe"]
    assert moe.get("layers", layers) == layers
    _, dense, router_bias = MLA.get(name, (0, 0, arch in ("gpt-oss", "nemotron_h_moe")))
    expert = matrices * hidden * moe["expert_ffn"]
    if arch == "gpt-oss":
        expert += 2 * moe["expert_ffn"] + hidden  # biases
    sparse = moe["experts"] * (expert + hidden + router_bias) + matrices * hidden * moe["shared_ffn"]
    return dense * 3 * hidden * shape["ffn"] + (layers - dense) * sparse


def _norms(name: str, shape: dict[str, Any]) -> int:
    layers, hidden, arch = shape["layers"], shape["hidden"], shape["arch"]
    if arch == "falcon":  # weight and bias; the 40B normalises attention and feed-forward apart
        return 2 * hidden * (layers * (2 if name == "falcon-40b" else 1) + 1)
    return hidden * (layers * (4 if arch in FOUR_NORMS else 1 if arch in NEMOTRON_H else 2) + 1)


def count_parameters(name: str, shape: dict[str, Any]) -> int:
    """Exact parameter count of a [shape] table; tied embeddings are counted once."""
    hidden, heads, arch = shape["hidden"], shape["heads"], shape["arch"]
    count = shape["vocab"] * hidden * (1 if shape["tied_embeddings"] else 2)
    for group in shape["groups"]:
        if group["kind"] == "latent":
            layer = _latent_attention(name, hidden, heads, group["kv_lora_rank"], group["rope_dim"])
        elif "dim_k" in group:
            layer = _attention(arch, hidden, heads, group["kv_heads"], group["dim_k"])
        else:
            layer = 0
        if group["kind"] == "state" or group.get("state"):
            layer += _state_layer(arch, hidden, shape["state"])
        count += group["layers"] * layer
    return count + _feed_forward(name, shape) + _norms(name, shape)


def kv_bytes(shape: dict[str, Any], sliding: bool) -> int:
    return sum(
        group["layers"] * group["kv_heads"] * (group["dim_k"] + group["dim_v"]) * 2
        for group in shape["groups"]
        if "dim_k" in group and (group["kind"] == "sliding") == sliding
    )


def test_every_expected_recipe_exists() -> None:
    assert KV_BYTES.keys() <= RECIPES.keys()


def test_names_and_aliases_are_unique() -> None:
    recipes = [load(path) for path in MODELS.glob("*.toml")]
    names = [name for recipe in recipes for name in [recipe["name"], *recipe.get("aliases", [])]]
    assert len(names) == len(set(names)), sorted({name for name in names if names.count(name) > 1})


@each_recipe
def test_recipe_is_complete_and_cited(name: str) -> None:
    recipe = RECIPES[name]
    shape = recipe["shape"]
    assert recipe["name"] == name
    assert recipe["title"] and recipe["license"]
    assert name in DOWNLOADS or "config.json" in shape["citation"] or "params.json" in shape["citation"]
    assert set(shape.get("unverified", [])) <= shape.keys()
    for field in ("layers", "hidden", "ffn", "heads", "vocab", "context", "params"):
        assert type(shape[field]) is int and shape[field] > 0, field
    assert type(shape["tied_embeddings"]) is bool
    assert 1e4 <= shape["rope_base"] <= (1e11 if shape["arch"] == "falcon-h1" else 1e8)
    assert 2048 <= shape["context"] <= 1 << 20


@each_recipe
def test_groups_cover_the_layers(name: str) -> None:
    shape = RECIPES[name]["shape"]
    assert sum(group["layers"] for group in shape["groups"]) == shape["layers"]
    for group in shape["groups"]:
        assert group["kind"] in KINDS and group["layers"] > 0
        if group["kind"] in ("state", "none"):
            assert group.keys() == {"kind", "layers"}
            continue
        assert shape["heads"] % group["kv_heads"] == 0
        if group["kind"] == "latent":
            assert (group["kv_heads"], group["dim_v"]) == (1, 0)
            assert group["dim_k"] == group["kv_lora_rank"] + group["rope_dim"]
        else:
            assert 64 <= group["dim_k"] == group["dim_v"] <= 256
        if group["kind"] == "sliding":
            assert 0 < group["window"] <= shape["context"]
        else:
            assert "window" not in group


@each_recipe
def test_experts_are_sane(name: str) -> None:
    moe = RECIPES[name]["shape"].get("moe")
    if moe is not None:
        assert 1 <= moe["experts_used"] < moe["experts"]
        assert moe["expert_ffn"] > 0 and moe["shared_ffn"] >= 0


@each_recipe
def test_params_follow_from_the_dims(name: str) -> None:
    shape = RECIPES[name]["shape"]
    assert count_parameters(name, shape) == shape["params"]  # no tolerance: every tensor is known


@each_recipe
def test_params_agree_with_the_published_count(name: str) -> None:
    params = RECIPES[name]["shape"]["params"]
    if name in PUBLISHED_EXACT:
        assert params == PUBLISHED_EXACT[name]
    else:
        billions, half_unit = PUBLISHED_ROUNDED[name]
        assert abs(params / 1e9 - billions) <= half_unit


@each_recipe
def test_kv_bytes_per_token(name: str) -> None:
    shape = RECIPES[name]["shape"]
    windows = {group["window"] for group in shape["groups"] if group["kind"] == "sliding"} or {0}
    full, sliding, window = (KV_BYTES | DOWNLOADS)[name]
    assert kv_bytes(shape, sliding=False) == full
    assert kv_bytes(shape, sliding=True) == sliding
    assert windows == {window}


@each_recipe
def test_state_bytes_of_a_sequence(name: str) -> None:
    """By hand, by the recipe, and by the layout that a plan and an engine have of it."""
    layout = KVLayout.build(config_from_recipe(name, RECIPES[name]["shape"]), "f16", "f16")
    assert layout.state_bytes == STATE_BYTES.get(name, 0)
    assert layout.token_bytes() == sum((KV_BYTES | DOWNLOADS)[name][:2])
