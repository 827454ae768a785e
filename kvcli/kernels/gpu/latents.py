"""Attention over latents: rows whose value is a part of the key, and which all heads have in common (arXiv 2405.04434),
or all heads of a group.

The kernels are cut as those of other rows (attention.py, combine.py), but for this: a tile of values is read
once, for scores and for sums; a program has some of the heads, a *tile* of them, since accumulators of all would not
stay in registers; and as the rows of one head must keep a whole card busy, there are more partial results, which are
merged some at a time.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.codecs import RecordLayout
from kvcli.kernels.gpu import shares
from kvcli.kernels.gpu.attention import LOG2_E, Partials, Tiling, tile_end
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.language import SERIAL, fence_copies, wait_for_previous
from kvcli.kernels.gpu.latentcombine import MOST_PARTS, PIECE, halves, store_turned, turned
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.places import address
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.span import (
    EDGE,
    NOTHING,
    edge_bound,
    edge_word,
    load_scales,
    positions_of,
    seen_rows,
    store_part,
)
from kvcli.kernels.gpu.tiles import (
    bound,
    elements,
    head_factor,
    launch_options,
    left_centre,
    pair_tile,
    plain_tile,
    quarter_tile,
    tile_parts,
)

WHOLE, EDGES, OPEN = (tl.constexpr(x) for x in (shares.WHOLE, shares.EDGES, shares.OPEN))
HEADS_AT_ONCE = 16  # that a program has at most
OTHERS = 8  # programs of one query, of each tile of heads, for what is not seen wholly
MUCH_SHARED = 168 << 10  # bytes


def tile_of_heads(heads: int) -> int:
    """How many heads a program has."""
    return min(HEADS_AT_ONCE, triton.next_power_of_2(heads))


def block_rows(record: RecordLayout, heads: int, rows: int) -> tuple[int, int]:
    """How many positions make a block of a step of `rows`, and how many queries a program has, of its heads."""
    m = 16 if rows == 1 else 32
    return 1 if rows == 1 else min(record.page_size, m // tile_of_heads(heads // record.kv_heads)), m


def tiles_of_heads(record: RecordLayout, heads: int) -> int:
    """Tiles of heads, of all KV heads."""
    group = heads // record.kv_heads
    return record.kv_heads * -(-group // tile_of_heads(group))


def parts_of_one(record: RecordLayout, heads: int, chip: Chip) -> int:
    """Programs, of each tile of heads, that decoding one query is worth: one on each multiprocessor, which has room
    for no more."""
    return min(MOST_PARTS - OTHERS, max(1, chip.multiprocessors // tiles_of_heads(record, heads)))


@triton.jit
def _load_query(q, ok, row, FIRST: tl.constexpr, WIDTH: tl.constexpr, i: tl.constexpr, N: tl.constexpr,
                DIM: tl.constexpr, PAD: tl.constexpr):  # fmt: skip
    """Part i of N of DIM dims of queries from FIRST on, float16 [M, PAD / N]; 0 where there is nothing."""
    d = elements(i, N, DIM, PAD)
    return tl.load(q + row[:, None] * WIDTH + FIRST + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _span(
    lo, hi, q, ok, row, position, newest, table, offset, scale_v, out, tops, totals, cell, softcap,
    BLOCK: tl.constexpr, M: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NV: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, V_SCALES: tl.constexpr, OFF_V: tl.constexpr, FACTOR_V: tl.constexpr,
    TURNED: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries over the rows of tiles [lo, hi), lo < hi: writes one partial result. See `span.span`."""
    PITCH: tl.constexpr = EDGE if MASKED else 1
    WIDTH: tl.constexpr = DIM_K + DIM_V
    last = hi - 1
    word = edge_word(table, lo, TILES, PITCH) + offset + V_OFFSET  # of values; put together in steps: see `span.span`
    first = edge_word(table, tl.minimum(lo + 1, last), TILES, PITCH) + offset
    page = edge_word(table, tl.minimum(lo + 2, last), TILES, PITCH)
    wait_for_previous(PDL)
    qk = _load_query(q, ok, row, 0, WIDTH, 0, 1, DIM_K, PAD_K)
    q0 = _load_query(q, ok, row, DIM_K, WIDTH, 0, 4 if NV == 4 else 1, DIM_V, PAD_V)
    sum_q = tl.sum(q0.to(tl.float32), 1)
    q1 = q0
    q2 = q0
    q3 = q0
    if NV == 2:  # taken apart here: loads of every second element would be many
        q0, q1 = tl.split(tl.reshape(q0, (M, PAD_V // 2, 2)))
    if NV == 4:
        q1 = _load_query(q, ok, row, DIM_K, WIDTH, 1, NV, DIM_V, PAD_V)
        sum_q += tl.sum(q1.to(tl.float32), 1)
        q2 = _load_query(q, ok, row, DIM_K, WIDTH, 2, NV, DIM_V, PAD_V)
        q3 = _load_query(q, ok, row, DIM_K, WIDTH, 3, NV, DIM_V, PAD_V)
        sum_q += tl.sum(q2.to(tl.float32), 1) + tl.sum(q3.to(tl.float32), 1)
    off = OFF_V * sum_q
    factor = 1.0
    if FACTOR_V != 0:
        factor = tl.load(scale_v) * FACTOR_V
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
    vd = tl.zeros((BN,), tl.float16)
    seen = seen_rows(table, lo, 0, newest, TILES, BN, MASKED)
    if V_SCALES > 0:
        vd = load_scales(address(word - V_OFFSET, False), lo, seen, V_SCALES, TILES, BN, MASKED)
    for t in tl.range(bound(lo), bound(hi), num_stages=STAGES):
        page_next = edge_word(table, tl.minimum(t + 3, last), TILES, PITCH)
        rows = (t % TILES) * BN + tl.arange(0, BN)
        seen = seen_rows(table, t, 0, newest, TILES, BN, MASKED)
        values = address(word, False)
        vd_next = vd
        if V_SCALES > 0:  # by hand: they are too small for the compiler to do it
            following = tl.minimum(t + 1, last)
            seen_next = seen_rows(table, following, 0, newest, TILES, BN, MASKED)
            vd_next = load_scales(address(first, False), following, seen_next, V_SCALES, TILES, BN, MASKED)
        k = plain_tile(values, rows, seen, K_ROW, DIM_K, PAD_K, CODEC_K, MASKED, -V_OFFSET)
        if NV == 1:
            v0 = plain_tile(values, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, MASKED)
            fence_copies(M)
            s = tl.dot(q0, tl.trans(v0), tl.dot(qk, tl.trans(k)))
        else:
            if NV == 2:
                v0, v1 = pair_tile(values, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, MASKED)
                s = tl.dot(q0, tl.trans(v0)) + tl.dot(q1, tl.trans(v1))  # beside each other
            else:
                v0, v1, v2, v3 = quarter_tile(values, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, MASKED)
                s = tl.dot(q1, tl.trans(v1), tl.dot(q0, tl.trans(v0)))
                s += tl.dot(q3, tl.trans(v3), tl.dot(q2, tl.trans(v2)))
            if OFF_V != 0:
                s = s - off[:, None]
            if V_SCALES > 0:
                s = s * vd.to(tl.float32)[None, :]
            if FACTOR_V != 0:
                s = s * factor
            fence_copies(M)
            s += tl.dot(qk, tl.trans(k))
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        if MASKED:
            visible = seen[None, :]
            if BLOCK > 1:
                place = positions_of(table, t, TILES, BN)
                asks = (position >= edge_bound(table, t, 4, TILES)) & (position < edge_bound(table, t, 5, TILES))
                visible = visible & asks[:, None] & (place[None, :] <= position[:, None])
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
        a0 = tl.dot(w, v0, a0 * decay[:, None])
        if NV > 1:
            a1 = tl.dot(w, v1, a1 * decay[:, None])
        if NV > 2:
            a2 = tl.dot(w, v2, a2 * decay[:, None])
            a3 = tl.dot(w, v3, a3 * decay[:, None])
        vd = vd_next
        word = first + V_OFFSET
        first = page + offset
        page = page_next
    shift = OFF_V * tl.max(weight, 1)
    tl.store(tops + cell, top, mask=ok)
    tl.store(totals + cell, tl.max(total, 1), mask=ok)
    if TURNED > 0:
        factor *= (PIECE / DIM_V) ** 0.5
    a0 = (a0 - shift[:, None]) * factor
    if NV > 1:
        a1 = (a1 - shift[:, None]) * factor
    if NV > 2:
        a2 = (a2 - shift[:, None]) * factor
        a3 = (a3 - shift[:, None]) * factor
    if TURNED > 0 and NV == 1:
        if TURNED == 2:
            even, odd = tl.split(tl.reshape(a0, (M, PAD_V // 2, 2)))
            b0, b1 = even + odd, even - odd
        else:
            b0, b1 = halves(a0)
        store_turned(out, cell, ok, b0, 0, DIM_V)
        store_turned(out, cell, ok, b1, 1, DIM_V)
    elif TURNED == 2:
        store_turned(out, cell, ok, a0 + a1, 0, DIM_V)
        store_turned(out, cell, ok, a0 - a1, 1, DIM_V)
    elif TURNED == 4:
        b0, b1, b2, b3 = a0 + a1, a0 - a1, a2 + a3, a2 - a3
        store_turned(out, cell, ok, b0 + b2, 0, DIM_V)
        store_turned(out, cell, ok, b1 + b3, 1, DIM_V)
        store_turned(out, cell, ok, b0 - b2, 2, DIM_V)
        store_turned(out, cell, ok, b1 - b3, 3, DIM_V)
    elif NV == 2:
        store_part(out, cell, ok, tl.reshape(tl.join(a0, a1), (M, PAD_V)), 0, 1, DIM_V, PAD_V)
    else:
        store_part(out, cell, ok, a0, 0, NV, DIM_V, PAD_V)
        if NV > 2:
            store_part(out, cell, ok, a1, 1, NV, DIM_V, PAD_V)
            store_part(out, cell, ok, a2, 2, NV, DIM_V, PAD_V)
            store_part(out, cell, ok, a3, 3, NV, DIM_V, PAD_V)


@triton.jit(do_not_specialize=["rows_end", "offset", "open_offset"])
def _attend_latents(
    q, position, work, table, edges, scale_v, out, tops, totals, rows_end, offset, open_offset, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr, OPEN_RECORD: tl.constexpr,
    BLOCK: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr, CODEC_K: tl.constexpr,
    CODEC_V: tl.constexpr, NV: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_V: tl.constexpr, FACTOR_V: tl.constexpr, OPEN_K: tl.constexpr, OPEN_V: tl.constexpr,
    OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr, EDGED: tl.constexpr,
    CAPPED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OPEN_BN: tl.constexpr, OPEN_STAGES: tl.constexpr,
    TURNED: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a tile of heads, part, and block of positions; see attention.py."""
    parts = tl.num_programs(1)
    share = tl.program_id(1)
    ITEM: tl.constexpr = 6 if APART else 4
    item = work + (tl.program_id(2) * parts + share) * ITEM
    kind = tl.load(item)
    turned = tl.load(item + 1)
    lo = tl.load(item + 2)
    hi = tl.load(item + 3)
    r = tl.arange(0, M)
    kv_head = tl.program_id(0) // ((GROUP + TILE - 1) // TILE)
    inside = tl.program_id(0) % ((GROUP + TILE - 1) // TILE) * TILE + r % TILE  # the group
    head = kv_head * GROUP + inside
    offset += kv_head.to(tl.int64) * RECORD
    open_offset += kv_head.to(tl.int64) * OPEN_RECORD
    scale_v += kv_head
    if APART:
        own = tl.load(item + 4)
        newest = tl.load(position + own).to(tl.int32)
        at = newest + r * 0
        ok = (r < tl.where(kind == 0, 0, TILE)) & (inside < GROUP)
        row = own.to(tl.int64) * HEADS + tl.minimum(head, HEADS - 1)
        cell = tl.minimum(head, HEADS - 1).to(tl.int64) * parts + tl.load(item + 5)
        scale_v += own * (HEADS // GROUP)
    else:
        start = tl.load(position).to(tl.int32)  # no kernel of this token writes it
        end = start + rows_end
        base = (start // BLOCK + tl.program_id(2)) * BLOCK
        at = base + r // TILE  # positions
        ok = (r < BLOCK * TILE) & (inside < GROUP) & (at >= start) & (at < end)
        newest = tl.minimum(base + BLOCK, end) - 1
        at = tl.minimum(tl.maximum(at, tl.maximum(base, start)), newest)
        row = (at - start).to(tl.int64) * HEADS + tl.minimum(head, HEADS - 1)
        cell = row * parts + share
    asks = row + turned * rows_end * HEADS  # where the query stands in q
    TILES: tl.constexpr = SIZE // BN
    OPEN_TILES: tl.constexpr = SIZE // OPEN_BN
    if kind == WHOLE:
        _span(
            lo * TILES, hi * TILES, q, ok, asks, at, newest, table, offset, scale_v, out, tops, totals, cell, softcap,
            BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V, CODEC_K, CODEC_V, NV, K_ROW, V_ROW, V_OFFSET, V_SCALES, OFF_V,
            FACTOR_V, TURNED, CAPPED, False, TILES, BN, STAGES, PDL,
        )  # fmt: skip
    elif kind == OPEN:
        stop = tile_end(edges, hi, newest, OPEN_TILES, OPEN_BN)
        _span(
            lo * OPEN_TILES, stop, q, ok, asks, at, newest, edges, open_offset, scale_v, out, tops, totals, cell,
            softcap, BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V, OPEN_K, OPEN_V, 1, OPEN_K_ROW, OPEN_V_ROW, OPEN_V_OFFSET,
            0, 0.0, 0.0, TURNED, CAPPED, True, OPEN_TILES, OPEN_BN, OPEN_STAGES, PDL,
        )  # fmt: skip
    elif kind != EDGES:
        wait_for_previous(PDL)
        tl.store(tops + cell, tl.full((M,), NOTHING, tl.float32), mask=ok)
        tl.store(totals + cell, tl.zeros((M,), tl.float32), mask=ok)
    elif EDGED:
        stop = tile_end(edges, hi, newest, OPEN_TILES, OPEN_BN)
        _span(
            lo * OPEN_TILES, stop, q, ok, asks, at, newest, edges, offset, scale_v, out, tops, totals, cell, softcap,
            BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V, CODEC_K, CODEC_V, NV, K_ROW, V_ROW, V_OFFSET, V_SCALES, OFF_V,
            FACTOR_V, TURNED, CAPPED, True, OPEN_TILES, OPEN_BN, OPEN_STAGES, PDL,
        )  # fmt: skip


def tiling(record: RecordLayout, chip: Chip) -> Tiling:
    """By the wider part of a row, and by what the card has room for: with 64 rows of 576 elements in 16 bits in two
    stages a program takes 164 KiB of shared memory."""
    if any(each.bits == 32 for each in (record.codec_k, record.codec_v)):
        return Tiling(16, 8, 2, 16)
    return Tiling(64, 8, 3, 32, 2) if chip.shared_bytes >= MUCH_SHARED else Tiling(32, 8, 2, 32, 2)


def attend(
    queries: Queries,
    pages: DevicePages,
    softcap: float = 0.0,
    out: Partials | None = None,
    pdl: int = SERIAL,
    tiles: Tiling | None = None,
) -> Partials:
    """Causal attention of the T queries of a step over latents: partial results. `softcap`: see `kernels.attention`."""
    r, lists, heads = pages.record, pages.lists, queries.q.shape[1]
    rows, opened = len(lists.shift), pages.open or pages
    o, group = opened.record, heads // r.kv_heads
    if out is None:
        out = Partials.of(pages, rows, heads)
    positions, m = block_rows(r, heads, 1 if lists.apart else rows)
    tiles = tiles or tiling(r, Chip.of(queries.q.device))
    launch(_attend_latents, (tiles_of_heads(r, heads), out.tops.shape[2], 1 if lists.apart else len(lists.work)))(
        queries.q, lists.position, lists.work, lists.table, lists.edges,
        queries.q if pages.scale_v is None else pages.scale_v, out.out, out.tops, out.totals,
        rows, pages.offset, opened.offset, softcap * LOG2_E, heads, group, tile_of_heads(group), r.record_bytes,
        o.record_bytes, positions, m, r.page_size, r.dim_k,
        padded(r.dim_k), r.dim_v, padded(r.dim_v), r.codec_k.numbers, r.codec_v.numbers, tile_parts(r.codec_v),
        r.k_row_bytes, r.v_row_bytes, r.v_offset, r.v_scales, left_centre(r.codec_v), head_factor(r.codec_v),
        o.codec_k.numbers, o.codec_v.numbers, o.k_row_bytes, o.v_row_bytes, o.v_offset, lists.edged, softcap > 0,
        min(tiles.rows, r.page_size), tiles.stages, min(tiles.open_rows, r.page_size), tiles.open_stages, turned(pages),
        lists.apart, pdl, **launch_options(pdl, tiles.warps, tiles.registers),
    )  # fmt: skip
    return out
