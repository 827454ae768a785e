"""Products of packed matrices with a few rows: weights are read once, and decoded on their way to the tensor cores.

The last tokens of a prompt, a follow-up turn, several sequences, or drafts to verify: up to MOST rows take about as
long as one, since reading the weights is what takes the time.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.language import LEADING, SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.tiles import launch_options
from kvcli.kernels.gpu.woven import BLOCK, NARROW, PAIRS, woven_dot

MOST = 64  # rows
FEW = 0  # rows up to which products are by single warps, and not by warp groups; with 8 a batch of 8 took 12 % longer
BLOCKS = 8  # of columns that are summed in one go, at least


@dataclass(frozen=True)
class Tiling:
    """Rows of the matrix, warps, rows of the tile and pipeline stages of a program, and how many of these a
    multiprocessor should have."""

    rows: int
    warps: int
    width: int
    stages: int
    programs: int


@triton.jit(do_not_specialize=["rows", "count", "pitch", "each"])
def _few(
    X, CODES, HIGH, SCALES, SUPERS, TABLE, OUT, rows, count, pitch, each,
    G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    SPAN: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr, T: tl.constexpr, STAGES: tl.constexpr, WARPS: tl.constexpr,
    HOW: tl.constexpr, PDL: tl.constexpr,
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
                    WORDS, KIND, OFFSET, SPAN, UNIT, N, T, STAGES, WARPS, HOW)  # fmt: skip
    out = OUT + (part * count + t[None, :]).to(tl.int64) * pitch + n[:, None]
    tl.store(out, acc, mask=(n < rows)[:, None] & (t < count)[None, :])


def can(matrix: DeviceMatrix, rows: int) -> bool:
    """Whether `product` is the way for so many rows."""
    return rows <= MOST and matrix.format.kind != PLAIN


def weave_of(rows: int, narrow: int = NARROW) -> int:
    """How so many rows are woven for `product` (see `woven.place`), FEW of them `narrow`; 0 = they are too many."""
    return 0 if rows > MOST else narrow if rows <= FEW else PAIRS


def _tiling(matrix: DeviceMatrix, rows: int, woven: int) -> Tiling:
    """Of a product with so many rows, woven so; as measured on an H200."""
    if rows <= FEW and woven == NARROW:
        return Tiling(32, 2, 8, 4, 8)
    # of more rows the tiles take more room
    stages = 4 if rows <= 16 else 2 if _large(matrix) else 3
    return Tiling(64, 4, max(16, triton.next_power_of_2(rows)), stages, 3 if rows <= 16 else 2)


def _large(matrix: DeviceMatrix) -> bool:
    """Whether every multiprocessor has two programs of 64 rows, or more."""
    return matrix.rows >= 128 * Chip.of(matrix.codes.device).multiprocessors


def parts(matrices: Sequence[DeviceMatrix], rows: int, woven: int) -> int:
    """How many parts of the columns are summed apart, so that multiprocessors have as many programs as tilings want,
    those of warp groups two thirds as many where each has much to do: they keep memory busy."""
    chip, blocks = Chip.of(matrices[0].codes.device), triton.cdiv(matrices[0].cols, BLOCK)
    tilings = [_tiling(m, rows, woven) for m in matrices]
    programs = sum(
        triton.cdiv(m.rows, 2 * tiles.rows if tiles.warps == 4 and _large(m) else tiles.rows)
        for m, tiles in zip(matrices, tilings, strict=True)
    )
    return max(1, min(8, round(tilings[0].programs * chip.multiprocessors / programs), blocks // BLOCKS))


def product(x: torch.Tensor, matrix: DeviceMatrix, out: torch.Tensor, woven: int, pdl: int = SERIAL) -> None:
    """Float16 x [T, ...], woven so, . W^T -> out float32 [parts, T, rows], a view of wider rows; the parts are yet to
    be summed.

    Weights and their scales are rounded to float16, sums are float32.
    """
    count, t, _ = out.shape
    pdl = LEADING if pdl else SERIAL  # programs of the next kernel that stand ready would take room from those of this
    each, tiles = triton.cdiv(triton.cdiv(matrix.cols, BLOCK), count), _tiling(matrix, t, woven)
    launch(_few, (triton.cdiv(matrix.rows, tiles.rows), count))(
        x, *matrix.arrays, matrix.table, out, matrix.rows, t, out.stride(1), each, G=matrix.groups,
        **constants(matrix.format), N=tiles.rows, T=tiles.width, STAGES=tiles.stages, WARPS=tiles.warps, HOW=woven,
        PDL=pdl, **launch_options(pdl, tiles.warps),
    )  # fmt: skip
