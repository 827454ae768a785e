"""The parts that decoder architectures are put together from, written over the kernels' facade."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcli.kernels import Backend, QuantTensor
from kvcli.runtime.config import LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.sequence import Step


class RopeTable:
    """Cosines and sines of one RoPE configuration; angles in float64, so large positions stay right."""

    def __init__(self, rope: RopeConfig, factors: torch.Tensor | None = None) -> None:
        """`factors` float32 [dim / 2] divide the frequencies (the `rope_freqs` tensor of "llama3" scaling)."""
        half = rope.dim // 2
        self.frequencies = rope.base ** (-np.arange(half, dtype=np.float64) * 2 / rope.dim)
        if rope.scaling == "linear":
            self.frequencies /= rope.factor
        if rope.scaling == "llama3" and factors is not None:
            self.frequencies /= factors.double().numpy()

    def at(self, start: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin float32 [n, dim / 2] for positions start .. start + n - 1."""
        angles = np.arange(start, start + n, dtype=np.float64)[:, None] * self.frequencies
        return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


class RopeTables:
    """One table per distinct RoPE configuration of a model; `at` gives those of a step."""

    def __init__(self, config: ModelConfig, factors: torch.Tensor | None = None) -> None:
        self._tables = {x.rope: RopeTable(x.rope, factors) for x in config.layers if x.rope is not None}

    def at(self, start: int, n: int) -> dict[RopeConfig, tuple[torch.Tensor, torch.Tensor]]:
        return {rope: table.at(start, n) for rope, table in self._tables.items()}


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one layer; the norms over each head of q and k exist where the architecture has them."""

    qkv: tuple[QuantTensor, QuantTensor, QuantTensor]
    out: tuple[QuantTensor]
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


def attention(
    ops: Backend,
    x: torch.Tensor,
    weights: AttentionWeights,
    config: ModelConfig,
    step: Step,
    layer: int,
    angles: dict,
) -> torch.Tensor:
    """x [T, d_model] (normed) -> heads' outputs [T, heads * dim_v]; stores the step's rows of this layer."""
    shape: LayerConfig = config.layers[layer]
    kv = step.kv(layer)
    qkv = ops.matmul(x, weights.qkv)
    n_q, n_k = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k
    q = qkv[:, :n_q].unflatten(1, (config.n_heads, shape.dim_k))  # [T, heads, dim_k], rows of a wider matrix
    k = qkv[:, n_q : n_q + n_k].unflatten(1, (shape.kv_heads, shape.dim_k))
    v = qkv[:, n_q + n_k :].unflatten(1, (shape.kv_heads, shape.dim_v))
    if weights.q_norm is not None:
        q = ops.rms_norm(q, weights.q_norm, config.norm_eps)
    if weights.k_norm is not None:
        k = ops.rms_norm(k, weights.k_norm, config.norm_eps)
    if shape.rope is not None:
        cos, sin = angles[shape.rope]
        ops.rope_(q, cos, sin)
        ops.rope_(k, cos, sin)
    ops.store(k, v, kv, step.start)
    return ops.attention(q, kv, step.start, shape.window, config.attn_scale, config.attn_softcap)


@dataclass(frozen=True)
class MLPWeights:
    """A gated feed-forward block: gate and up stacked, then down."""

    gate_up: tuple[QuantTensor, QuantTensor]
    down: tuple[QuantTensor]
