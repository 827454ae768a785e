"""Norm, RoPE and gated activations: the plain-torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcli.kernels.reference.sums import exp, total


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; x [..., D], weight [D] (arXiv 1910.07467)."""
    mean = total(x * x) / x.shape[-1]
    return x * (1.0 / torch.sqrt(mean + eps))[..., None] * weight


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
    gate, up = x.chunk(2, dim=1)
    inner = gate  # of the sigmoid; GELU's tanh form is x * sigmoid(2 z)
    if act == "gelu":
        inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    return gate / (exp(-inner) + 1.0) * up


class Products(Protocol):
    """The operations of the facade that `gated` is written in."""

    def matmul(self, x: torch.Tensor, weights: Sequence[Any], add_to: torch.Tensor | None = None) -> torch.Tensor: ...
    def glu(self, x: torch.Tensor, act: str) -> torch.Tensor: ...


def gated(ops: Products, x: torch.Tensor, weights: Sequence[Any], act: str) -> torch.Tensor:
    """The first products of a gated feed-forward part, activated: x [T, cols], gates over what they gate -> [T, F]."""
    return ops.glu(ops.matmul(x, weights), act)
