"""All tiny models: families by architecture, and variants by name."""

from __future__ import annotations

from dataclasses import replace

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


# Not among those that every test of architectures runs: DeepSeek V3 with a layer that predicts further tokens.
BESIDE = {
    "deepseek2-ahead": replace(
        VARIANTS["deepseek2"],
        settings=VARIANTS["deepseek2"].settings | {"num_hidden_layers": 2},
        keys=VARIANTS["deepseek2"].keys | {"nextn_predict_layers": 1, "block_count": 3},
    )
}
