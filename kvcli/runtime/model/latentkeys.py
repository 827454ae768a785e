"""Latent attention (MLA, arXiv 2405.04434) from the keys of a GGUF file. No torch."""

from __future__ import annotations

import math

from kvcli.errors import ModelError
from kvcli.runtime.config import Latents
from kvcli.runtime.formats.ggufkeys import Keys

_MOST = 1 << 16


def read_latents(keys: Keys) -> tuple[Latents, int, int]:
    """The heads of a model, the rank of its latents, and how many dims RoPE turns. Raises ModelError.

    Files of before 2025 have the sizes of heads where later ones have those of latents, and as many KV heads as there
    are heads.
    """
    rank, rotary = keys.integer("attention.kv_lora_rank", limit=_MOST), keys.integer("rope.dimension_count", limit=4096)
    dims = [keys.integer(f"attention.{x}_length", limit=_MOST) for x in ("key", "value")]
    dim_k, dim_v = (
        keys.integer(f"attention.{x}_length_mla", dim, limit=4096)
        for x, dim in zip(("key", "value"), dims, strict=True)
    )
    if dim_k <= rotary:
        raise ModelError(f"{keys.arch} has keys of {dim_k} elements, of which RoPE turns {rotary}", "convert it again")
    keys.get("attention.head_count_kv")
    return (
        Latents(dim_k - rotary, dim_v, keys.integer("attention.q_lora_rank", 0, limit=_MOST, zero=True)),
        rank,
        rotary,
    )


def score_factor(keys: Keys) -> float:
    """What YaRN multiplies scores by, beside the angles of RoPE (as in DeepSeek-V2)."""
    factor = float(keys.number("rope.scaling.factor", 1.0, zero=True)) or 1.0
    if keys.get("rope.scaling.type") != "yarn" or factor <= 1:
        return 1.0
    log = float(keys.number("rope.scaling.yarn_log_multiplier", 0.0, zero=True))
    return (1.0 + log * math.log(factor)) ** 2
