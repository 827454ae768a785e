"""`attend` on a CPU, and `AttentionLayer`, which says what one layer's attention is on every backend.

All that a layer does with its cache is done here: biases and norms of heads, RoPE, second queries for rows that are
kept before evicted ones, rotation into the basis of a quantized cache and back, storing, sealing, and the scores of the
mean that sealed keys lack.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from kvcli.kernels.paged import Angles, PagedKV

Seal = Callable[[PagedKV, int, int], Angles | None]


def nothing_to_seal(kv: PagedKV, start: int, end: int) -> None:
    """`AttentionLayer.seal` of a cache without a 16-bit tail."""


class Rope(Protocol):
    """What attention asks of the rotary embedding of a layer (arXiv 2104.09864)."""

    def at(self, start: int, n: int) -> Angles:
        """Angles of positions start .. start + n - 1."""

    def inside(self, start: int, gaps: np.ndarray) -> Angles:
        """Angles of rows from position `start` on that stand earlier inside the cache by `gaps`, int64 [n]."""

    def frequencies_on(self, device: torch.device) -> torch.Tensor:
        """Angles of position 1: float64 [rope_dim / 2]."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention, without its projections and its cache.

    `scale` multiplies q.k; `softcap` c > 0 replaces a score s by c * tanh(s / c); `window`: the rows that a query sees,
    its own included, 0 = all. `bias` float32 [(heads + kv_heads) * dim_k + kv_heads * dim_v] or None is added to the
    projections. `q_norm`, `k_norm`: weights of an RMS norm over each head, float32 [dim_k], or None;
    `eps` is added to its mean.
    `seal(kv, start, end)` encodes what leaves the 16-bit tail of a cache as its rows [start, end), just stored, come,
    and returns the angles of the mean that sealed keys lack, None where they lack none or there is no RoPE.
    """

    heads: int
    scale: float
    rope: Rope | None = None
    window: int = 0
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    seal: Seal = nothing_to_seal


class Operations(Protocol):
    """The operations of the facade that `attend` is written in."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...
    def rope_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...
    def rotate_(self, x: torch.Tensor) -> None: ...
    def store(self, k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None: ...
    def attention(
        self, q: torch.Tensor, kv: PagedKV, start: int, window: int, scale: float, softcap: float,
        angles: Angles | None, sink_q: torch.Tensor | None,
    ) -> torch.Tensor: ...  # fmt: skip


def attend(ops: Operations, qkv: torch.Tensor, kv: PagedKV, start: int, layer: AttentionLayer) -> torch.Tensor:
    """Store T rows of one sequence from position `start` on, and attend to all that they see.

    qkv float32 [T, (heads + kv_heads) * dim_k + kv_heads * dim_v], changed -> float32 [T, heads * dim_v].
    """
    t, r = qkv.shape[0], kv.record
    if layer.bias is not None:
        qkv += layer.bias
    n_q, n_k = layer.heads * r.dim_k, r.kv_heads * r.dim_k
    q = qkv[:, :n_q].view(t, layer.heads, r.dim_k)  # rows of a wider matrix
    k = qkv[:, n_q : n_q + n_k].view(t, r.kv_heads, r.dim_k)
    v = qkv[:, n_q + n_k :].view(t, r.kv_heads, r.dim_v)
    if layer.q_norm is not None:
        q = ops.rms_norm(q, layer.q_norm, layer.eps)
    if layer.k_norm is not None:
        k = ops.rms_norm(k, layer.k_norm, layer.eps)
    sink_q = _sink_queries(ops, q, kv, start, layer.rope)
    if layer.rope is not None:
        cos, sin = layer.rope.at(start, t)
        ops.rope_(q, cos, sin)
        ops.rope_(k, cos, sin)
    rotated_k, rotated_v = kv.rotated
    if rotated_k:
        ops.rotate_(k)
        ops.rotate_(q)
        if sink_q is not None:
            ops.rotate_(sink_q)
    if rotated_v:
        ops.rotate_(v)
    ops.store(k, v, kv, start)
    angles = layer.seal(kv, start, start + t)
    out = ops.attention(q, kv, start, layer.window, layer.scale, layer.softcap, angles, sink_q)
    if rotated_v:
        ops.rotate_(out.view(t, layer.heads, r.dim_v))
    return out


def _sink_queries(ops: Operations, q: torch.Tensor, kv: PagedKV, start: int, rope: Rope | None) -> torch.Tensor | None:
    """Queries for the rows that are kept before evicted ones: q [T, heads, dim_k], not turned yet, turned to where it
    stands inside the cache (StreamingLLM, arXiv 2309.17453). None where `q` will do."""
    if rope is None or kv.keep == 0:
        return None
    gaps = kv.gaps(start, q.shape[0])
    if not gaps.any():
        return None
    sink_q = q.clone(memory_format=torch.contiguous_format)
    ops.rope_(sink_q, *rope.inside(start, gaps))
    return sink_q
