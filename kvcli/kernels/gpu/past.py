"""Attention of many queries over a long past that all of them see: pages are read once, into rows of float16, and the
vendor's library has the rest.

Decoding pages inside the loop of attention pays where queries are few. A prefill step has thousands, and would decode
each page once for every block of them.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from kvcli.codecs import RecordLayout
from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.gpu.attention import Partials
from kvcli.kernels.gpu.choosing import mask
from kvcli.kernels.gpu.language import INTERPRETED
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.places import address, slot
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.seal import turned_centre
from kvcli.kernels.gpu.sparse import attend_blocks
from kvcli.kernels.gpu.tiles import (
    LARGEST_HALF,
    elements,
    head_factor,
    left_centre,
    pair_tile,
    plain_tile,
    quarter_tile,
    tile_parts,
)
from kvcli.kernels.paged import CENTRE_ROWS, Choice
from kvcli.kernels.reference.rotation import block

STAGED_ROWS = 16384  # of the past at a time
LEAST_QUERIES = 256
LEAST_ROWS = 1024
LN2 = math.log(2.0)


@triton.jit
def _put(x, scale, mean, out, rows, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
         OFF: tl.constexpr, PITCH: tl.constexpr, CENTRED: tl.constexpr):  # fmt: skip
    """Part i of N of a tile, float16 codes [BN, PAD / N], as elements of rows of `out`."""
    d = elements(i, N, DIM, PAD)
    v = (x.to(tl.float32) - OFF) * scale[:, None]
    if CENTRED:
        v += tl.gather(mean, tl.minimum(d, PAD - 1), 0)[None, :]
    v = tl.clamp(v, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    tl.store(out + rows[:, None] * PITCH + d[None, :], v, mask=(d < DIM)[None, :] & (rows >= 0)[:, None])


@triton.jit
def _put_tile(at, scales_at, slots, rows, mean, factor, out, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr,
              PARTS: tl.constexpr, ROW: tl.constexpr, SCALED: tl.constexpr, OFF: tl.constexpr, PITCH: tl.constexpr,
              CENTRED: tl.constexpr):  # fmt: skip
    """Slots of one head's rows, from the address `at` on, into `rows` of `out`."""
    scale = factor + tl.zeros(slots.shape, tl.float32)
    if SCALED:
        scale *= tl.load(scales_at.to(tl.pointer_type(tl.float16)) + slots).to(tl.float32)
    seen = slots >= 0
    if PARTS == 1:
        x0 = plain_tile(at, slots, seen, ROW, DIM, PAD, CODEC, False)
        _put(x0, scale, mean, out, rows, 0, 1, DIM, PAD, OFF, PITCH, CENTRED)
    elif PARTS == 2:
        x0, x1 = pair_tile(at, slots, seen, ROW, DIM, PAD, CODEC, False)
        _put(x0, scale, mean, out, rows, 0, 2, DIM, PAD, OFF, PITCH, CENTRED)
        _put(x1, scale, mean, out, rows, 1, 2, DIM, PAD, OFF, PITCH, CENTRED)
    else:
        x0, x1, x2, x3 = quarter_tile(at, slots, seen, ROW, DIM, PAD, CODEC, False)
        _put(x0, scale, mean, out, rows, 0, 4, DIM, PAD, OFF, PITCH, CENTRED)
        _put(x1, scale, mean, out, rows, 1, 4, DIM, PAD, OFF, PITCH, CENTRED)
        _put(x2, scale, mean, out, rows, 2, 4, DIM, PAD, OFF, PITCH, CENTRED)
        _put(x3, scale, mean, out, rows, 3, 4, DIM, PAD, OFF, PITCH, CENTRED)


@triton.jit(do_not_specialize=["offset"])
def _stage(
    table, centre, angles, scale_k, scale_v, keys, values, offset,
    SIZE: tl.constexpr, BN: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, TURN_K: tl.constexpr,
):  # fmt: skip
    """One program: BN rows of a page, one head, its keys or, where the grid has a second half, its values.
    keys [rows, kv_heads, DIM_K], values likewise."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    word = tl.load(table + tile // (SIZE // BN))
    slots = tile % (SIZE // BN) * BN + tl.arange(0, BN)
    rows = (tile.to(tl.int64) * BN + tl.arange(0, BN)) * heads + head
    at = address(word, CENTRED) + (offset + head * RECORD)
    if tl.program_id(2) == 0:
        mean = tl.zeros((PAD_K,), tl.float32)
        if CENTRED:
            group = slot(word) * (SIZE // BN) + tile % (SIZE // BN)
            mean = turned_centre(centre, angles, group, head, ROPE, DIM_K, PAD_K, TURN_K)
        factor = 1.0
        if FACTOR_K != 0:
            factor = tl.load(scale_k + head) * FACTOR_K
        _put_tile(
            at, at + K_SCALES, slots, rows, mean, factor, keys, DIM_K, PAD_K, CODEC_K, NK, K_ROW, K_SCALES > 0, OFF_K,
            DIM_K, CENTRED,
        )  # fmt: skip
    else:
        factor = 1.0
        if FACTOR_V != 0:
            factor = tl.load(scale_v + head) * FACTOR_V
        none = tl.zeros((PAD_V,), tl.float32)
        _put_tile(
            at + V_OFFSET, at + V_SCALES, slots, rows, none, factor, values, DIM_V, PAD_V, CODEC_V, NV, V_ROW,
            V_SCALES > 0, OFF_V, DIM_V, False,
        )  # fmt: skip


def stage(pages: DevicePages, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries [lo, hi) of the table, in order: keys float16 [rows, kv_heads, dim_k], with the mean that sealed ones
    lack, and values."""
    r, n = pages.record, (hi - lo) * pages.record.page_size
    values = torch.empty(n, r.kv_heads, r.dim_v, dtype=torch.float16, device=pages.lists.table.device)
    return stage_keys(pages, pages.lists.table[lo:hi], values), values


def stage_keys(pages: DevicePages, table: torch.Tensor, values: torch.Tensor | None = None) -> torch.Tensor:
    """The keys that `stage` has, of the pages of these words, int64 [n]; also their values, where there is room."""
    r, n = pages.record, len(table) * pages.record.page_size
    keys = torch.empty(n, r.kv_heads, r.dim_k, dtype=torch.float16, device=table.device)
    centred = pages.centre is not None
    rows = CENTRE_ROWS if centred else min(64, r.page_size)
    some = table  # stands for what is not there
    present = (some if x is None else x for x in (pages.centre, pages.angles, pages.scale_k, pages.scale_v))
    launch(_stage, (n // rows, r.kv_heads, 1 if values is None else 2))(
        table, *present, keys, keys if values is None else values, pages.offset, r.page_size, rows, r.dim_k,
        padded(r.dim_k), r.dim_v, padded(r.dim_v), r.codec_k.numbers, r.codec_v.numbers, tile_parts(r.codec_k),
        tile_parts(r.codec_v), r.record_bytes, r.k_row_bytes, r.v_row_bytes, r.v_offset, r.k_scales, r.v_scales,
        left_centre(r.codec_k), left_centre(r.codec_v), head_factor(r.codec_k), head_factor(r.codec_v), centred,
        0 if pages.angles is None else pages.angles.shape[1], block(r.dim_k) if pages.rotated[0] else 0, num_warps=2,
    )  # fmt: skip
    return keys


@triton.jit
def _fold(
    found, weights, out, tops, totals, parts, HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """One row: results of its heads, and base-2 logarithms of their weights, into the last of its partial results."""
    t = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    j = tl.arange(0, PAD)
    x = tl.load(found + (t * HEADS + head) * DIM + j, mask=j < DIM, other=0.0).to(tl.float32)
    top = tl.load(weights + head * tl.num_programs(0) + t) * 1.4426950408889634
    cell = (t * HEADS + head) * parts + parts - 1
    total = 1.0
    if not FIRST:
        before = tl.load(tops + cell)
        highest = tl.maximum(before, top)
        old, new = tl.exp2(before - highest), tl.exp2(top - highest)
        x = tl.load(out + cell * DIM + j, mask=j < DIM, other=0.0) * old + x * new
        total = tl.load(totals + cell) * old + new
        top = highest
    tl.store(out + cell * DIM + j, x, mask=j < DIM)
    tl.store(tops + cell, top)
    tl.store(totals + cell, total)


def fold(found: torch.Tensor, weights: torch.Tensor, to: Partials, first: bool) -> None:
    """Results float16 [T, heads, dim_v] with the natural logarithms of their weights, float32 [heads, T], into the last
    partial result of each query; what is there is kept unless they are the `first` ones."""
    t, heads, parts, dim = to.out.shape
    launch(_fold, (t, heads))(
        found, weights, to.out, to.tops, to.totals, parts, heads, dim, padded(dim), first, num_warps=1
    )  # fmt: skip


def attend_past(
    queries: Queries,
    pages: DevicePages,
    to: Partials,
    choice: Choice | None = None,
    start: int = 0,
    softcap: float = 0.0,
) -> None:
    """All queries of the step, from position `start` on, over the entries that `PageLists.past` names, into their last
    partial results; by `choice` over some of them. A `softcap` is for these alone."""
    lo, hi = pages.lists.past
    size, t = pages.record.page_size, to.out.shape[0]
    q, each = queries.q[:t], STAGED_ROWS // size
    read = mask(queries, pages, choice, start) if choice else None
    for first in range(lo, hi, each):
        end = min(first + each, hi)
        keys, values = stage(pages, first, end)
        if read is None:
            found = library(q, keys, values)
        else:
            found = attend_blocks(q, keys, values, read[..., first - lo : end - lo], start, size, softcap)
        fold(*found, to, first == lo)


def library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all q [T, heads, dim_k], scaled for exponents of 2, over all rows k, v [n, kv_heads, dim], or, where
    it is `causal`, over as many of the T rows as stand up to the query's place -> float16 [T, heads, dim_v], and the
    logarithm of the sum of weights, float32 [heads, T]."""
    dim_v, width = v.shape[-1], _width(q.shape[-1], v.shape[-1])
    compute = _plain if INTERPRETED and not q.is_cuda else _cudnn
    found, weights = compute(_widened(q, width), _widened(k, width), _widened(v, width), causal)
    return found[..., :dim_v].contiguous(), weights


def _width(dim_k: int, dim_v: int) -> int:
    """Elements of a head as the library has them: of keys as many as of values, and a multiple of 8."""
    return -(-max(dim_k, dim_v) // 8) * 8


def _widened(x: torch.Tensor, width: int) -> torch.Tensor:
    """x [..., dim] with zeros behind it."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`library` for heads of one width."""
    by_heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_heads, None, True, 0.0, causal, False, scale=LN2)
    return found[0].squeeze(0).transpose(0, 1), found[1].view(q.shape[1], q.shape[0]).contiguous()


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`_cudnn` in plain torch."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.float(), k) * LN2
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    return torch.einsum("htn,nhd->thd", scores.softmax(-1), v).half(), scores.logsumexp(-1)


def least_pages(
    record: RecordLayout, rows: int, layer: AttentionLayer, device: torch.device, choice: Choice | None = None
) -> int:
    """`Asked.past` of a step of so many rows in that layer."""
    if choice is not None and rows > 1:
        return 1
    plain = not layer.window and not layer.softcap and rows >= LEAST_QUERIES
    return LEAST_ROWS // record.page_size if plain and library_takes(device, record.dim_k, record.dim_v) else 0


@cache
def library_takes(device: torch.device, dim_k: int, dim_v: int) -> bool:
    """Whether the library computes with such heads on that device, and what it should."""
    shapes = (16, 2, dim_k), (16, 1, dim_k), (16, 1, dim_v)
    q, k, v = (torch.arange(math.prod(shape), device=device).sin().half().view(shape) for shape in shapes)
    try:
        found, plain = library(q, k, v), _plain(q, k, v, False)
    except RuntimeError:
        return False
    return all(torch.allclose(x.float(), y.float(), atol=0.01) for x, y in zip(found, plain, strict=True))
