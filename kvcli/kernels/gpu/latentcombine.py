"""Merging of partial results of attention over latents (latents.py), and turning back those of rotated values."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import Partials, cells_of
from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import hadamard
from kvcli.kernels.gpu.tiles import bound, launch_options, tile_parts
from kvcli.kernels.reference.rotation import block

MOST_PARTS = 512  # partial results of a query
MERGED = 16384  # numbers of them that a program has at a time
DIMS_AT_ONCE = 64  # that a program merges
PIECE = tl.constexpr(DIMS_AT_ONCE)


def turned(pages: DevicePages) -> int:
    """How partial results of rotated values are turned back, but for what is inside of pieces of DIMS_AT_ONCE dims, so
    that many programs can merge a head and finish it: 2 = pieces have even elements or odd ones, 4 = neighbours (as
    tiles have them); 0 = not at all."""
    dim, parts = pages.record.dim_v, tile_parts(pages.record.codec_v)
    fits = parts > 1 and block(dim) == dim and dim >= parts * DIMS_AT_ONCE
    return parts if pages.rotated[1] and fits else 0


@triton.jit
def halves(a):
    """The sum and the difference of the first half of the columns and the second one."""
    first, second = tl.split(tl.permute(tl.reshape(a, (a.shape[0], 2, a.shape[1] // 2)), (0, 2, 1)))
    return first + second, first - second


@triton.jit
def _store_piece(out, cell, ok, a, piece: tl.constexpr, DIM: tl.constexpr):
    d = tl.arange(0, PIECE) + piece * PIECE
    tl.store(out + cell[:, None] * DIM + d[None, :], a, mask=ok[:, None])


@triton.jit
def store_turned(out, cell, ok, a, i: tl.constexpr, DIM: tl.constexpr):
    """Part i of sums, rotated but for what is inside of a piece; see `turned`."""
    EACH: tl.constexpr = a.shape[1] // PIECE
    if EACH == 1:
        _store_piece(out, cell, ok, a, i, DIM)
    else:
        a0, a1 = halves(a)
        if EACH == 2:
            _store_piece(out, cell, ok, a0, 2 * i, DIM)
            _store_piece(out, cell, ok, a1, 2 * i + 1, DIM)
        else:
            a00, a01 = halves(a0)
            a10, a11 = halves(a1)
            _store_piece(out, cell, ok, a00, 4 * i, DIM)
            _store_piece(out, cell, ok, a01, 4 * i + 1, DIM)
            _store_piece(out, cell, ok, a10, 4 * i + 2, DIM)
            _store_piece(out, cell, ok, a11, 4 * i + 3, DIM)


@triton.jit(do_not_specialize=["parts"])
def _combine_latents(out, tops, totals, starts, result, parts, HEADS: tl.constexpr, DIM: tl.constexpr,
                     PAD: tl.constexpr, TURN: tl.constexpr, TURNED: tl.constexpr, MOST: tl.constexpr,
                     AT_ONCE: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program a head, row, and PAD of the dims. TURN: the block of the Hadamard rotation; 0 = none. TURNED: see
    `turned`; APART: see `PageLists`."""
    head = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    cell, parts = cells_of(t, head, parts, starts, HEADS, APART)
    s = tl.arange(0, MOST)
    piece, d = tl.program_id(2), tl.arange(0, PAD)
    j = piece * PAD + d
    wait_for_previous(PDL)
    weights = tl.load(totals + cell + s, mask=s < parts, other=0.0)
    top = tl.load(tops + cell + s, mask=s < parts, other=-1.0e30)
    highest = tl.max(tl.where(weights > 0, top, -1.0e30), 0)
    total = tl.sum(tl.where(weights > 0, weights * tl.exp2(top - highest), 0.0), 0)
    x = tl.zeros((PAD,), tl.float32)
    for lo in range(0, bound(parts), AT_ONCE):
        i = lo + tl.arange(0, AT_ONCE)
        there = i < parts
        seen = tl.load(totals + cell + i, mask=there, other=0.0) > 0  # else `out` may be anything
        e = tl.where(seen, tl.exp2(tl.load(tops + cell + i, mask=there, other=-1.0e30) - highest), 0.0)
        at = out + (cell + i)[:, None] * DIM + j[None, :]
        x += tl.sum(tl.load(at, mask=seen[:, None] & (j < DIM)[None, :], other=0.0) * e[:, None], 0)
    if APART:  # a row that is none sees nothing
        total = tl.where(total > 0, total, 1.0)
    x = x / total
    if TURN > 0:
        x = hadamard(x, PAD, TURN)
    if TURNED == 2:  # pieces of even elements, then of odd ones
        EACH: tl.constexpr = DIM // (2 * PAD)
        j = 2 * (piece % EACH * PAD + d) + piece // EACH
    tl.store(result + (t * HEADS + head) * DIM + j, x, mask=j < DIM)


def combine(
    partials: Partials, pages: DevicePages, most: int = 0, out: torch.Tensor | None = None, pdl: int = SERIAL
) -> torch.Tensor:
    """Partial results of T queries -> float32 [T, heads * dim_v], un-rotated if the cached values are rotated. `most`:
    see `combine.combine`."""
    rows, heads, parts, dim = partials.out.shape
    lists, apart = pages.lists, turned(pages)
    rows, most = (len(lists.shift), most) if lists.apart else (rows, parts)
    if most > MOST_PARTS:
        raise ValueError(f"{most} partial results are more than the {MOST_PARTS} that are merged")
    whole = pages.rotated[1] and not apart  # what a program turns back is a head
    pad = padded(dim) if whole else min(DIMS_AT_ONCE, padded(dim))
    if out is None:
        out = torch.empty(rows, heads * dim, device=partials.out.device)
    launch(_combine_latents, (heads, rows, triton.cdiv(dim, pad)))(
        partials.out, partials.tops, partials.totals, out if lists.starts is None else lists.starts, out, parts, heads,
        dim, pad, block(dim) if whole else pad if apart else 0, apart, max(4, triton.next_power_of_2(most)),
        MERGED // pad, lists.apart, pdl, **launch_options(pdl, 4),
    )  # fmt: skip
    return out
