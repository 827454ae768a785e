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
from kvcli.kernels.gpu.expand import arrays
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.halves import half_dot
from kvcli.kernels.gpu.launching import launch

MOST = 64  # rows
ROWS = 64  # of the matrix that a program has; this and what follows as measured on an H200
STEP = 4  # groups of columns at a time
STAGES = 3
PROGRAMS = 2  # at least, on each multiprocessor, if need be with parts of the columns: they keep memory busy


@triton.jit(do_not_specialize=["rows", "count", "pitch", "each"])
def _few(
    X, CODES, HIGH, SCALES, SUPERS, TABLE, OUT, rows, count, pitch, each,
    G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    SPAN: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """N rows of the matrix, `each` steps of STEP groups of columns: X [count, 32 G] . W^T, a part of the sum, into OUT
    [parts, count, pitch]."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.arange(0, T)
    part = tl.program_id(1)
    row = tl.minimum(n, rows - 1).to(tl.int64)  # what is behind the last one is not stored
    acc = half_dot(X, CODES, HIGH, SCALES, SUPERS, TABLE, row, t.to(tl.int64), t < count, part * each,
                   part * each + each, G, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, N, T, STEP, STAGES)  # fmt: skip
    out = OUT + (part * count + t[None, :]).to(tl.int64) * pitch + n[:, None]
    tl.store(out, acc, mask=(n < rows)[:, None] & (t < count)[None, :])


def can(matrix: DeviceMatrix, rows: int) -> bool:
    """Whether `product` is the way for so many rows."""
    return rows <= MOST and matrix.format.kind != PLAIN


def parts(matrices: Sequence[DeviceMatrix]) -> int:
    """How many parts of the columns are summed apart."""
    programs = sum(triton.cdiv(m.rows, ROWS) for m in matrices)
    wanted = PROGRAMS * Chip.of(matrices[0].codes.device).multiprocessors
    return min(8, triton.cdiv(wanted, programs), max(1, matrices[0].groups // 16))


def product(x: torch.Tensor, matrix: DeviceMatrix, out: torch.Tensor) -> None:
    """float16 x [T, cols] . W^T -> out float32 [parts, T, rows], a view of wider rows; the parts are yet to be summed.

    Weights and their scales are rounded to float16, sums are float32.
    """
    count, t, _ = out.shape
    each = triton.cdiv(triton.cdiv(matrix.groups, STEP), count)
    launch(_few, (triton.cdiv(matrix.rows, ROWS), count))(
        x, *arrays(matrix), out, matrix.rows, t, out.stride(1), each, G=matrix.groups, **constants(matrix.format),
        N=ROWS, T=max(16, triton.next_power_of_2(t)), STEP=STEP, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
