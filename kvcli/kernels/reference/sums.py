"""Sums and products of the reference, in an order of our own.

A BLAS, a library's sum and its exponential round as the shape, the number of threads or the place in a vector suggests,
so a row alone and the same row in a batch would differ in their last bits. Here everything is additions and
multiplications of single elements, which IEEE 754 rounds in one way only: results depend on the terms and how many
there are, and are the same bits on every processor.
"""

from __future__ import annotations

import torch

TERMS = 1 << 20  # multiplied out at a time: 4 MiB of float32


def fold(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the first dim, by halves: the last n // 2 of n terms are added to the first, until one is left.

    Overwrites `terms` and returns a view of it.
    """
    n = terms.shape[0]
    while n > 1:
        half = n // 2
        terms[:half] += terms[n - half : n]
        n -= half
    return terms[0]


def dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [K, B, T], w [K, B, N] -> the products' sums over K, [B, T, N].

    Fast where N is long and both are contiguous: K comes first, so that all additions are of whole runs of memory.
    """
    (k, blocks, t), n = x.shape, w.shape[2]
    rows = min(max(1, TERMS // max(1, w.numel())), t)
    out, room = x.new_empty(blocks, t, n), x.new_empty(k, blocks, rows, n)
    for start in range(0, t, rows):
        part = x[:, :, start : start + rows, None]
        terms = room if part.shape[2] == rows else room.flatten()[: part.numel() * n].view(*part.shape[:3], n)
        out[:, start : start + rows] = fold(torch.mul(part, w[:, :, None], out=terms))
    return out


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dim."""
    return fold(x.movedim(-1, 0).clone(memory_format=torch.contiguous_format))


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88, within 2 ulp; below -87.3 it is 0 (Cephes' polynomial, range reduced by ln 2 in two parts)."""
    bounded = x.clamp(-87.3, 88.0)
    n = (bounded * 1.44269504088896341).round()
    r = (bounded - n * 0.693359375) - n * -2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + factor
    y = y * (r * r) + r + 1.0
    power = (n.to(torch.int32) + 127 << 23).view(torch.float32)  # 2^n
    return torch.where(x < -87.3, 0.0, y * power)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Near zero Cephes' polynomial, elsewhere by `exp`."""
    square = x * x
    y = square * -5.70498872745e-3 + 2.06390887954e-2
    for factor in (-5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        y = y * square + factor
    far = 1.0 - 2.0 / (exp(x.abs().clamp(max=20.0) * 2.0) + 1.0)
    return torch.where(x.abs() < 0.625, y * square * x + x, torch.copysign(far, x))
