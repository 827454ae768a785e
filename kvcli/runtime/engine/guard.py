"""Which cache types a model's keys cannot take, told from its weights before anything runs.

A key k stored with relative error e (`Codec.error`, measured on Gaussian rows in the rotated basis) moves a
score by about scale * |q| * e * |k| / sqrt(D): noise in nats, which softmax turns into factors. What k and q are is
known from vectors alone where it matters most:

- a bias on keys is in every key; in Qwen2-like models a few layers have norms of hundreds where others have tens.
  RoPE turns it by position, so the mean of a page takes out its slow part only: counted whole, to be safe. The query
  counts by its own bias, and with at least 1 an element;
- a norm over heads makes elements of RMS 1 times its gains.

Learned sink logits compete with scores in absolute terms: there 4-bit keys are refused whatever the noise.

A latent is the key and the value of all heads, each of which looks at it through matrices of its own: nothing in the
weights tells what an error becomes, and types below 8 bits are refused.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from kvcli.errors import UsageError
from kvcli.runtime.cache.layout import LEAST_LATENT_BITS, KVLayout
from kvcli.runtime.config import ALL, LATENT, ModelConfig

LIMIT_NATS = 2.0  # gemma3 270M, which int4 suits, has 1.0; a bias of norm 605 over 512 elements has 2.7
FALLBACK = "int8"


class Vectors(Protocol):
    """What the guard asks of weights."""

    def __contains__(self, name: str) -> bool: ...

    def vector(self, name: str, size: int) -> torch.Tensor:
        """float32 [size]."""
        ...


@dataclass(frozen=True)
class KeyStrength:
    """Of one layer: the L2 norm of the vector that tells, and the score's noise in nats for a relative error of 1."""

    layer: int
    what: str
    norm: float
    noise: float


def strengths(weights: Vectors, config: ModelConfig, layers: tuple[int, ...]) -> Iterator[KeyStrength]:
    """For each of these layers whose weights tell anything about its keys."""
    for i in layers:
        shape, prefix = config.layers[i], f"blk.{i}.attn_"
        heads, dim = (config.n_heads, shape.kv_heads), shape.dim_k
        if prefix + "k_norm.weight" in weights:
            together = heads if config.block.qk_norm == ALL else (1, 1)
            what, suffix, sizes = "key norm gain", "_norm.weight", (together[0] * dim, together[1] * dim)
        elif prefix + "k.bias" in weights:
            what, suffix, sizes = "key bias", ".bias", (heads[0] * dim, heads[1] * dim)
        else:
            continue
        key = weights.vector(f"{prefix}k{suffix}", sizes[1])
        query = 1.0
        if f"{prefix}q{suffix}" in weights:
            query = _largest_rms(weights.vector(f"{prefix}q{suffix}", sizes[0]), dim)
        if suffix == ".bias":
            query = max(query, 1.0)
        noise = config.attn_scale * dim**0.5 * query * _largest_rms(key, dim)
        yield KeyStrength(i, what, float(key.norm()), noise)


def weakness(weights: Vectors, config: ModelConfig, layout: KVLayout) -> str:
    """Why this layout's type of keys would fail on this model; "" if nothing in the weights says so."""
    for group in layout.groups:
        if group.kind == LATENT and group.codec_v.bits < LEAST_LATENT_BITS:
            return f"{group.codec_v.name} latents would fail on this model (all heads share one for keys and values)"
        codec = group.codec_k
        if not codec.sealed:
            continue
        sinks = [i for i in group.layers if f"blk.{i}.attn_sinks.weight" in weights]
        if sinks and codec.bits <= 4:
            return f"{codec.name} keys would fail on this model (learned sink logits in layer {sinks[0]})"
        found = list(strengths(weights, config, group.layers))
        worst = max(found, key=lambda x: (math.isnan(x.noise), x.noise), default=None)
        if worst is not None and not worst.noise * codec.error <= LIMIT_NATS:
            median = statistics.median(x.norm for x in found)
            where = f"{worst.what} norm {worst.norm:.0f} in layer {worst.layer}, median {median:.0f}"
            return f"{codec.name} keys would fail on this model ({where})"
    return ""


def check(weights: Vectors, config: ModelConfig, layout: KVLayout, types: tuple[str, str], force: bool) -> str:
    """What `weakness` finds, as a notice where it was forced. Raises UsageError where it was not.

    `types` are those that `layout` was built with.
    """
    reason = weakness(weights, config, layout)
    if reason and not force:
        better = KVLayout.build(config, FALLBACK, types[1], layout.page_size)  # sinks and tail do not matter here
        better_type = "f16" if types[0] == FALLBACK or weakness(weights, config, better) else FALLBACK
        raise UsageError(reason, f"try `type_k={better_type}`, or `force_types`")
    return reason


def _largest_rms(x: torch.Tensor, dim: int) -> float:
    """The root mean square of the head where it is largest."""
    return float(x.view(-1, dim).square().mean(1).sqrt().max())
