"""The parts that decoder architectures are put together from, written over the kernels' facade."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcli.kernels import Backend, QuantTensor
from kvcli.runtime.config import LayerConfig, ModelConfig
from kvcli.runtime.rope import RopeTables
from kvcli.runtime.sealing import seal_step
from kvcli.runtime.sequence import Step


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
    ropes: RopeTables,
) -> torch.Tensor:
    """x [T, d_model] (normed) -> heads' outputs [T, heads * dim_v]; stores the step's rows of this layer."""
    shape: LayerConfig = config.layers[layer]
    kv = step.kv(layer)
    t, qkv = x.shape[0], ops.matmul(x, weights.qkv)
    n_q, n_k = config.n_heads * shape.dim_k, shape.kv_heads * shape.dim_k
    q = qkv[:, :n_q].view(t, config.n_heads, shape.dim_k)  # [T, heads, dim_k], rows of a wider matrix
    k = qkv[:, n_q : n_q + n_k].view(t, shape.kv_heads, shape.dim_k)
    v = qkv[:, n_q + n_k :].view(t, shape.kv_heads, shape.dim_v)
    if weights.q_norm is not None:
        q = ops.rms_norm(q, weights.q_norm, config.norm_eps)
    if weights.k_norm is not None:
        k = ops.rms_norm(k, weights.k_norm, config.norm_eps)
    rope = ropes.table(shape.rope)
    if rope is not None:
        cos, sin = rope.at(step.start, t)
        ops.rope_(q, cos, sin)
        ops.rope_(k, cos, sin)
    rotated_k, rotated_v = kv.rotated
    if rotated_k:
        ops.rotate_(k)
        ops.rotate_(q)
    if rotated_v:
        ops.rotate_(v)
    ops.store(k, v, kv, step.start)
    centres = seal_step(ops, kv, step.start, step.start + t, rope)
    out = ops.attention(q, kv, step.start, shape.window, config.attn_scale, config.attn_softcap, centres)
    if rotated_v:
        ops.rotate_(out.view(t, config.n_heads, shape.dim_v))
    return out


@dataclass(frozen=True)
class MLPWeights:
    """A gated feed-forward block: gate and up stacked, then down."""

    gate_up: tuple[QuantTensor, QuantTensor]
    down: tuple[QuantTensor]
