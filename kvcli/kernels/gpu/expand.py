"""Packed weights back to floats: rows of the embedding, and slices of matrices for products with many vectors."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.codes import (
    D_M,
    E4M3,
    OF_16,
    PAIR,
    QUARTERS,
    factors,
    load_planar,
    unpack,
    values_of,
)
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.launching import launch

GROUPS = 64  # groups of 32 elements a program expands
SLICE_BYTES = 256 << 20  # of float16 weights expanded at a time: matrices of most models whole
SLICE_ROWS = 256  # slices are of so many rows or a multiple, as the vendor's library has its tiles


@triton.jit
def bytes_of(words, P: tl.constexpr):
    """Words int32 [P, 1, 4] -> their bytes, signed, as float32 [P, 16]."""
    shift = 24 - 8 * tl.arange(0, 4)
    each = (words[:, :, :, None] << shift[None, None, None, :]) >> 24
    return tl.reshape(each, (P, 16)).to(tl.float32)


@triton.jit
def decode_groups(CODES, HIGH, SCALES, SUPERS, TABLE, row, g, seen, G: tl.constexpr, CODING: tl.constexpr,
                  WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr,
                  UNIT: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Groups `g` of rows `row`, int64 [P] each, where `seen`: their first and last 16 elements, float32 [P, 16] each.

    CODES and HIGH as bytes where codes are integers of four bits or more.
    """
    at = row * G + g
    i = tl.arange(0, 16)[None, :]
    if WORDS < 4:
        w0, w1, w2, high = load_planar(CODES, HIGH, row[:, None], g[:, None], seen[:, None], G, CODING, WORDS)
        a0, a1 = unpack(w0, w1, w2, high, TABLE, CODING, WORDS)
        low, high = bytes_of(a0, P), bytes_of(a1, P)
    elif CODING == OF_16:
        words = CODES + at[:, None, None] * 4 + tl.arange(0, 4)[None, None, :]
        a0, a1 = values_of(tl.load(words, mask=seen[:, None, None], other=0), TABLE)
        low, high = bytes_of(a0, P), bytes_of(a1, P)
    elif CODING == 8:
        low = tl.load(CODES + at[:, None] * 32 + i, mask=seen[:, None], other=0).to(tl.int8).to(tl.float32)
        high = tl.load(CODES + at[:, None] * 32 + 16 + i, mask=seen[:, None], other=0).to(tl.int8).to(tl.float32)
    else:
        codes = tl.load(CODES + at[:, None] * 16 + i, mask=seen[:, None], other=0).to(tl.int32)
        low, high = codes & 15, codes >> 4
        b, j = i // 4, i % 4
        if CODING == 5:
            bits = tl.load(HIGH + at[:, None] * 4 + j, mask=seen[:, None], other=0).to(tl.int32)
            low += ((bits >> b) & 1) << 4
            high += ((bits >> (b + 4)) & 1) << 4
        if CODING == 6:
            bits = tl.load(HIGH + at[:, None] * 8 + (b // 2) * 4 + j, mask=seen[:, None], other=0).to(tl.int32)
            bits = bits >> ((b % 2) * 4)
            low += (bits & 3) << 4
            high += ((bits >> 2) & 3) << 4
        low, high = low.to(tl.float32), high.to(tl.float32)
    s = tl.load(SCALES + (row * (G // SPAN) + g // SPAN), mask=seen, other=0)
    d = s
    if KIND >= PAIR and KIND != E4M3:
        d = tl.load(SUPERS + (row * (G // 8) + g // 8), mask=seen, other=0)
    f0, m0, f1, m1 = factors(s, d, KIND, UNIT)
    low, high = f0[:, None] * (low - OFFSET), f1[:, None] * (high - OFFSET)
    if KIND >= D_M and KIND <= QUARTERS:
        low, high = low - m0[:, None], high - m1[:, None]
    return low, high


@triton.jit(do_not_specialize=["first", "total"])
def expand_groups(CODES, HIGH, SCALES, SUPERS, TABLE, IDS, OUT, first, total, scale, G: tl.constexpr,
                  CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
                  SPAN: tl.constexpr, UNIT: tl.constexpr, GATHER: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """Rows from `first` on, or rows IDS, as floats [rows, 32 G]."""
    p = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    seen = p < total
    row, g = p // G, p % G
    if GATHER:
        source = tl.maximum(
            tl.load(IDS + row, mask=seen, other=0), 0
        )  # negative: an error that the host has yet to see
    else:
        source = row + first
    low, high = decode_groups(
        CODES, HIGH, SCALES, SUPERS, TABLE, source, g, seen, G, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, P
    )  # fmt: skip
    out = OUT + p[:, None] * 32 + tl.arange(0, 16)[None, :]
    tl.store(out, low * scale, mask=seen[:, None])
    tl.store(out + 16, high * scale, mask=seen[:, None])


def arrays(matrix: DeviceMatrix) -> tuple[torch.Tensor, ...]:
    """The arrays of a packed matrix as `decode_groups` takes them."""
    as_bytes = 4 <= matrix.format.coding <= 8
    codes, high = (x.view(torch.uint8) if as_bytes else x for x in (matrix.codes, matrix.high))
    return codes, high, matrix.scales, matrix.supers, matrix.table


def rows(matrix: DeviceMatrix, out: torch.Tensor, first: int = 0, ids: torch.Tensor | None = None,
         scale: float = 1.0) -> torch.Tensor:  # fmt: skip
    """Fill out [n, cols] (any float dtype) with rows from `first` on, or with rows `ids` int64 [n], times `scale`."""
    f, count = matrix.format, out.shape[0] * matrix.groups
    if f.kind == PLAIN:
        picked = (
            matrix.codes[first : first + out.shape[0]]
            if ids is None
            else matrix.codes.index_select(0, ids.clamp(min=0))
        )
        return out.copy_(picked) if scale == 1.0 else out.copy_(picked.float() * scale)
    launch(expand_groups, (triton.cdiv(count, GROUPS),))(
        *arrays(matrix), ids if ids is not None else matrix.scales, out, first, count, scale, G=matrix.groups,
        **constants(f), GATHER=ids is not None, P=GROUPS, num_warps=4,
    )  # fmt: skip
    return out


def changed_rows(matrix: DeviceMatrix, out: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """`rows` of those ids, with what is added to the matrix."""
    rows(matrix, out, ids=ids, scale=scale)
    if matrix.change:
        out.addmm_(matrix.change.b[ids.clamp(min=0)], matrix.change.a.codes, alpha=scale)
    return out


def slices(matrix: DeviceMatrix, room: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, float16 [n, cols]) over all rows; each slice overwrites the one before, in `room` for as many numbers
    as `room_for` says."""
    if matrix.codes.dtype == torch.float16:
        yield 0, matrix.codes
        return
    step = min(matrix.rows, _slice_rows(matrix.cols))
    buffer = room[: step * matrix.cols].view(step, matrix.cols)
    for first in range(0, matrix.rows, step):
        yield first, rows(matrix, buffer[: matrix.rows - first], first)


def room_for(matrix: DeviceMatrix) -> int:
    """Float16 numbers that `slices` needs."""
    return 0 if matrix.codes.dtype == torch.float16 else min(matrix.rows, _slice_rows(matrix.cols)) * matrix.cols


def _slice_rows(cols: int) -> int:
    return max(1, SLICE_BYTES // (2 * cols) // SLICE_ROWS) * SLICE_ROWS
