"""The twin of reference/basis.py: what the first page of a sealed cache fixes for a layer, by one kernel that nothing
on the host waits for."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import turning
from kvcli.kernels.reference.basis import UNLIKE_THE_REST
from kvcli.kernels.reference.rotation import block

ROWS = tl.constexpr(16)  # at a time


@triton.jit
def _load(at, rows, PITCH: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr):
    """Rows of f16, bf16 or f32, PITCH bytes apart: float32 [ROWS, PAD], 0 where there is nothing."""
    i = tl.arange(0, PAD)[None, :]
    if CODEC.mantissa == 23:
        return tl.load(at.to(tl.pointer_type(tl.float32)) + rows[:, None] * (PITCH // 4) + i, mask=i < DIM, other=0.0)
    elif CODEC.mantissa == 10:
        p = at.to(tl.pointer_type(tl.float16)) + rows[:, None] * (PITCH // 2) + i
        return tl.load(p, mask=i < DIM, other=0.0).to(tl.float32)
    else:
        p = at.to(tl.pointer_type(tl.uint16)) + rows[:, None] * (PITCH // 2) + i
        return (tl.load(p, mask=i < DIM, other=0).to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rotated(x, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, PAD] as `rows.hadamard` rotates each."""
    i = tl.broadcast_to(tl.arange(0, PAD)[None, :], (ROWS, PAD))
    for step in tl.static_range(9):
        if (1 << step) < BLOCK:
            other = tl.gather(x, i ^ (1 << step), 1)
            x = tl.where((i & (1 << step)) == 0, x + other, other - x)
    return x * (1.0 / BLOCK) ** 0.5


@triton.jit
def _fix(open_into, frequencies, centre, scale_k, scale_v, offset, least_k, least_v, SIZE: tl.constexpr,
         RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, CODEC_K: tl.constexpr,
         CODEC_V: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr,
         ROPE: tl.constexpr, TURN: tl.constexpr, LEFT_OUT: tl.constexpr, CENTRED: tl.constexpr, SCALED_K: tl.constexpr,
         SCALED_V: tl.constexpr):  # fmt: skip
    """One program: one head. Scales are the largest element times `least_k`, `least_v`."""
    head = tl.program_id(0)
    at = tl.load(open_into) + (offset + head * RECORD)
    i = tl.arange(0, PAD_K)
    half: tl.constexpr = ROPE // 2
    total = tl.zeros((PAD_K,), tl.float32)
    largest_k, largest_v = 1e-12 / least_k, 1e-12 / least_v
    for first in range(0, SIZE, ROWS):
        rows = first + tl.arange(0, ROWS)
        keys = _load(at, rows, K_ROW, DIM_K, PAD_K, CODEC_K)
        if SCALED_K:
            largest_k = tl.maximum(largest_k, tl.max(tl.max(tl.abs(keys), 1), 0))
        if SCALED_V:
            values = _load(at + V_OFFSET, rows, V_ROW, DIM_V, PAD_V, CODEC_V)
            largest_v = tl.maximum(largest_v, tl.max(tl.max(tl.abs(values), 1), 0))
        if CENTRED:
            keys = _rotated(keys, PAD_K, TURN)
            if ROPE > 0:
                c, s = turning(-rows[:, None], frequencies, ROPE, PAD_K)
                j = tl.where(i < half, i + half, tl.where(i < ROPE, i - half, i))
                partner = tl.gather(keys, tl.broadcast_to(j[None, :], (ROWS, PAD_K)), 1)
                keys = tl.where((i < ROPE)[None, :], keys * c + partner * s, keys)
            total += tl.sum(tl.where((rows >= LEFT_OUT)[:, None], keys, 0.0), 0)
    if CENTRED:
        tl.store(centre + head * DIM_K + i, total / (SIZE - LEFT_OUT), mask=i < DIM_K)
    if SCALED_K:
        tl.store(scale_k + head, largest_k * least_k)
    if SCALED_V:
        tl.store(scale_v + head, largest_v * least_v)


def fix_basis(pages: DevicePages, frequencies: torch.Tensor | None) -> None:
    """Fill `pages.centre`, `scale_k` and `scale_v`, where there are such, from the first page that the step writes
    into. `frequencies`: see `Rope.frequencies_on`; None without RoPE."""
    if pages.open is None:
        raise ValueError("this cache has no pages to seal")
    r, o, into = pages.record, pages.open.record, pages.lists.open_into
    rope = 0 if frequencies is None else 2 * frequencies.shape[0]
    present = (into if x is None else x for x in (frequencies, pages.centre, pages.scale_k, pages.scale_v))
    launch(_fix, (r.kv_heads,))(
        into, *present, pages.open.offset, *(4 / (x.largest or 4) for x in (r.codec_k, r.codec_v)), r.page_size,
        o.record_bytes, o.k_row_bytes, o.v_row_bytes, o.v_offset, o.codec_k.numbers, o.codec_v.numbers, r.dim_k,
        padded(r.dim_k), r.dim_v, padded(r.dim_v), rope, block(r.dim_k), UNLIKE_THE_REST, pages.centre is not None,
        pages.scale_k is not None, pages.scale_v is not None, num_warps=4 if max(r.dim_k, r.dim_v) <= 256 else 16,
    )  # fmt: skip
