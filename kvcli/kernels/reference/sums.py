"""Sums and products of the reference, the same bits in any order.

A BLAS, a library's sum and its exponential round as the shape, the number of threads or the place in a vector suggests,
so a row alone and the same row in a batch would differ in their last bits. Here results depend on the terms and how
many there are, and are the same bits on every processor.

Products are sums of whole multiples of a unit, of so few bits that a double holds every sum of them: nothing is rounded
on the way, so that the order does not matter, and a BLAS may choose it (as in Ozaki, Ogita, Oishi and Rump 2012,
doi:10.1007/s11075-011-9478-1). All else is additions and multiplications of single elements, which IEEE 754 rounds in
one way only.
"""

from __future__ import annotations

import torch

_WEIGHT_BITS = 24  # of a factor w, from the largest of its row down: as many as a float32 has
_ROW_BITS = 30  # of a factor x, at least
_EXPONENT = 0x7FF << 52  # the bits of a double that hold it
_LEAST = 2.0**-200  # less than any float32's unit, and more than nothing


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


def _unit(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x [..., K] -> float64 [..., 1]: a power of two of which every element has less than 2^bits; 0 for zeros."""
    largest = x.abs().amax(-1, keepdim=True).double()
    return (largest.view(torch.int64) & _EXPONENT).view(torch.float64) * 2.0 ** (1 - bits)


def _far(unit: torch.Tensor) -> torch.Tensor:
    """1.5 * 2^52 units: doubles there are a unit apart, so to add and to subtract it rounds x < 2^51 to whole units."""
    return unit * (1.5 * 2.0**52)


def _parts(k: int) -> tuple[int, int]:
    """How many parts a row of `k` elements is split into, and their bits: a double holds any sum of `k` products."""
    bits = 53 - _WEIGHT_BITS - k.bit_length()
    return -(-_ROW_BITS // bits), bits


def split(x: torch.Tensor) -> torch.Tensor:
    """x [..., T, K] -> float64 [..., P * T, K] for `dot`: the leading bits of all rows, then the next ones, P times."""
    count, bits = _parts(x.shape[-1])
    parts = x.new_empty((*x.shape[:-2], count, *x.shape[-2:]), dtype=torch.float64)
    rest, far = x.double(), _far(_unit(x, bits))
    for i in range(count):
        if i:
            rest, far = rest - parts[..., i - 1, :, :], far * 2.0**-bits
        torch.add(rest, far, out=parts[..., i, :, :]).sub_(far)
    return parts.flatten(-3, -2)


def dot(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`split` x [..., T, K] . w [..., N, K] -> the products' sums over K, float32 [..., T, N].

    A row of w is rounded to 24 bits from its largest element down, one of x to 30 or more.
    """
    far = _far(_unit(w, _WEIGHT_BITS))
    return _joined(x, w.to(torch.float64, copy=True).add_(far).sub_(far).mT)


def mix(p: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The sums of `rows` [..., K, N] weighted by p [..., T, K] -> float32 [..., T, N].

    A row is rounded to 24 bits from its own largest element down: whatever stands in one of weight 0 changes nothing.
    """
    unit = _unit(rows, _WEIGHT_BITS).clamp_min_(_LEAST)
    return _joined(split(p * unit.mT), (rows / unit).round_())


def _joined(parts: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`split` rows . w [..., K, N], exact by parts, from the last bits to the first."""
    count, _ = _parts(w.shape[-2])
    sums = (parts @ w).unflatten(-2, (count, -1))
    found = sums[..., -1, :, :]
    for i in range(count - 2, -1, -1):
        found = found + sums[..., i, :, :]
    return found.float()


def total(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dim."""
    return fold(x.movedim(-1, 0).clone(memory_format=torch.contiguous_format))


def sqrt(x: torch.Tensor) -> torch.Tensor:
    """The square root as IEEE 754 rounds it: that of a vector library is off by a bit here and there.

    A double's root, even if off by its last bits, is on the right side of the middle between two floats.
    """
    return x.double().sqrt_().float()


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 88, within 2 ulp; below -87.3 it is 0 (Cephes' polynomial, range reduced by ln 2 in two parts)."""
    r = x.clamp(-87.3, 88.0)
    n = (r * 1.44269504088896341).round_()
    r.sub_(n * 0.693359375).sub_(n * -2.12194440e-4)
    y = (r * 1.9875691500e-4).add_(1.3981999507e-3)
    for factor in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y.mul_(r).add_(factor)
    y.mul_(r * r).add_(r).add_(1.0)
    power = n.to(torch.int32).add_(127).bitwise_left_shift_(23).view(torch.float32)  # 2^n
    return y.mul_(power).masked_fill_(x < -87.3, 0.0)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Near zero Cephes' polynomial, elsewhere by `exp`."""
    square = x * x
    y = square * -5.70498872745e-3 + 2.06390887954e-2
    for factor in (-5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1):
        y = y * square + factor
    far = 1.0 - 2.0 / (exp(x.abs().clamp(max=20.0) * 2.0) + 1.0)
    return torch.where(x.abs() < 0.625, y * square * x + x, torch.copysign(far, x))
