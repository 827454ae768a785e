"""Models as plans see them: layers of every kind, and their layouts."""

from __future__ import annotations

import pytest

from kvcli.codecs import CODECS
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import FULL, LATENT, RECURRENT, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.plan.footprint import WeightBytes

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
