"""The Walsh-Hadamard rotation of head dims: spreads an outlier over all elements before they are quantized.

Orthonormal and its own inverse. Queries and keys are rotated alike, so scores do not change; values are rotated and the
attention output is rotated back (QuaRot, arXiv 2404.00456, which folds part of it into weights; here it is applied to
rows).
"""

from __future__ import annotations

import torch


def block(dim: int) -> int:
    """The largest power of two that divides `dim`: the rotation is block-diagonal with blocks of this size."""
    return dim & -dim


def rotate(x: torch.Tensor) -> torch.Tensor:
    """x float32 [..., D] times the Hadamard matrix of each block, scaled to keep lengths."""
    size = block(x.shape[-1])
    y = x.reshape(*x.shape[:-1], -1, size)
    half = 1
    while half < size:
        pairs = y.reshape(*y.shape[:-1], size // (2 * half), 2, half)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), -2).reshape(y.shape)
        half *= 2
    return (y * size**-0.5).reshape(x.shape)


def rotate_(x: torch.Tensor) -> None:
    """`rotate` in place; x float32 [T, heads, D]."""
    x.copy_(rotate(x))
