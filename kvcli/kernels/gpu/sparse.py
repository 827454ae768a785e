"""Attention of blocks of queries over some of the pages before them, whose rows stand as float16 already (past.py)."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.language import fence_copies
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import padded
from kvcli.kernels.gpu.rows import LOG2_E
from kvcli.kernels.paged import CHOICE_BLOCK

LN2 = tl.constexpr(math.log(2.0))
NOTHING = tl.constexpr(-1.0e30)


@triton.jit(do_not_specialize=["t", "front", "room"])
def _blocks(
    q, keys, values, lists, counts, out, weights, softcap, t, front, room,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, BN: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: a head of a block of queries, over the pages that `lists` has for its key-value head."""
    head = tl.program_id(0)
    block = tl.program_id(1)
    own = head // GROUP
    KV_HEADS: tl.constexpr = HEADS // GROUP
    r = block * BLOCK - front + tl.arange(0, BLOCK)
    ok = (r >= 0) & (r < t)
    dk = tl.arange(0, PAD_K)
    dv = tl.arange(0, PAD_V)
    n = tl.arange(0, BN)
    row = r.to(tl.int64) * HEADS + head
    x = tl.load(q + row[:, None] * DIM_K + dk[None, :], mask=ok[:, None] & (dk < DIM_K)[None, :], other=0.0)
    line = own * tl.num_programs(1) + block
    count = tl.load(counts + line)
    first = lists + line.to(tl.int64) * room
    top = tl.full((BLOCK,), NOTHING, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK, PAD_V), tl.float32)
    TILES: tl.constexpr = SIZE // BN
    for i in tl.range(0, count * TILES, num_stages=STAGES):
        page = tl.load(first + i // TILES)
        at = (page * SIZE + i % TILES * BN + n) * KV_HEADS + own
        k = tl.load(keys + at[:, None] * DIM_K + dk[None, :], mask=(dk < DIM_K)[None, :], other=0.0)
        fence_copies(BLOCK)
        s = tl.dot(x, tl.trans(k))
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        higher = tl.maximum(top, tl.max(s, 1))
        decay = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        total = total * decay + tl.sum(p, 1)
        v = tl.load(values + at[:, None] * DIM_V + dv[None, :], mask=(dv < DIM_V)[None, :], other=0.0)
        fence_copies(BLOCK)
        acc = tl.dot(p.to(tl.float16), v, acc * decay[:, None])
        top = higher
    found = acc / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + row[:, None] * DIM_V + dv[None, :], found.to(tl.float16), mask=ok[:, None] & (dv < DIM_V)[None, :])
    weight = tl.where(total > 0, (top + tl.log2(tl.maximum(total, 1e-30))) * LN2, NOTHING)
    tl.store(weights + head * t + r, weight, mask=ok)


def attend_blocks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    read: torch.Tensor,
    start: int,
    page_size: int,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q float16 [T, heads, dim_k], scaled for exponents of 2, from position `start` on, over rows of pages
    float16 [pages * page_size, kv_heads, dim], of which `read`, bool [kv_heads, blocks, pages], says who reads them ->
    float16 [T, heads, dim_v], and the logarithm of the sum of weights, float32 [heads, T]; far below all others where
    nothing is read."""
    (t, heads, dim_k), dim_v = q.shape, values.shape[2]
    counts = read.sum(-1, dtype=torch.int32)
    lists = (~read).sort(dim=-1, stable=True).indices.to(torch.int32).contiguous()
    out = torch.empty(t, heads, dim_v, dtype=torch.float16, device=q.device)
    weights = torch.empty(heads, t, device=q.device)
    wide = max(padded(dim_k), padded(dim_v)) > 128
    launch(_blocks, (heads, read.shape[1]))(
        q, keys, values, lists, counts, out, weights, softcap * LOG2_E, t, start % CHOICE_BLOCK, lists.shape[2],
        heads, heads // keys.shape[1], CHOICE_BLOCK, page_size, min(page_size, 32 if wide else 64), dim_k,
        padded(dim_k), dim_v, padded(dim_v), softcap > 0, 2 if wide else 3, num_warps=8,
    )  # fmt: skip
    return out, weights
