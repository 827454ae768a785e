"""Norms, RoPE, activations and soft caps: the plain-torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcli.kernels.reference.sums import exp, sqrt, tanh, total

CLAMP = 7.0


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim; x [..., D], weight [D] (arXiv 1910.07467)."""
    mean = total(x * x) / x.shape[-1]
    return x * (1.0 / sqrt(mean + eps))[..., None] * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim; x [..., D] (arXiv 1607.06450)."""
    y = rms_norm(x - (total(x) / x.shape[-1])[..., None], weight, eps)
    return y if bias is None else y + bias


def rope_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first 2 * cos.shape[1] dims of x [T, heads, D] in place, half-split order (arXiv 2104.09864).

    cos, sin: float32 [T, rope_dim / 2].
    """
    half = cos.shape[1]
    a, b = x[..., :half].clone(), x[..., half : 2 * half].clone()
    c, s = cos[:, None, :], sin[:, None, :]
    x[..., :half] = a * c - b * s
    x[..., half : 2 * half] = b * c + a * s


def activate(x: torch.Tensor, act: str) -> torch.Tensor:
    """Apply "silu" (arXiv 1702.03118), "gelu" (its tanh form, arXiv 1606.08415) or "relu2" (arXiv 2109.08668)."""
    if act == "relu2":
        positive = x.clamp(min=0)
        return positive * positive
    inner = x  # of the sigmoid; GELU's tanh form is x * sigmoid(2 z)
    if act == "gelu":
        inner = (x + x * x * x * 0.044715) * 1.5957691216057308
    return x / (exp(-inner) + 1.0)


def glu(x: torch.Tensor, act: str) -> torch.Tensor:
    """act(x[:, :F]) * x[:, F:] for x [T, 2F] (arXiv 2002.05202).

    "clamped" is (min(max(up, -7), 7) + 1) * g * sigmoid(1.702 g), g = min(gate, 7), as in gpt-oss (arXiv 2508.10925).
    """
    gate, up = x.chunk(2, dim=1)
    if act == "clamped":
        gate = gate.clamp(max=CLAMP)
        return gate / (exp(gate * -1.702) + 1.0) * (up.clamp(-CLAMP, CLAMP) + 1.0)
    return activate(gate, act) * up


def cut_gates(x: torch.Tensor, cutoff: float) -> torch.Tensor:
    """Of gates over what they gate, x [T, 2F], changed: gates less their mean and `cutoff` standard deviations, 0 where
    that is negative (statistical top-k, arXiv 2506.06644)."""
    gates = x[:, : x.shape[1] // 2]
    mean = (total(gates) / gates.shape[1])[:, None]
    variance = (total((gates - mean).square()) / gates.shape[1])[:, None]
    gates.copy_((gates - (mean + sqrt(variance) * cutoff)).clamp(min=0))
    return x


def add_(x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None:
    """x [T, D] += scale * y, for y [T, D], or [D] for all rows."""
    x += y if scale == 1 else y * scale


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(x / cap), of each element (arXiv 2408.00118)."""
    return tanh(x / cap) * cap


class Products(Protocol):
    """The operations of the facade that `gated` and `activated` are written in."""

    def matmul(self, x: torch.Tensor, weights: Sequence[Any], add_to: torch.Tensor | None = None) -> torch.Tensor: ...
    def add_(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None: ...
    def activate(self, x: torch.Tensor, act: str) -> torch.Tensor: ...
    def glu(self, x: torch.Tensor, act: str) -> torch.Tensor: ...


def gated(
    ops: Products, x: torch.Tensor, weights: Sequence[Any], act: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The first products of a gated feed-forward part, activated: x [T, cols], gates over what they gate -> [T, F].

    `bias` [2F] is added to the products.
    """
    return ops.glu(_biased(ops, ops.matmul(x, weights), bias), act)


def activated(
    ops: Products, x: torch.Tensor, weights: Sequence[Any], act: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The first products of a feed-forward part without gates, activated: x [T, cols], `bias` [F] -> [T, F]."""
    return ops.activate(_biased(ops, ops.matmul(x, weights), bias), act)


def _biased(ops: Products, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is not None:
        ops.add_(x, bias)
    return x
