"""`combine`: partial results of attention -> what the next product reads.

The heads' outputs come out of the rotated basis, and may become the next product's vector on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import Partials
from kvcli.kernels.gpu.language import store_activations, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.rows import hadamard
from kvcli.kernels.gpu.tiles import bound, launch_options
from kvcli.kernels.rotation import block

MOST_PARTS = 512
MOST = tl.constexpr(MOST_PARTS)


@triton.jit
def merge(out, tops, totals, cell, parts, DIM: tl.constexpr, PAD: tl.constexpr, STEP: tl.constexpr):
    """One query's and head's partial results, `parts` of them from number `cell` on -> float32 [PAD]."""
    s = tl.arange(0, MOST)
    j = tl.arange(0, PAD)
    weights = tl.load(totals + cell + s, mask=s < parts, other=0.0)
    highest = tl.max(tl.load(tops + cell + s, mask=(s < parts) & (weights > 0), other=-1.0e30), 0)
    acc = tl.zeros((STEP, PAD), tl.float32)
    total = tl.zeros((STEP,), tl.float32)
    for first in tl.range(0, bound(parts), STEP):
        i = first + tl.arange(0, STEP)
        weight = tl.load(totals + cell + i, mask=i < parts, other=0.0)
        seen = weight > 0
        e = tl.exp2(tl.load(tops + cell + i, mask=seen, other=-1.0e30) - highest)
        part = tl.load(out + (cell + i)[:, None] * DIM + j[None, :], mask=seen[:, None] & (j < DIM)[None, :], other=0.0)
        acc += part * e[:, None]
        total += weight * e
    return tl.sum(acc, 0) / tl.sum(total, 0)


@triton.jit
def _finish(
    head, t, out, tops, totals, result, codes, scales, sums, parts, HEADS: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, TURN: tl.constexpr, STEP: tl.constexpr, KEEP: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    """One head of row t. TURN: the block of the Hadamard rotation; 0 = none."""
    j = tl.arange(0, PAD)
    x = merge(out, tops, totals, (t * HEADS + head) * parts, parts, DIM, PAD, STEP)
    if TURN > 0:
        x = hadamard(x, PAD, TURN)
    if KEEP:
        tl.store(result + (t * HEADS + head) * DIM + j, x, mask=j < DIM)
    if QUANTIZE:
        store_activations(x, head * DIM, HEADS * DIM, DIM // 32, codes, scales, sums, result, PAD // 32, False)


@triton.jit(do_not_specialize=["parts"])
def _combine(
    out, tops, totals, result, codes, scales, sums, parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TURN: tl.constexpr, STEP: tl.constexpr,
    KEEP: tl.constexpr, QUANTIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a head and row."""
    wait_for_previous(PDL)
    _finish(
        tl.program_id(0), tl.program_id(1).to(tl.int64), out, tops, totals, result, codes, scales, sums, parts, HEADS,
        DIM, PAD, TURN, STEP, KEEP, QUANTIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["groups"])
def _quantize(x, codes, scales, sums, groups, GROUPS: tl.constexpr, PDL: tl.constexpr):
    first = tl.program_id(0) * GROUPS
    i = tl.arange(0, GROUPS * 32)
    wait_for_previous(PDL)
    v = tl.load(x + first * 32 + i, mask=i < (groups - first) * 32, other=0.0)
    store_activations(v, first * 32, groups * 32, groups - first, codes, scales, sums, x, GROUPS, False)


def quantize(x: torch.Tensor, to: Activations, pdl: bool = False) -> None:
    """x float32 [1, n], n a multiple of 32; all but the values of `to` are written."""
    groups = x.numel() // 32
    launch(_quantize, (triton.cdiv(groups, 4),))(
        x, to.codes, to.scales, to.sums, groups, 4, pdl, **launch_options(pdl, 1)
    )  # fmt: skip


def combine(
    partials: Partials,
    pages: DevicePages,
    into: Activations | None = None,
    pdl: bool = False,
) -> torch.Tensor | None:
    """Partial results of T queries -> float32 [T, heads * dim_v], un-rotated if the cached values are rotated.

    With `into` (T = 1) the result goes there instead.
    """
    rows, heads, parts, dim = partials.out.shape
    if parts > MOST_PARTS:
        raise ValueError(f"{parts} partial results are more than the {MOST_PARTS} that are merged")
    fused = into is not None and dim % 32 == 0
    turn = block(dim) if pages.rotated[1] else 0
    out = some = partials.out  # stands for what is not there
    outputs = [some, some, some, some]
    if into is not None:
        outputs[1:] = into.codes, into.scales, into.sums
    keep = into is None or into.keep or not fused
    if keep:
        out = into.values if into is not None and into.keep else torch.empty(rows, heads * dim, device=some.device)
        outputs[0] = out
    step = min(128, max(4, triton.next_power_of_2(parts)))
    warps = 8 if step > 32 else (4 if step > 8 else 2)
    launch(_combine, (heads, rows))(
        partials.out, partials.tops, partials.totals, *outputs, parts, heads, dim, padded(dim), turn, step, keep,
        fused, pdl, **launch_options(pdl, warps),
    )  # fmt: skip
    if into is None:
        return out
    if not fused:
        quantize(out, into, pdl)
    return None
