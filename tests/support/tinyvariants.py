"""All tiny models: families by architecture, and variants by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import tinydense
import tinyexperts
import tinylatents
import tinystates
from tinyshapes import Family, Variant

_KINDS = tinydense, tinyexperts, tinystates, tinylatents
FAMILIES = {arch: family for kind in _KINDS for arch, family in kind.FAMILIES.items()}
VARIANTS = {name: variant for kind in _KINDS for name, variant in kind.VARIANTS.items()}


def family_of(variant: Variant) -> Family:
    return FAMILIES[variant.arch]


def _ahead(of: str, n: int, **settings: Any) -> Variant:
    """A variant of so many layers, and one that predicts further tokens."""
    known = VARIANTS[of]
    keys = known.keys | {"nextn_predict_layers": 1, "block_count": n + 1}
    return replace(known, settings=known.settings | {"num_hidden_layers": n} | settings, keys=keys)


# Not among those that every test of architectures runs: with a layer that predicts further tokens.
BESIDE = {
    "deepseek2-ahead": _ahead("deepseek2", 2),
    **{
        f"{of}-ahead": _ahead(of, 2, layer_types=["linear_attention", "full_attention"])
        for of in ("qwen35", "qwen35moe", "qwen3next")
    },
}
