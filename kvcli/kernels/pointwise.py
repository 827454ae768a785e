"""Norm, RoPE and gated activations: the plain-torch reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcli.kernels.matmul import pad_rows


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; x [..., D], weight [D] (arXiv 1910.07467)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first 2 * cos.shape[1] dims of x [T, heads, D] in place, half-split order (arXiv 2104.09864).

    cos, sin: float32 [T, rope_dim / 2].
    """
    half = cos.shape[1]
    a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
    c, s = cos[:, None, :], sin[:, None, :]
    x[..., :half] = a * c - b * s
    x[..., half : 2 * half] = b * c + a * s


def glu(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x[:, :F]) * x[:, F:] for x [T, 2F]; act is "silu" or "gelu" (tanh form) (arXiv 2002.05202)."""
    gate, up = pad_rows(x).chunk(2, dim=1)
    gated = F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")
    return (gated * up)[: x.shape[0]]
