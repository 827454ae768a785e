"""Attention over pages, split over the sequence: `attend` makes partial results, `combine` (combine.py) merges them.

A program has one KV head, the queries of a block of positions within one page, for all heads of the group, and a part
of what they see: an equal share of the sealed (or only) pages before their own, or their own page, or the sinks. The
last two have programs of their own: those pages are in another format, or not full. How the pages are shared out
follows from the position, which is read on the device, and from the number of shares: a CUDA graph replays while the
context grows.

Scores and the running softmax are in base 2; `prepare` (rows.py) has scaled the queries for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.tiles import (
    PARTS,
    add_values,
    bound,
    dot_keys,
    elements,
    launch_options,
    wait_for_inputs,
)

NOTHING = tl.constexpr(-1.0e30)  # the maximum where nothing is seen; finite, so that differences are numbers
CODE_CENTRE = {"int4": 7.5, "int6": 31.5}  # of codes that are not centred when they are unpacked
HEAD_FACTOR = {"fp8": 256.0, "fp8_e5m2": 1.0}  # times the scale of a head
LOG2_E = 1.4426950408889634


@triton.jit
def _load_queries(q, ok, row, PITCH: tl.constexpr, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr,
                  PAD: tl.constexpr):  # fmt: skip
    """Part i of N of the queries, float16 [M, PAD / N]; 0 where a row is not `ok` or an element is not there."""
    d = elements(i, N, DIM, PAD)
    return tl.load(q + row[:, None] * PITCH + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _page(table, page, origin, offset, head, RECORD: tl.constexpr):
    """int64: the address of the record of a page and a head."""
    return tl.load(table + (page - origin)) + (offset + head * RECORD)


@triton.jit
def _scales(table, t, origin, offset, head, seen, RECORD: tl.constexpr, AT: tl.constexpr, TILES: tl.constexpr,
            BN: tl.constexpr, MASKED: tl.constexpr):  # fmt: skip
    """The float16 scales of the rows of tile t, [BN]."""
    at = (_page(table, t // TILES, origin, offset, head, RECORD) + AT).to(tl.pointer_type(tl.float16))
    p = tl.multiple_of(at, 16) + ((t % TILES) * BN + tl.arange(0, BN))
    if MASKED:
        return tl.load(p, mask=seen, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def _seen(t, oldest, newest, BN: tl.constexpr):
    """Which rows of tile t are in [oldest, newest]."""
    at = t * BN + tl.arange(0, BN)
    return (at >= oldest) & (at <= newest)


@triton.jit
def _centre_scores(s, qc, qb, angles, t, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BN: tl.constexpr):
    """s [M, BN] plus the scores of the mean that the keys of tile t lack: one for every CENTRE_ROWS = 16 rows.

    They are found for 16 groups, of which BN / 16 are there, and spread over the rows by a product with ones
    and zeros, in two halves so that nothing is lost.
    """
    if ROPE == 0:
        return s + qb[:, None]
    else:
        g = tl.arange(0, 16)
        j = tl.arange(0, ROPE_PAD)
        p = angles + (t * (BN // 16) + g)[:, None].to(tl.int64) * ROPE + j[None, :]
        a = tl.load(p, mask=(g < BN // 16)[:, None] & (j < ROPE)[None, :], other=0.0)
        c = tl.dot(qc, tl.trans(a)) + qb[:, None]
        high = c.to(tl.float16)
        low = (c - high.to(tl.float32)).to(tl.float16)
        spread = (g[:, None] == (tl.arange(0, BN) // 16)[None, :]).to(tl.float16)
        return tl.dot(low, spread, tl.dot(high, spread, s))


@triton.jit
def _span(
    lo, hi, q, qc, qb, ok, row, position, oldest, newest, head, table, origin, offset, angles, scale_k, scale_v,
    out, tops, totals, cell, window, softcap,
    M: tl.constexpr, Q_PITCH: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Queries over the rows of tiles [lo, hi), lo < hi: writes one partial result.

    A tile is BN rows; TILES make a page. `ok`, `row`, `position`, `cell` [M]: whether there is such a query, where it
    stands in q, its position, and where its result goes. With MASKED not every query sees every row.
    """
    SCALES: tl.constexpr = K_SCALES > 0 or V_SCALES > 0
    q0 = _load_queries(q, ok, row, Q_PITCH, 0, NK, DIM_K, PAD_K)
    q1 = q0
    q2 = q0
    q3 = q0
    total_q = tl.sum(q0.to(tl.float32), 1)
    if NK > 1:
        q1 = _load_queries(q, ok, row, Q_PITCH, 1, NK, DIM_K, PAD_K)
        total_q += tl.sum(q1.to(tl.float32), 1)
    if NK > 2:
        q2 = _load_queries(q, ok, row, Q_PITCH, 2, NK, DIM_K, PAD_K)
        q3 = _load_queries(q, ok, row, Q_PITCH, 3, NK, DIM_K, PAD_K)
        total_q += tl.sum(q2.to(tl.float32), 1) + tl.sum(q3.to(tl.float32), 1)
    off = OFF_K * total_q
    if FACTOR_K != 0:
        factor_k = tl.load(scale_k + head) * FACTOR_K
    if CENTRED:
        qb_row = tl.load(qb + row, mask=ok, other=0.0)
        qc_tile = q0
        if ROPE > 0:
            j = tl.arange(0, ROPE_PAD)
            qc_tile = tl.load(qc + row[:, None] * ROPE + j[None, :], mask=ok[:, None] & (j < ROPE)[None, :], other=0.0)
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((M, 8), tl.float32)  # all columns are the same: sums are products with ones
    weight = total
    ones = tl.full((BN, 8), 1.0, tl.float16)
    a0 = tl.zeros((M, PAD_V // NV), tl.float32)
    a1 = tl.zeros((M, 1), tl.float32)
    a2 = a1
    a3 = a1
    if NV > 1:
        a1 = tl.zeros((M, PAD_V // NV), tl.float32)
    if NV > 2:
        a2 = a0
        a3 = a0
    kd = tl.zeros((BN,), tl.float16)
    vd = kd
    seen = _seen(lo, oldest, newest, BN)
    if K_SCALES > 0:
        kd = _scales(table, lo, origin, offset, head, seen, RECORD, K_SCALES, TILES, BN, MASKED)
    if V_SCALES > 0:
        vd = _scales(table, lo, origin, offset, head, seen, RECORD, V_SCALES, TILES, BN, MASKED)
    for t in tl.range(bound(lo), bound(hi), num_stages=STAGES):
        at = _page(table, t // TILES, origin, offset, head, RECORD)
        rows = (t % TILES) * BN + tl.arange(0, BN)
        seen = _seen(t, oldest, newest, BN)
        if SCALES:  # loaded one tile ahead by hand: they are too small for the compiler to do it
            following = tl.minimum(t + 1, hi - 1)
            seen_next = _seen(following, oldest, newest, BN)
            kd_next = kd
            vd_next = vd
            if K_SCALES > 0:
                kd_next = _scales(
                    table, following, origin, offset, head, seen_next, RECORD, K_SCALES, TILES, BN, MASKED
                )
            if V_SCALES > 0:
                vd_next = _scales(
                    table, following, origin, offset, head, seen_next, RECORD, V_SCALES, TILES, BN, MASKED
                )
        s = dot_keys(q0, q1, q2, q3, at, rows, seen, K_ROW, DIM_K, PAD_K, CODEC_K, NK, MASKED)
        if OFF_K != 0:
            s = s - off[:, None]
        if K_SCALES > 0:
            s = s * kd.to(tl.float32)[None, :]
        if FACTOR_K != 0:
            s = s * factor_k
        if CENTRED:
            s = _centre_scores(s, qc_tile, qb_row, angles, t, ROPE, ROPE_PAD, BN)
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        if MASKED:
            place = t * BN + tl.arange(0, BN)
            visible = place[None, :] <= position[:, None]
            if WINDOWED:
                visible = visible & (place[None, :] > position[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        decay = tl.exp2(top - higher)
        p = tl.exp2(s - higher[:, None])
        top = higher
        w = p.to(tl.float16)
        total = tl.dot(w, ones, total * decay[:, None])
        if V_SCALES > 0:
            w = (p * vd.to(tl.float32)[None, :]).to(tl.float16)
        if OFF_V != 0:
            weight = tl.dot(w, ones, weight * decay[:, None])
        a0, a1, a2, a3 = add_values(
            w, decay, a0, a1, a2, a3, at + V_OFFSET, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, NV, MASKED
        )
        if SCALES:
            kd = kd_next
            vd = vd_next
    shift = OFF_V * tl.max(weight, 1)
    factor_v = 1.0
    if FACTOR_V != 0:
        factor_v = tl.load(scale_v + head) * FACTOR_V
    tl.store(tops + cell, top, mask=ok)
    tl.store(totals + cell, tl.max(total, 1), mask=ok)
    _store_part(out, cell, ok, (a0 - shift[:, None]) * factor_v, 0, NV, DIM_V, PAD_V)
    if NV > 1:
        _store_part(out, cell, ok, (a1 - shift[:, None]) * factor_v, 1, NV, DIM_V, PAD_V)
    if NV > 2:
        _store_part(out, cell, ok, (a2 - shift[:, None]) * factor_v, 2, NV, DIM_V, PAD_V)
        _store_part(out, cell, ok, (a3 - shift[:, None]) * factor_v, 3, NV, DIM_V, PAD_V)


@triton.jit
def _store_part(out, cell, ok, part, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    d = elements(i, N, DIM, PAD)
    tl.store(out + cell[:, None] * DIM + d[None, :], part, mask=ok[:, None] & (d < DIM)[None, :])


@triton.jit(do_not_specialize=["rows_end", "splits", "origin", "offset", "open_offset", "window"])
def _attend(
    q, qc, qb, position, table, open_table, angles, scale_k, scale_v, out, tops, totals,
    rows_end, splits, origin, offset, open_offset, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr,
    CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    OPEN_K: tl.constexpr, OPEN_V: tl.constexpr, OPEN_NK: tl.constexpr, OPEN_NV: tl.constexpr,
    OPEN_RECORD: tl.constexpr, OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, SINKS: tl.constexpr, OWN_OPEN: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OPEN_BN: tl.constexpr,
    OPEN_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    share = tl.program_id(0)
    head = tl.program_id(1)
    parts = tl.num_programs(0)
    wait_for_inputs(PDL)
    start = tl.load(position).to(tl.int32)
    end = start + rows_end
    r = tl.arange(0, M)
    base = (start // BLOCK + tl.program_id(2)) * BLOCK
    at = base + r // GROUP  # positions
    ok = (r < BLOCK * GROUP) & (at >= start) & (at < end)
    first = tl.maximum(base, start)
    newest = tl.minimum(base + BLOCK, end) - 1
    at = tl.minimum(tl.maximum(at, first), newest)
    row = (at - start).to(tl.int64) * HEADS + head * GROUP + r % GROUP
    cell = row * parts + share
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(first - window + 1, 0)
    own = first // SIZE
    visible = oldest // SIZE  # pages
    TILES: tl.constexpr = SIZE // BN
    OPEN_TILES: tl.constexpr = SIZE // OPEN_BN
    if share < splits:
        lo_page = tl.maximum(visible, SINKS)
        hi_page = own
        if not OWN_OPEN:
            hi_page = own + 1
        n = tl.maximum(hi_page - lo_page, 0) * TILES
        each = tl.cdiv(n, splits)
        lo = lo_page * TILES + share * each
        hi = lo_page * TILES + tl.minimum(share * each + each, n)
    else:
        lo = 0
        hi = 0
    if first > newest:
        lo = 0
        hi = 0
    open_lo = 0
    open_hi = 0
    if (share == splits) & (first <= newest):  # the queries' own page
        if OWN_OPEN or own < SINKS:
            open_lo = own * OPEN_TILES
            open_hi = newest // OPEN_BN + 1
    if (share > splits) & (first <= newest):  # the sinks before it
        open_lo = visible * OPEN_TILES
        open_hi = tl.minimum(own, SINKS) * OPEN_TILES
    if lo < hi:
        _span(
            lo, hi, q, qc, qb, ok, row, at, oldest, newest, head, table, origin, offset, angles, scale_k, scale_v,
            out, tops, totals, cell, window, softcap, M, DIM_K, DIM_K, PAD_K, DIM_V, PAD_V, CODEC_K, CODEC_V, NK, NV,
            RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OFF_K, OFF_V, FACTOR_K, FACTOR_V, CENTRED, ROPE,
            ROPE_PAD, WINDOWED, CAPPED, WINDOWED or not OWN_OPEN, TILES, BN, STAGES,
        )  # fmt: skip
    elif open_lo < open_hi:
        _span(
            open_lo, open_hi, q, qc, qb, ok, row, at, oldest, newest, head, open_table, origin, open_offset, angles,
            scale_k, scale_v, out, tops, totals, cell, window, softcap, M, DIM_K, DIM_K, PAD_K, DIM_V, PAD_V, OPEN_K,
            OPEN_V, OPEN_NK, OPEN_NV, OPEN_RECORD, OPEN_K_ROW, OPEN_V_ROW, OPEN_V_OFFSET, 0, 0, 0.0, 0.0, 0.0, 0.0,
            False, ROPE, ROPE_PAD, WINDOWED, CAPPED, True, OPEN_TILES, OPEN_BN, OPEN_STAGES,
        )  # fmt: skip
    else:
        tl.store(tops + cell, tl.full((M,), NOTHING, tl.float32), mask=ok)
        tl.store(totals + cell, tl.zeros((M,), tl.float32), mask=ok)


@dataclass(frozen=True)
class Partials:
    """Results over parts of the rows: float32 `out` [T, heads, parts, dim_v] (undefined where nothing was seen), and
    `tops`, `totals` [T, heads, parts]: the largest score and the sum of 2 ** (score - largest)."""

    out: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, pages: DevicePages, splits: int) -> Partials:
        """Buffers for `rows` queries, on the pages' device."""
        parts, device = part_count(pages, splits), pages.table.device
        return cls(
            torch.empty(rows, heads, parts, pages.record.dim_v, device=device),
            torch.empty(rows, heads, parts, device=device),
            torch.empty(rows, heads, parts, device=device),
        )


def part_count(pages: DevicePages, splits: int) -> int:
    """Partial results of a query: `splits` shares of the pages before its own, its own page, and the sinks."""
    return splits + 1 + (pages.open is not None and pages.sinks > 0)


@dataclass(frozen=True)
class Tiling:
    """Rows of a tile, warps and pipeline stages for the sealed (or only) pages; rows and stages for the open ones."""

    rows: int
    warps: int
    stages: int
    open_rows: int = 32
    open_stages: int = 2


def tiling(codec_k: str, codec_v: str, dim: int, decode: bool) -> Tiling:
    """What measured best on an H100, by the wider of the two codecs; `dim` is the padded head dim."""
    parts = min(PARTS[codec_k], PARTS[codec_v])
    wide = "f32" in (codec_k, codec_v)
    if not decode:
        return Tiling(32, 4, 2) if dim > 128 or wide else Tiling(64, 4, 2)
    if parts == 4:
        return Tiling(64, 2, 2, 16) if dim > 128 else Tiling(64, 1, 2)
    if parts == 2:
        return Tiling(64, 4, 2) if dim > 128 else Tiling(64, 4, 3)
    if wide:
        return Tiling(16 if dim > 128 else 32, 4, 2, 16)
    return Tiling(32, 4, 3) if dim > 128 else Tiling(64, 2, 3)


def attend(
    queries: Queries,
    pages: DevicePages,
    position: torch.Tensor,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 1,
    out: Partials | None = None,
    pdl: bool = False,
    tiles: Tiling | None = None,
) -> Partials:
    """Causal attention of T queries, the first at `position` (int64 [1] on the device), over pages: partial results.

    A query at position p sees rows (p - window, p], all of [0, p] when window is 0. `softcap`: see
    `kernels.attention`. `splits`: shares that the pages before the queries' own are cut into.
    """
    r, rows, heads = pages.record, queries.q.shape[0], queries.q.shape[1]
    opened = pages.where_rows_go
    o, group = opened.record, heads // r.kv_heads
    if out is None:
        out = Partials.empty(rows, heads, pages, splits)
    m = max(16, triton.next_power_of_2(group)) if rows == 1 else max(64, triton.next_power_of_2(group))
    block = 1 if rows == 1 else min(r.page_size, 1 << ((m // group).bit_length() - 1))
    blocks = 1 if rows == 1 else (rows - 1) // block + 2
    pad_k, pad_v = padded(r.dim_k), padded(r.dim_v)
    if tiles is None:
        tiles = tiling(r.codec_k, r.codec_v, max(pad_k, pad_v), rows == 1)
    centred = pages.centre is not None
    rope = 0 if pages.angles is None else pages.angles.shape[1]
    some = queries.q  # stands for what is not there
    _attend[out.tops.shape[2], r.kv_heads, blocks](
        queries.q, queries.qc, queries.qb, position, pages.table, opened.table,
        some if pages.angles is None else pages.angles, some if pages.scale_k is None else pages.scale_k,
        some if pages.scale_v is None else pages.scale_v, out.out, out.tops, out.totals,
        rows, splits, pages.first_page, pages.offset, opened.offset, window, softcap * LOG2_E,
        heads, group, block, m, r.page_size, r.dim_k, pad_k, r.dim_v, pad_v,
        r.codec_k, r.codec_v, PARTS[r.codec_k], PARTS[r.codec_v], r.record_bytes, r.k_row_bytes, r.v_row_bytes,
        r.v_offset, r.k_scales, r.v_scales, CODE_CENTRE.get(r.codec_k, 0.0), CODE_CENTRE.get(r.codec_v, 0.0),
        HEAD_FACTOR.get(r.codec_k, 0.0), HEAD_FACTOR.get(r.codec_v, 0.0),
        o.codec_k, o.codec_v, PARTS[o.codec_k], PARTS[o.codec_v], o.record_bytes, o.k_row_bytes, o.v_row_bytes,
        o.v_offset, centred, rope, max(16, triton.next_power_of_2(rope)), pages.sinks if pages.open else 0,
        pages.open is None or pages.tail > 0, window > 0, softcap > 0, min(tiles.rows, r.page_size), tiles.stages,
        min(tiles.open_rows, r.page_size), tiles.open_stages, pdl, **launch_options(pdl, tiles.warps),
    )  # fmt: skip
    return out
