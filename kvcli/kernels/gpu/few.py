"""Products of packed matrices with a few rows: weights are read once, and decoded on their way to the tensor cores.

The last tokens of a prompt, a follow-up turn, several sequences, or drafts to verify: up to MOST rows take about as
long as one, since reading the weights is what takes the time.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.language import LEADING, SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.tiles import launch_options
from kvcli.kernels.gpu.woven import BLOCK, WARPS, woven_dot

MOST = 64  # rows
ROWS = 64  # of the matrix that a program has; this and what follows as measured on an H200
BLOCKS = 8  # of columns that are summed in one go, at least
FEWEST = 16  # rows of a tile


@triton.jit(do_not_specialize=["rows", "count", "pitch", "each"])
def _few(
    X, CODES, HIGH, SCALES, SUPERS, TABLE, OUT, rows, count, pitch, each,
    G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    SPAN: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N rows of the matrix, `each` blocks of columns: X [count, ...] . W^T, a part of the sum, into OUT [parts, count,
    pitch]."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.arange(0, T)
    part = tl.program_id(1)
    row = tl.minimum(n, rows - 1).to(tl.int64)  # what is behind the last one is not stored
    last = tl.minimum(part * each + each, tl.cdiv(G, 4))
    wait_for_previous(PDL)
    acc = woven_dot(X, CODES, HIGH, SCALES, SUPERS, TABLE, row, t.to(tl.int64), t < count, part * each, last, G, CODING,
                    WORDS, KIND, OFFSET, SPAN, UNIT, N, T, STAGES)  # fmt: skip
    out = OUT + (part * count + t[None, :]).to(tl.int64) * pitch + n[:, None]
    tl.store(out, acc, mask=(n < rows)[:, None] & (t < count)[None, :])


def can(matrix: DeviceMatrix, rows: int) -> bool:
    """Whether `product` is the way for so many rows."""
    return rows <= MOST and matrix.format.kind != PLAIN


def _large(matrix: DeviceMatrix) -> bool:
    """Whether every multiprocessor has two programs, or more."""
    return matrix.rows >= 2 * ROWS * Chip.of(matrix.codes.device).multiprocessors


def parts(matrices: Sequence[DeviceMatrix], rows: int) -> int:
    """How many parts of the columns are summed apart, so that each multiprocessor has three programs, or two where each
    of them has much to do: they keep memory busy."""
    chip, blocks = Chip.of(matrices[0].codes.device), triton.cdiv(matrices[0].cols, BLOCK)
    programs = sum(triton.cdiv(m.rows, 2 * ROWS if _large(m) else ROWS) for m in matrices)
    wanted = (3 if rows <= FEWEST else 2) * chip.multiprocessors
    return max(1, min(8, round(wanted / programs), blocks // BLOCKS))


def product(x: torch.Tensor, matrix: DeviceMatrix, out: torch.Tensor, pdl: int = SERIAL) -> None:
    """Woven float16 x [T, ...] . W^T -> out float32 [parts, T, rows], a view of wider rows; the parts are yet to be
    summed.

    Weights and their scales are rounded to float16, sums are float32.
    """
    count, t, _ = out.shape
    pdl = LEADING if pdl else SERIAL  # programs of the next kernel that stand ready would take room from those of this
    each = triton.cdiv(triton.cdiv(matrix.cols, BLOCK), count)
    stages = 4 if t <= FEWEST else 2 if _large(matrix) else 3  # of more rows the tiles take more room
    launch(_few, (triton.cdiv(matrix.rows, ROWS), count))(
        x, *matrix.arrays, matrix.table, out, matrix.rows, t, out.stride(1), each, G=matrix.groups,
        **constants(matrix.format), N=ROWS, T=max(FEWEST, triton.next_power_of_2(t)),
        STAGES=stages, PDL=pdl, **launch_options(pdl, WARPS.value),
    )  # fmt: skip
