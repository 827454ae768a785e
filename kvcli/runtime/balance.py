"""Balancing queries and keys before keys are quantized: q * s and k / s, with the same scores.

All elements of a key share one scale, so an element with a large variance that queries hardly look at costs precision
where it matters. s = (var k / var q)^(1/4) evens that out. The variances are read off the weights, so s belongs to the
model and not to a text; both elements of a RoPE pair get the same s, so it holds at every position. (SmoothQuant's
migration, arXiv 2211.10438, between q and k instead of activations and weights.)
"""

from __future__ import annotations

import torch

from kvcli.kernels import QuantTensor
from kvcli.runtime.config import LayerConfig

LIMIT = 8.0  # s stays within [1 / LIMIT, LIMIT] times the head's geometric mean


def variances(w: QuantTensor, input_norm: torch.Tensor, heads: int, head_norm: torch.Tensor | None) -> torch.Tensor:
    """Expected squares of the outputs of a projection behind an RMS norm, float32 [heads, dim].

    `input_norm`: the weight of that norm; `head_norm`: the weight of a further norm over each head, if there is one.
    """
    squares = (w.decode() * input_norm).square().sum(1).view(heads, -1)
    if head_norm is not None:
        squares = squares / squares.mean(1, keepdim=True) * head_norm.square()
    return squares


def balance(var_q: torch.Tensor, var_k: torch.Tensor, layer: LayerConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors for queries [heads, dim_k] and keys [kv_heads, dim_k] from their variances."""
    group = var_q.shape[0] // var_k.shape[0]
    pairs = [v.clone() for v in (var_q.view(-1, group, var_q.shape[1]).mean(1), var_k)]
    if layer.rope is not None:
        half = layer.rope.dim // 2
        for v in pairs:
            mean = (v[:, :half] + v[:, half : 2 * half]) / 2
            v[:, :half], v[:, half : 2 * half] = mean, mean
    var_q, var_k = (v.clamp(min=1e-12) for v in pairs)
    logs = (var_k.log() - var_q.log()) / 4
    logs = (logs - logs.mean(1, keepdim=True)).clamp(-torch.tensor(LIMIT).log(), torch.tensor(LIMIT).log())
    s = logs.exp()
    return s.repeat_interleave(group, 0).contiguous(), (1 / s).contiguous()
