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
from kvcli.kernels.gpu.codes import stored
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix, constants
from kvcli.kernels.gpu.language import BESIDE, LEADING, SERIAL, wait_at_end, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.tiles import launch_options
from kvcli.kernels.gpu.woven import BLOCK, GROUPS, WARPS, woven_dot

MOST = 64  # rows
FEWEST = 16  # rows of a tile
LEAST = 8 * 64 * BLOCK  # weights of a program
MOST_PARTS = 8


@dataclass(frozen=True)
class Tile:
    """Rows of the matrix that a program has, blocks of columns a turn, and stages of what is copied ahead."""

    rows: int
    blocks: int
    stages: int


def tile(matrix: DeviceMatrix, rows: int) -> Tile:
    """As measured on an H200. Codes are half of what products of a few rows read from the L2 cache: pieces of scales
    are shorter than what it hands over, and each program reads the rows that it multiplies with. Two blocks a turn, or
    twice as many rows of the matrix, leave less of that."""
    if rows > FEWEST:
        return Tile(128 if _large(matrix) else 64, 1, 3)
    if matrix.format.coding == 6:
        return Tile(128, 1, 3)
    pairs = matrix.format.words == 4 and matrix.groups % (2 * GROUPS.value) == 0
    return Tile(64, 2, 3) if pairs else Tile(64, 1, 4)


@triton.jit(do_not_specialize=["rows", "count", "pitch", "each"])
def _few(
    X, X_SCALES, CODES, HIGH, SCALES, SUPERS, TABLE, OUT, rows, count, pitch, each,
    G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr,
    SPAN: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr, T: tl.constexpr, BLOCKS: tl.constexpr,
    STAGES: tl.constexpr, X_SCALED: tl.constexpr, DEALT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """N rows of the matrix, `each` turns of BLOCKS blocks of columns: X [count, ...] . W^T, a part of the sum, into OUT
    [parts, count, pitch]. X_SCALES, X_SCALED: see `woven_dot`."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.arange(0, T)
    part = tl.program_id(1)
    row = stored(tl.minimum(n, rows - 1), rows, DEALT).to(tl.int64)  # what is behind the last one is not stored
    last = tl.minimum(part * each + each, tl.cdiv(G, 4 * BLOCKS))
    wait_for_previous(PDL)
    acc = woven_dot(X, X_SCALES, CODES, HIGH, SCALES, SUPERS, TABLE, row, t.to(tl.int64), t < count, part * each, last,
                    G, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, N, T, BLOCKS, STAGES, X_SCALED)  # fmt: skip
    out = OUT + (part * count + t[None, :]).to(tl.int64) * pitch + n[:, None]
    tl.store(out, acc, mask=(n < rows)[:, None] & (t < count)[None, :])
    wait_at_end(PDL)


def can(matrix: DeviceMatrix, rows: int) -> bool:
    """Whether `product` is the way for so many rows."""
    return rows <= MOST and matrix.format.kind != PLAIN


def _large(matrix: DeviceMatrix) -> bool:
    """Whether every multiprocessor has two programs of 64 rows, or more."""
    return matrix.rows >= 128 * Chip.of(matrix.codes.device).multiprocessors


def parts(matrices: Sequence[DeviceMatrix], rows: int) -> int:
    """How many parts of the columns are summed apart, so that each multiprocessor has three programs, or two where each
    of them has much to do: they keep memory busy."""
    tall = [tile(m, rows).rows for m in matrices]
    programs = sum(triton.cdiv(m.rows, 128 if _large(m) else n) for m, n in zip(matrices, tall, strict=True))
    wanted = (3 if rows <= FEWEST else 2) * Chip.of(matrices[0].codes.device).multiprocessors
    return max(1, min(MOST_PARTS, round(wanted / programs), min(tall) * matrices[0].cols // LEAST))


def product(
    x: torch.Tensor, matrix: DeviceMatrix, out: torch.Tensor, pdl: int = SERIAL, chosen: Tile | None = None,
    scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Woven float16 x [T, ...] . W^T -> out float32 [parts, T, rows], a view of wider rows; the parts are yet to be
    summed. `pdl`: see `language.SERIAL`; BESIDE: beside a product of the same rows. `scales`: float32 [T, ...], which
    each SCALED blocks of x are multiplied by.

    Weights and their scales are rounded to float16, sums are float32.
    """
    count, t, _ = out.shape
    if pdl != BESIDE:  # programs of the next kernel that stand ready would take room from those of this
        pdl = LEADING if pdl else SERIAL
    of = chosen or tile(matrix, t)
    each = triton.cdiv(triton.cdiv(matrix.cols, of.blocks * BLOCK), count)
    launch(_few, (triton.cdiv(matrix.rows, of.rows), count))(
        x, out if scales is None else scales, *matrix.arrays, matrix.table, out, matrix.rows, t, out.stride(1), each,
        G=matrix.groups,
        **constants(matrix.format), N=of.rows, T=max(FEWEST, triton.next_power_of_2(t)), BLOCKS=of.blocks,
        STAGES=of.stages, X_SCALED=scales is not None, DEALT=matrix.dealt, PDL=pdl, **launch_options(pdl, WARPS.value),
    )  # fmt: skip
