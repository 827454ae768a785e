"""`prepare` for latents: from the projections of a step to queries that attention wants, and rows in their pages. See
rows.py, which has the same for other rows."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import LOG2_E, Queries, hadamard, head_of, row_and_page, store_row, turning
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.reference.rotation import block


@triton.jit(do_not_specialize=["offset", "length", "past"])
def _prepare_latents(
    qkv, position, shift, into, frequencies, v_norm, q, offset, eps, factor, amplitude, growth, length, past,
    HEADS: tl.constexpr, ROWS: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    V_OFFSET: tl.constexpr, RECORD: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, TURN: tl.constexpr,
    NORMED: tl.constexpr, GAIN: tl.constexpr, SPARE: tl.constexpr, APART: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and head; the ROWS behind the heads write the rows of as many KV heads, those behind them make
    second queries."""
    WIDTH: tl.constexpr = (HEADS + ROWS) * (DIM_K + DIM_V)
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PAD_K)
    j = tl.arange(0, PAD_V)
    at, word = row_and_page(t, position, into, SIZE, APART)
    if SPARE:  # noqa: SIM102 - a constant: else the test is not compiled
        if word == 0:
            return
    inside = at
    to = t
    if head >= HEADS + ROWS:
        inside = at - tl.load(shift + t)
        to = t + tl.num_programs(0)
        head -= HEADS + ROWS
    c, s = 0.0, 0.0
    if ROPE > 0:
        c, s = turning(inside, frequencies, ROPE, PAD_K)
    wait_for_previous(PDL)
    source = qkv + t * WIDTH + head * (DIM_K + DIM_V)
    x, _ = head_of(source, source, source, c, s, eps, DIM_K, PAD_K, ROPE, False, False, False)
    v = tl.load(source + DIM_K + j, mask=j < DIM_V, other=0.0)
    if head < HEADS:
        if GAIN:  # see `attend.AttentionLayer`
            gain = 1.0 + growth * tl.log(1.0 + ((at + past) // length).to(tl.float32))
            x *= tl.where(i < ROPE, gain * amplitude, gain)
            v *= gain
        if TURN > 0:
            v = hadamard(v, PAD_V, TURN)
        there = q + (to * HEADS + head) * (DIM_K + DIM_V)
        half_x = tl.clamp(x * factor, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
        half_v = tl.clamp(v * factor, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
        tl.store(there + i, half_x, mask=i < DIM_K)
        tl.store(there + DIM_K + j, half_v, mask=j < DIM_V)
    else:
        if NORMED:
            v = v * tl.rsqrt(tl.sum(v * v, 0) / DIM_V + eps) * tl.load(v_norm + j, mask=j < DIM_V, other=0.0)
        if TURN > 0:
            v = hadamard(v, PAD_V, TURN)
        row = word + offset + (head - HEADS).to(tl.int64) * RECORD
        store_row(row + at % SIZE * K_ROW, x, DIM_K, PAD_K, CODEC_K)
        store_row(row + V_OFFSET + at % SIZE * V_ROW, v, DIM_V, PAD_V, CODEC_V)


def prepare(
    qkv: torch.Tensor, layer: AttentionLayer, pages: DevicePages, out: Queries | None = None, pdl: int = SERIAL
) -> Queries:
    """qkv float32 [T, (heads + kv_heads) * dim_q] -> queries; the rows go into their pages. Without KV heads where the
    layer stores none."""
    r, lists, rows, heads = pages.record, pages.lists, qkv.shape[0], layer.heads
    target, into = pages.where_rows_go
    frequencies = None if layer.rope is None else layer.rope.frequencies_on(qkv.device)
    if out is None:
        out = Queries.empty(rows * (1 + lists.turns), heads, r.dim_q, 0, qkv.device)
    o, (_, rotated) = target.record, pages.rotated
    present = (qkv if x is None else x for x in (frequencies, layer.v_norm))  # something stands for what is not there
    stored = r.kv_heads if layer.stores else 0
    launch(_prepare_latents, (rows, heads * (1 + lists.turns) + stored))(
        qkv, lists.position, lists.shift, into, *present, out.q, target.offset, layer.eps, layer.scale * LOG2_E,
        layer.amplitude, *(layer.temperature or (0.0, 1, 0)), heads, stored, r.dim_k, padded(r.dim_k), r.dim_v,
        padded(r.dim_v), 0 if frequencies is None else 2 * frequencies.shape[0], r.page_size,
        o.k_row_bytes, o.v_row_bytes, o.v_offset, o.record_bytes, o.codec_k.numbers, o.codec_v.numbers,
        block(r.dim_v) if rotated else 0, layer.v_norm is not None,
        layer.amplitude != 1 or layer.temperature is not None, lists.spare, lists.apart, pdl, **launch_options(pdl, 1),
    )  # fmt: skip
    return out
