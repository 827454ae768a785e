"""Layers that keep a state, on a GPU: short convolutions."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.states import Carried

COLUMNS = 512  # of a row that a program convolves


@triton.jit
def _input(x, source, row, columns, there, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr):
    """What is convolved, of a row counted from the first one of x: b * z, or what the state has of earlier rows."""
    row = row + tl.zeros_like(columns)
    at, now = row.to(tl.int64) * (3 * D) + columns, there & (row >= 0)
    found = tl.load(x + at, mask=now, other=0.0) * tl.load(x + at + 2 * D, mask=now, other=0.0)
    if not FRESH:
        found += tl.load(source + (row + KERNEL - 1) * D + columns, mask=there & (row < 0), other=0.0)
    return found


@triton.jit
def _short_conv(x, weight, bias, source, out, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
                BIASED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    total = tl.zeros([WIDTH], tl.float32)
    for k in tl.static_range(KERNEL):
        tap = tl.load(weight + columns * KERNEL + k, mask=there, other=0.0)
        total += tap * _input(x, source, row - (KERNEL - 1 - k), columns, there, D, KERNEL, FRESH)
    if BIASED:
        total += tl.load(bias + columns, mask=there, other=0.0)
    c = tl.load(x + row.to(tl.int64) * (3 * D) + D + columns, mask=there, other=0.0)
    tl.store(out + row.to(tl.int64) * D + columns, c * total, mask=there)


@triton.jit
def _short_conv_state(x, source, target, rows, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
                      WIDTH: tl.constexpr):  # fmt: skip
    """The state behind `rows` rows of x. It may take the place of the one before: each column is one thread's, which
    moves its rows from the oldest on."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    for k in tl.static_range(KERNEL - 1):
        found = _input(x, source, rows - (KERNEL - 1) + k, columns, there, D, KERNEL, FRESH)
        tl.store(target + k * D + columns, found, mask=there)


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Sequence[Carried]
) -> torch.Tensor:
    """See `reference.shortconv.short_conv`; x in one piece."""
    d, kernel = weight.shape
    out, blocks = torch.empty(x.shape[0], d, device=x.device), triton.cdiv(d, COLUMNS)
    for each in carried:
        rows, given = x[each.lo : each.hi], each.target if each.source is None else each.source
        fresh, n = each.source is None, each.hi - each.lo
        launch(_short_conv, (n, blocks))(
            rows, weight, weight if bias is None else bias, given, out[each.lo : each.hi], D=d, KERNEL=kernel,
            FRESH=fresh, BIASED=bias is not None, WIDTH=COLUMNS, num_warps=4,
        )  # fmt: skip
        launch(_short_conv_state, (blocks,))(
            rows, given, each.target, n, D=d, KERNEL=kernel, FRESH=fresh, WIDTH=COLUMNS, num_warps=4
        )
    return out
