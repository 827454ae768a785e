"""Shapes of recipes, by hand, and flags over a model."""

from __future__ import annotations

import pytest
from shapecases import gguf, token_bytes, windows

from kvcli.errors import UsageError
from kvcli.runtime.headers.shapes import Given, config_by_hand, config_from_recipe, override, recipe_params_read
from kvcli.runtime.hub.recipes import load_recipes

# --- recipes ---


@pytest.mark.parametrize("name", [name for name, recipe in load_recipes().items() if recipe.shape])
def test_recipes_become_configs(name: str) -> None:
    shape = load_recipes()[name].shape
    config = config_from_recipe(name, shape)
    assert config.n_layers == shape["layers"]
    rows = [g for g in shape["groups"] if "dim_k" in g]
    expected = sum(g["layers"] * g["kv_heads"] * (g["dim_k"] + g["dim_v"]) * 2 for g in rows)
    assert token_bytes(config) == expected
    assert 0 < recipe_params_read(shape) <= shape["params"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-30b-a3b", 3.3),
        ("deepseek-v3", 37),
        ("deepseek-v2", 21),
        ("mixtral-8x7b", 12.9),
        ("gpt-oss-20b", 3.6),
        ("nemotron-3-nano-30b-a3b", 3.6),
    ],
)
def test_active_parameters_of_experts(name: str, billions: float) -> None:
    """Published counts, which include the input embedding."""
    shape = load_recipes()[name].shape
    embedding = 0 if name.startswith("gpt-oss") else shape["vocab"] * shape["hidden"]
    assert (recipe_params_read(shape) + embedding) / 1e9 == pytest.approx(billions, rel=0.02)


# --- by hand ---


def test_by_hand() -> None:
    config = config_by_hand(Given(layers=32, kv_heads=8, dim_k=128, dim_v=128))
    assert token_bytes(config) == 131072
    assert token_bytes(config_by_hand(Given(layers=61, kv_lora_rank=512, rope_dim=64))) == 70272
    sliding = config_by_hand(Given(layers=48, kv_heads=8, dim_k=256, swa_layers=40, swa_window=1024))
    assert windows(sliding).count(1024) == 40
    assert windows(config_by_hand(Given(layers=2, kv_heads=1, dim_k=8, swa_window=16))) == [16, 16]


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        (Given(kv_heads=8), "--layers"),
        (Given(layers=2), "--kv-heads"),
        (Given(layers=2, kv_heads=8), "--head-dim"),
        (Given(layers=2, kv_heads=8, dim_k=64, swa_layers=1), "--swa-window"),
        (Given(layers=2, kv_heads=8, dim_k=64, swa_layers=3, swa_window=9), "--swa-layers"),
        (Given(layers=5000, kv_heads=8, dim_k=64), "--layers"),
    ],
)
def test_by_hand_names_what_is_missing(given: Given, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        config_by_hand(given)


def test_sizes_are_positive() -> None:
    with pytest.raises(UsageError, match="--kv-heads"):
        Given(kv_heads=0)
    with pytest.raises(UsageError, match="--bpw"):
        Given(bpw=-1.0)


def test_flags_over_a_model() -> None:
    base = gguf("qwen2")
    assert override(base, Given()) is base
    assert token_bytes(override(base, Given(layers=8))) == 2 * token_bytes(base)
    assert token_bytes(override(base, Given(kv_heads=8))) == 4 * token_bytes(base)
    assert windows(override(base, Given(swa_window=64, swa_layers=1))) == [64, 0, 0, 0]
    assert override(base, Given(kv_lora_rank=512, rope_dim=64)).attention_kind == "MLA"
    with pytest.raises(UsageError, match="rope-dim"):
        override(base, Given(kv_lora_rank=512))
    with pytest.raises(UsageError, match="multiple"):
        override(base, Given(kv_heads=3))
