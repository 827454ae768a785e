"""Packed weights back to floats: rows of the embedding, and slices of matrices for products with many vectors."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.codes import stored
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.halves import decode_groups
from kvcli.kernels.gpu.launching import launch

GROUPS = 64  # groups of 32 elements a program expands
SLICE_BYTES = 256 << 20  # of float16 weights expanded at a time: matrices of most models whole
SLICE_ROWS = 256  # slices are of so many rows or a multiple, as the vendor's library has its tiles


@triton.jit(do_not_specialize=["first", "total", "rows"])
def expand_groups(CODES, HIGH, SCALES, SUPERS, TABLE, IDS, OUT, first, total, rows, scale, G: tl.constexpr,
                  CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
                  SPAN: tl.constexpr, UNIT: tl.constexpr, GATHER: tl.constexpr, DEALT: tl.constexpr,
                  P: tl.constexpr):  # fmt: skip
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
    source = stored(source, rows, DEALT)
    low, high = decode_groups(CODES, HIGH, SCALES, SUPERS, TABLE, source, g, seen, tl.float32, G, CODING, WORDS, KIND,
                              OFFSET, SPAN, UNIT, P)  # fmt: skip
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
        *arrays(matrix), ids if ids is not None else matrix.scales, out, first, count, matrix.rows, scale,
        G=matrix.groups, **constants(f), GATHER=ids is not None, DEALT=matrix.dealt, P=GROUPS, num_warps=4,
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
