"""The inner loop of attention: a block of queries over a run of tiles of cached rows, by a running softmax in base 2.

Scales of rows act on scores and on probabilities, never on single elements. Codes that are not centred when they are
unpacked (those of fewer than 8 bits) are made so in the sums: sum of w * (u - c) = sum of w * u - c * (sum of w).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.language import wait_for_previous
from kvcli.kernels.gpu.places import address, slot
from kvcli.kernels.gpu.shares import EDGE_NUMBERS
from kvcli.kernels.gpu.tiles import add_values, bound, dot_keys, elements

EDGE = tl.constexpr(EDGE_NUMBERS)
NOTHING = tl.constexpr(-1.0e30)  # the maximum where nothing is seen; finite, so that differences are numbers


@triton.jit
def load_queries(q, ok, row, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    """Part i of N of the queries, float16 [M, PAD / N]; 0 where a row is not `ok` or an element is not there."""
    d = elements(i, N, DIM, PAD)
    return tl.load(q + row[:, None] * DIM + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def edge_word(table, t, TILES: tl.constexpr, PITCH: tl.constexpr):
    """int64: the word (places.py) of the page of tile t."""
    return tl.load(table + t // TILES * PITCH)


@triton.jit
def load_scales(record, t, seen, AT: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """The float16 scales of the rows of tile t, [BN]; `record`: the address of the head's record in its page."""
    at = tl.multiple_of(record.to(tl.pointer_type(tl.float16)), 16) + AT // 2  # see `plain_tile`
    p = at + ((t % TILES) * BN + tl.arange(0, BN))
    if MASKED:
        return tl.load(p, mask=seen, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def edge_bound(table, t, i: tl.constexpr, TILES: tl.constexpr):
    """int32: number i of the edge (shares.py) of tile t."""
    return tl.load(table + t // TILES * EDGE + i).to(tl.int32)


@triton.jit
def positions_of(table, t, TILES: tl.constexpr, BN: tl.constexpr):
    """The positions of the rows of tile t, int32 [BN]."""
    return edge_bound(table, t, 1, TILES) + (t % TILES) * BN + tl.arange(0, BN)


@triton.jit
def seen_rows(table, t, oldest, newest, TILES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """Which rows of tile t any of the queries sees: those in [oldest, newest] that its entry shows."""
    if MASKED:
        first = edge_bound(table, t, 1, TILES)
        lo = tl.maximum(edge_bound(table, t, 2, TILES), oldest - first)
        hi = tl.minimum(edge_bound(table, t, 3, TILES), newest + 1 - first)
        slots = (t % TILES) * BN + tl.arange(0, BN)
        return (slots >= lo) & (slots < hi)
    else:
        return tl.full((BN,), 1, tl.int1)


@triton.jit
def centre_scores(s, qc, qb, angles, t, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BN: tl.constexpr):
    """s [M, BN] plus the scores of the mean that the keys of tile t of the slots lack: one for every CENTRE_ROWS = 16
    rows.

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
def span(
    lo, hi, q, qc, qb, ok, row, position, oldest, newest, window, head, table, offset, angles, scale_k, scale_v, out,
    tops, totals, cell, softcap, noted,
    BLOCK: tl.constexpr, M: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, NOTED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Queries over the rows of tiles [lo, hi), lo < hi: writes one partial result.

    A tile is BN rows; TILES make a page. `ok`, `row`, `position`, `cell` [M]: whether there is such a query, where it
    stands in q, its position, and where its result goes. `table`: the words of pages, all of whose rows every query
    sees; with MASKED `edges` (see `Shares`) of such as not every query sees wholly: none sees rows before `oldest` or
    behind `newest`. With NOTED scores are written: those of tile t from `noted` [M, 1] + t * BN on. Tables are read
    before the kernel that was launched before has ended: none of this token writes them.
    """
    PITCH: tl.constexpr = EDGE if MASKED else 1
    SCALES: tl.constexpr = K_SCALES > 0 or V_SCALES > 0
    # Addresses are read three tiles ahead by hand, so that rows themselves are what the compiler reads ahead. Each is
    # put together in steps: the compiler does not pipeline loops in which values only move up.
    last = hi - 1
    own = head.to(tl.int64) * RECORD
    word = edge_word(table, lo, TILES, PITCH) + offset + own
    first = edge_word(table, tl.minimum(lo + 1, last), TILES, PITCH) + offset
    page = edge_word(table, tl.minimum(lo + 2, last), TILES, PITCH)
    wait_for_previous(PDL)
    q0 = load_queries(q, ok, row, 0, NK, DIM_K, PAD_K)
    q1 = q0
    q2 = q0
    q3 = q0
    total_q = tl.sum(q0.to(tl.float32), 1)
    if NK > 1:
        q1 = load_queries(q, ok, row, 1, NK, DIM_K, PAD_K)
        total_q += tl.sum(q1.to(tl.float32), 1)
    if NK > 2:
        q2 = load_queries(q, ok, row, 2, NK, DIM_K, PAD_K)
        q3 = load_queries(q, ok, row, 3, NK, DIM_K, PAD_K)
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
    seen = seen_rows(table, lo, oldest, newest, TILES, BN, MASKED)
    at = address(word, CENTRED)
    if K_SCALES > 0:
        kd = load_scales(at, lo, seen, K_SCALES, TILES, BN, MASKED)
    if V_SCALES > 0:
        vd = load_scales(at, lo, seen, V_SCALES, TILES, BN, MASKED)
    for t in tl.range(bound(lo), bound(hi), num_stages=STAGES):
        page_next = edge_word(table, tl.minimum(t + 3, last), TILES, PITCH)
        rows = (t % TILES) * BN + tl.arange(0, BN)
        seen = seen_rows(table, t, oldest, newest, TILES, BN, MASKED)
        at = address(word, CENTRED)
        if SCALES:  # by hand too: they are too small for the compiler to do it
            following = tl.minimum(t + 1, last)
            seen_next = seen_rows(table, following, oldest, newest, TILES, BN, MASKED)
            next_at = address(first + own, CENTRED)
            kd_next = kd
            vd_next = vd
            if K_SCALES > 0:
                kd_next = load_scales(next_at, following, seen_next, K_SCALES, TILES, BN, MASKED)
            if V_SCALES > 0:
                vd_next = load_scales(next_at, following, seen_next, V_SCALES, TILES, BN, MASKED)
        s = dot_keys(q0, q1, q2, q3, at, rows, seen, K_ROW, DIM_K, PAD_K, CODEC_K, NK, MASKED)
        if OFF_K != 0:
            s = s - off[:, None]
        if K_SCALES > 0:
            s = s * kd.to(tl.float32)[None, :]
        if FACTOR_K != 0:
            s = s * factor_k
        if CENTRED:
            s = centre_scores(s, qc_tile, qb_row, angles, slot(word) * TILES + t % TILES, ROPE, ROPE_PAD, BN)
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        if MASKED:
            visible = seen[None, :]
            if BLOCK > 1:
                place = positions_of(table, t, TILES, BN)
                asks = (position >= edge_bound(table, t, 4, TILES)) & (position < edge_bound(table, t, 5, TILES))
                visible = visible & asks[:, None] & (place[None, :] <= position[:, None])
                if WINDOWED:
                    visible = visible & (place[None, :] > position[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        if NOTED:
            tl.store(noted + (t * BN + tl.arange(0, BN))[None, :], s, mask=ok[:, None])
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
            w, decay, a0, a1, a2, a3, at, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, NV, MASKED, V_OFFSET
        )
        if SCALES:
            kd = kd_next
            vd = vd_next
        word = first + own
        first = page + offset
        page = page_next
    shift = OFF_V * tl.max(weight, 1)
    factor_v = 1.0
    if FACTOR_V != 0:
        factor_v = tl.load(scale_v + head) * FACTOR_V
    tl.store(tops + cell, top, mask=ok)
    tl.store(totals + cell, tl.max(total, 1), mask=ok)
    store_part(out, cell, ok, (a0 - shift[:, None]) * factor_v, 0, NV, DIM_V, PAD_V)
    if NV > 1:
        store_part(out, cell, ok, (a1 - shift[:, None]) * factor_v, 1, NV, DIM_V, PAD_V)
    if NV > 2:
        store_part(out, cell, ok, (a2 - shift[:, None]) * factor_v, 2, NV, DIM_V, PAD_V)
        store_part(out, cell, ok, (a3 - shift[:, None]) * factor_v, 3, NV, DIM_V, PAD_V)


@triton.jit
def store_part(out, cell, ok, part, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr):
    d = elements(i, N, DIM, PAD)
    tl.store(out + cell[:, None] * DIM + d[None, :], part, mask=ok[:, None] & (d < DIM)[None, :])
