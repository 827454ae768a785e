"""`combine`: partial results of attention -> what the next product reads.

The heads' outputs come out of the rotated basis, and may become the next product's vector on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import Partials, cells_of
from kvcli.kernels.gpu.language import SERIAL, store_activations, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.rows import hadamard
from kvcli.kernels.gpu.span import NOTHING
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.gpu.woven import BLOCK, place
from kvcli.kernels.reference.rotation import block

LOG2_E = tl.constexpr(1.4426950408889634)
MOST_PARTS = 128  # they are read in one go
WIDEST = 256  # of heads with so many; wider ones have fewer
FEWEST = tl.constexpr(4)  # parts that are read
FEW = 8  # times as many parts as a power of two may have behind it, so that those are not read as twice as many
EACH_WARP = 4096  # numbers of those: more would not stay in registers, and more warps have to wait for each other


def most_parts(dim: int) -> int:
    """Most partial results of a query of heads of `dim` elements: more would not stay in registers."""
    return MOST_PARTS * WIDEST // max(WIDEST, padded(dim))


def _power_and_rest(most: int) -> tuple[int, int]:
    """Powers of two of parts, which together are `most` or more; the second, which may be 0, is the smaller one."""
    most = max(FEWEST.value, most)
    half = triton.next_power_of_2(most) // 2
    rest = max(FEWEST.value, triton.next_power_of_2(most - half))
    return (half, rest) if rest * FEW <= half else (2 * half, 0)


@triton.jit
def _load(out, tops, totals, cell, s, parts, j, DIM: tl.constexpr):
    """Parts s of a query: sums of weights, largest scores, results [parts, PAD]; none where nothing was seen."""
    there = s < parts
    weights = tl.load(totals + cell + s, mask=there, other=0.0)
    top = tl.load(tops + cell + s, mask=there, other=NOTHING)
    part = tl.load(out + (cell + s)[:, None] * DIM + j[None, :], mask=there[:, None] & (j < DIM)[None, :], other=0.0)
    seen = weights > 0  # else `part` may be anything
    return weights, tl.where(seen, top, NOTHING), tl.where(seen[:, None], part, 0.0)


@triton.jit(do_not_specialize=["parts"])
def _combine(
    out, tops, totals, sinks, starts, result, codes, scales, sums, parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TURN: tl.constexpr, MOST: tl.constexpr,
    REST: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr, SINKS: tl.constexpr, APART: tl.constexpr,
    WOVEN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a head and row. TURN: the block of the Hadamard rotation; 0 = none. APART: see `PageLists`. WOVEN:
    `result` is float16, and of whole blocks."""
    head = tl.program_id(0)
    t = tl.program_id(1).to(tl.int64)
    cell, parts = cells_of(t, head, parts, starts, HEADS, APART)
    j = tl.arange(0, PAD)
    wait_for_previous(PDL)
    weights, top, part = _load(out, tops, totals, cell, tl.arange(0, MOST), parts, j, DIM)
    if REST > 0:
        more_weights, more_top, more = _load(out, tops, totals, cell, MOST + tl.arange(0, REST), parts, j, DIM)
    highest = tl.max(top, 0)
    if REST > 0:
        highest = tl.maximum(highest, tl.max(more_top, 0))
    beside = 0.0
    if SINKS:
        sink = tl.load(sinks + head) * LOG2_E
        highest = tl.maximum(highest, sink)
        beside = tl.exp2(sink - highest)
    e = tl.exp2(top - highest)
    total = tl.sum(weights * e, 0) + beside
    x = tl.sum(tl.reshape(part * e[:, None], (MOST // FEWEST, FEWEST, PAD)), 0)
    if REST > 0:
        e = tl.exp2(more_top - highest)
        total += tl.sum(more_weights * e, 0)
        x += tl.sum(tl.reshape(more * e[:, None], (REST // FEWEST, FEWEST, PAD)), 0)
    x = tl.sum(x, 0)
    if APART:  # a row that is none sees nothing
        total = tl.where(total > 0, total, 1.0)
    x /= total
    if TURN > 0:
        x = hadamard(x, PAD, TURN)
    if WOVEN:
        half = tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
        tl.store(result + t * (HEADS * DIM) + place(head * DIM + j), half, mask=j < DIM)
    elif KEEP:
        tl.store(result + (t * HEADS + head) * DIM + j, x, mask=j < DIM)
    if QUANTIZE:
        store_activations(x, head * DIM, HEADS * DIM, DIM // 32, codes, scales, sums, result, PAD // 32, False)


@triton.jit(do_not_specialize=["groups"])
def _quantize(x, codes, scales, sums, groups, GROUPS: tl.constexpr, PDL: tl.constexpr):
    first = tl.program_id(0) * GROUPS
    i = tl.arange(0, GROUPS * 32)
    wait_for_previous(PDL)
    v = tl.load(x + first * 32 + i, mask=i < (groups - first) * 32, other=0.0)
    store_activations(v, first * 32, groups * 32, groups - first, codes, scales, sums, x, GROUPS, False)


def quantize(x: torch.Tensor, to: Activations, pdl: int = SERIAL) -> None:
    """x float32 [1, n], n a multiple of 32; all but the values of `to` are written."""
    groups = x.numel() // 32
    launch(_quantize, (triton.cdiv(groups, 4),))(
        x, to.codes, to.scales, to.sums, groups, 4, pdl, **launch_options(pdl, 1)
    )  # fmt: skip


def fits_half(pages: DevicePages, heads: int) -> bool:
    """Whether heads' outputs, which no value exceeds that they are means of, are float16 as they are, and whole blocks
    of woven rows."""
    classes = (pages,) if pages.open is None else (pages, pages.open)
    fits = all(each.record.codec_v.largest <= LARGEST_HALF.value for each in classes)
    return fits and heads * pages.record.dim_v % BLOCK == 0


def combine(
    partials: Partials,
    pages: DevicePages,
    into: Activations | None = None,
    pdl: int = SERIAL,
    sinks: torch.Tensor | None = None,
    most: int = 0,
    woven: bool = False,
) -> torch.Tensor | None:
    """Partial results of T queries -> float32 [T, heads * dim_v], un-rotated if the cached values are rotated.

    With `into` (T = 1) the result goes there instead. `sinks`: see `AttentionLayer`. `most`: parts that a row has,
    where rows are apart. `woven`: the result is float16, woven (see `fits_half`); with `into` it is not.
    """
    rows, heads, parts, dim = partials.out.shape
    lists = pages.lists
    rows, most = (len(lists.shift), most) if lists.apart else (rows, parts)
    if most > most_parts(dim):
        raise ValueError(f"{most} partial results are more than the {most_parts(dim)} that are merged")
    fused = into is not None and dim % 32 == 0
    turn = block(dim) if pages.rotated[1] else 0
    out = some = partials.out  # stands for what is not there
    outputs = [some, some, some, some]
    if into is not None:
        outputs[1:] = into.codes, into.scales, into.sums
    keep = into is None or into.keep or not fused
    if keep:
        if into is not None and into.keep:
            out = into.values
        else:
            kind = torch.float16 if woven else torch.float32
            out = torch.empty(rows, heads * dim, dtype=kind, device=some.device)
        outputs[0] = out
    most, rest = _power_and_rest(most)
    warps = max(1, most * padded(dim) // EACH_WARP)
    launch(_combine, (heads, rows))(
        partials.out, partials.tops, partials.totals, some if sinks is None else sinks,
        some if lists.starts is None else lists.starts, *outputs, parts, heads, dim, padded(dim), turn, most, rest,
        keep, fused, sinks is not None, lists.apart, woven, pdl, **launch_options(pdl, warps),
    )  # fmt: skip
    if into is None:
        return out
    if not fused:
        quantize(out, into, pdl)
    return None
