"""Rows on their way from one product to the next: float16, with one kernel between two products.

A product of many rows reads float16 and is summed in float32. Rows behind a norm fit into float16 as they are. Others,
which may be of any size, are divided by their largest element; the product is multiplied by it again, as it is stored
or added to the residual stream.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.formats import GROUP
from kvcli.kernels.gpu.language import ACTS, glu
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.tiles import LARGEST_HALF

COLUMNS = 1024  # of a row that a program scales


class HalfRows(NamedTuple):
    """`values` float16 [T, n], to be multiplied by `scales` float32 [T], None = by one."""

    values: torch.Tensor
    scales: torch.Tensor | None = None


def _warps(width: int) -> int:
    """Of a program that holds a row of so many elements in registers."""
    return max(1, min(16, width // 512))


@triton.jit
def _norm(x, weight, out, eps, N: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    v = tl.load(x + row * N + i, mask=i < N, other=0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / N + eps) * tl.load(weight + i, mask=i < N, other=0.0)
    tl.store(out + row * N + i, tl.clamp(v, -LARGEST_HALF, LARGEST_HALF).to(tl.float16), mask=i < N)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`pointwise.rms_norm` of x float32 [T, n] -> float16 [T, n]."""
    out, pad = torch.empty_like(x, dtype=torch.float16), triton.next_power_of_2(x.shape[1])
    launch(_norm, (x.shape[0],))(x, weight, out, eps, x.shape[1], pad, num_warps=_warps(pad))
    return out


@triton.jit
def _scale_down(v, row, values, scales, N: tl.constexpr, PAD: tl.constexpr):
    """Write a row, divided by its largest element, and that."""
    i = tl.arange(0, PAD)
    largest = tl.maximum(tl.max(tl.abs(v), 0), 1e-30)
    tl.store(values + row * N + i, (v / largest).to(tl.float16), mask=i < N)
    tl.store(scales + row, largest)


@triton.jit
def _halve(x, values, scales, N: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    _scale_down(tl.load(x + row * N + i, mask=i < N, other=0.0), row, values, scales, N, PAD)


@triton.jit
def _gate(x, values, scales, N: tl.constexpr, PAD: tl.constexpr, ACT: tl.constexpr, RUN: tl.constexpr):
    """x: rows of 2 N, runs of RUN gates, each with what they gate behind it."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    at = x + row * (2 * N) + i // RUN * (2 * RUN) + i % RUN
    v = glu(tl.load(at, mask=i < N, other=0.0), tl.load(at + RUN, mask=i < N, other=0.0), ACT)
    _scale_down(v, row, values, scales, N, PAD)


def _empty(rows: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, width, dtype=torch.float16, device=device), torch.empty(rows, device=device)


def halve(x: torch.Tensor) -> HalfRows:
    """Float32 rows [T, n] of any size."""
    values, scales = _empty(x.shape[0], x.shape[1], x.device)
    pad = triton.next_power_of_2(x.shape[1])
    launch(_halve, (x.shape[0],))(x, values, scales, x.shape[1], pad, num_warps=_warps(pad))
    return HalfRows(values, scales)


def gate(x: torch.Tensor, act: str, paired: bool) -> HalfRows:
    """`pointwise.glu` of x float32 [T, 2 n]. `paired`: gates and what they gate alternate in runs (`DeviceMatrix`)."""
    width = x.shape[1] // 2
    values, scales = _empty(x.shape[0], width, x.device)
    pad = triton.next_power_of_2(width)
    launch(_gate, (x.shape[0],))(
        x, values, scales, width, pad, ACTS[act], GROUP if paired else width, num_warps=_warps(pad)
    )
    return HalfRows(values, scales)


@triton.jit
def _finish(product, scales, to, rows, n, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr,
            SCALED: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    v = tl.load(product + row * n + i, mask=i < n, other=0.0)
    for part in tl.static_range(1, PARTS):
        v += tl.load(product + (part * rows + row) * n + i, mask=i < n, other=0.0)
    if SCALED:
        v *= tl.load(scales + row)
    if ADD:
        v += tl.load(to + row * n + i, mask=i < n, other=0.0)
    tl.store(to + row * n + i, v, mask=i < n)


def finish(product: torch.Tensor, scales: torch.Tensor | None, add_to: torch.Tensor | None) -> torch.Tensor:
    """A product float32 [parts, T, n], summed over its parts, times the scales [T] of its rows, added to `add_to` where
    there is one -> [T, n]."""
    parts, t, n = product.shape
    if parts == 1 and scales is None and add_to is None:
        return product[0]
    to = product[0] if add_to is None else add_to
    launch(_finish, (t, triton.cdiv(n, COLUMNS)))(
        product, product if scales is None else scales, to, t, n, COLUMNS, parts, add_to is not None,
        scales is not None, num_warps=4,
    )  # fmt: skip
    return to
