"""`combine`: partial results of attention -> what the next product reads; in a decode step it seals, too.

The heads' outputs come out of the rotated basis, and may be quantized on the way: int8 codes q of 32 elements under one
float32 scale d = largest / 127, with the sums of d * q over every 16 elements.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import Partials
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import hadamard
from kvcli.kernels.gpu.seal import seal_arguments, seal_program
from kvcli.kernels.gpu.tiles import bound, launch_options, wait_for_inputs
from kvcli.kernels.rotation import block

MOST_PARTS = 512
MOST = tl.constexpr(MOST_PARTS)


@dataclass(frozen=True)
class Quantized:
    """Rows of n elements: codes int8 [T, n], scales float32 [T, n / 32] and sums float32 [T, n / 16]."""

    codes: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor

    @classmethod
    def empty(cls, rows: int, n: int, device: torch.device | str) -> Quantized:
        """Buffers."""
        return cls(
            torch.empty(rows, n, dtype=torch.int8, device=device),
            torch.empty(rows, n // 32, device=device),
            torch.empty(rows, n // 16, device=device),
        )


@triton.jit
def quantize_groups(x, codes, scales, sums, first, n, GROUPS: tl.constexpr):
    """x float32 [GROUPS * 32], of which the first n groups are stored, from group number `first` on."""
    g = tl.arange(0, GROUPS)
    v = tl.reshape(x, (GROUPS, 32))
    largest = tl.max(tl.abs(v), 1)
    inverse = tl.where(largest > 1e-30, 127.0 / tl.maximum(largest, 1e-30), 0.0)
    q = tl.floor(v * inverse[:, None] + 0.5)
    d = largest / 127.0
    at = first + g
    tl.store(codes + at[:, None] * 32 + tl.arange(0, 32)[None, :], q.to(tl.int8), mask=(g < n)[:, None])
    tl.store(scales + at, d, mask=g < n)
    both = tl.sum(tl.reshape(q, (GROUPS, 2, 16)), 2) * d[:, None]
    tl.store(sums + at[:, None] * 2 + tl.arange(0, 2)[None, :], both, mask=(g < n)[:, None])


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
        quantize_groups(x, codes, scales, sums, (t * HEADS + head) * (DIM // 32), DIM // 32, PAD // 32)


@triton.jit(do_not_specialize=["parts"])
def _combine(
    out, tops, totals, result, codes, scales, sums, parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, TURN: tl.constexpr, STEP: tl.constexpr,
    KEEP: tl.constexpr, QUANTIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a head and row."""
    wait_for_inputs(PDL)
    _finish(
        tl.program_id(0), tl.program_id(1).to(tl.int64), out, tops, totals, result, codes, scales, sums, parts, HEADS,
        DIM, PAD, TURN, STEP, KEEP, QUANTIZE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "origin", "offset", "open_offset"])
def _combine_and_seal(
    out, tops, totals, result, codes, scales, sums, position, table, open_table, centre, angles, scale_k, scale_v,
    parts, origin, offset, open_offset,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, TURN: tl.constexpr, STEP: tl.constexpr, KEEP: tl.constexpr,
    QUANTIZE: tl.constexpr, PDL: tl.constexpr, SIZE: tl.constexpr, SINKS: tl.constexpr, TAIL: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, CODEC_K: tl.constexpr,
    CODEC_V: tl.constexpr, RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, OPEN_K: tl.constexpr, OPEN_V: tl.constexpr,
    OPEN_RECORD: tl.constexpr, OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, TURN_K: tl.constexpr,
):  # fmt: skip
    """One program a head, then those that seal: for keys and values, by group of rows, by KV head."""
    i = tl.program_id(0)
    wait_for_inputs(PDL)
    if i < HEADS:
        _finish(
            i, 0, out, tops, totals, result, codes, scales, sums, parts, HEADS, DIM_V, PAD_V, TURN, STEP, KEEP,
            QUANTIZE,
        )  # fmt: skip
    else:
        i -= HEADS
        seal_program(
            i // (2 * KV_HEADS), i // KV_HEADS % 2, i % KV_HEADS, position, 0, 0, table, open_table, centre, angles,
            scale_k, scale_v, origin, offset, open_offset, True, SIZE, SINKS, TAIL, DIM_K, PAD_K, DIM_V, PAD_V,
            CODEC_K, CODEC_V, RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OPEN_K, OPEN_V, OPEN_RECORD,
            OPEN_K_ROW, OPEN_V_ROW, OPEN_V_OFFSET, CENTRED, ROPE, TURN_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["groups"])
def _quantize(x, codes, scales, sums, groups, GROUPS: tl.constexpr, PDL: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * GROUPS
    i = tl.arange(0, GROUPS * 32)
    wait_for_inputs(PDL)
    v = tl.load(x + first * 32 + i, mask=i < (groups - first) * 32, other=0.0)
    quantize_groups(v, codes, scales, sums, first, groups - first, GROUPS)


def quantize(x: torch.Tensor, to: Quantized, pdl: bool = False) -> None:
    """x float32 [T, n], n a multiple of 32."""
    groups = x.numel() // 32
    _quantize[(triton.cdiv(groups, 4),)](
        x, to.codes, to.scales, to.sums, groups, 4, pdl, **launch_options(pdl, 1)
    )  # fmt: skip


def combine(
    partials: Partials,
    pages: DevicePages,
    out: torch.Tensor | None = None,
    quantized: Quantized | None = None,
    seal_at: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor | None:
    """Partial results of T queries -> float32 [T, heads * dim_v], un-rotated if the cached values are rotated.

    With `quantized` the result goes there, and to `out` only if that is given. With `seal_at`, the position (int64 [1]
    on the device) of the only query, the page that its row fills is sealed, as by `seal_step`, in the same launch.
    """
    rows, heads, parts, dim = partials.out.shape
    if parts > MOST_PARTS:
        raise ValueError(f"{parts} partial results are more than the {MOST_PARTS} that are merged")
    fused = quantized is not None and dim % 32 == 0
    if out is None and not fused:
        out = torch.empty(rows, heads * dim, device=partials.out.device)
    turn = block(dim) if pages.rotated[1] else 0
    some = partials.out  # stands for what is not there
    outputs = [some if out is None else out, some, some, some]
    if quantized is not None:
        outputs[1:] = quantized.codes, quantized.scales, quantized.sums
    step, warps = (16, 8) if parts > 8 else (4, 2)
    if seal_at is None:
        _combine[heads, rows](
            partials.out, partials.tops, partials.totals, *outputs, parts, heads, dim, padded(dim), turn, step,
            out is not None, fused, pdl, **launch_options(pdl, warps),
        )  # fmt: skip
    else:
        if rows != 1 or pages.open is None or not pages.tail:
            raise ValueError("only the page that one row fills can be sealed here")
        tensors, constants = seal_arguments(pages)
        _combine_and_seal[(heads + pages.record.page_size // 16 * 2 * pages.record.kv_heads,)](
            partials.out, partials.tops, partials.totals, *outputs, seal_at, *tensors, parts, pages.first_page,
            pages.offset, pages.open.offset, heads, pages.record.kv_heads, turn, step, out is not None, fused, pdl,
            *constants, **launch_options(pdl, warps),
        )  # fmt: skip
    if quantized is not None and not fused and out is not None:
        quantize(out, quantized, pdl)
    return out
