"""The inner loop of attention: a block of queries over a run of tiles of cached rows, by a running softmax in base 2.

Scales of rows act on scores and on probabilities, never on single elements. Codes that are not centred when they are
unpacked (those of fewer than 8 bits) are made so in the sums: sum of w * (u - c) = sum of w * u - c * (sum of w).
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcli.kernels.gpu.language import wait_for_previous
from kvcli.kernels.gpu.places import slot
from kvcli.kernels.gpu.tiles import add_values, bound, dot_keys, elements

NOTHING = tl.constexpr(-1.0e30)  # the maximum where nothing is seen; finite, so that differences are numbers


@triton.jit
def _load_queries(q, ok, row, PITCH: tl.constexpr, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr,
                  PAD: tl.constexpr):  # fmt: skip
    """Part i of N of the queries, float16 [M, PAD / N]; 0 where a row is not `ok` or an element is not there."""
    d = elements(i, N, DIM, PAD)
    return tl.load(q + row[:, None] * PITCH + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit
def _page(table, t, origin, front, wrap, TILES: tl.constexpr, RING: tl.constexpr):
    """int64: the address of the page of tile t."""
    return tl.load(table + slot(t // TILES, origin, front, wrap, RING))


@triton.jit
def _scales(record, t, seen, AT: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """The float16 scales of the rows of tile t, [BN]; `record`: the address of the head's record in its page."""
    at = (record + AT).to(tl.pointer_type(tl.float16))
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
    lo, hi, q, qc, qb, ok, row, position, since, keep, oldest, newest, head, table, origin, front, wrap, offset, angles,
    scale_k, scale_v, out, tops, totals, cell, softcap,
    M: tl.constexpr, Q_PITCH: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    EVICTS: tl.constexpr, RING: tl.constexpr, MASKED: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries over the rows of tiles [lo, hi), lo < hi: writes one partial result.

    A tile is BN rows; TILES make a page. `ok`, `row`, `position`, `cell` [M]: whether there is such a query, where it
    stands in q, its position, and where its result goes. With MASKED not every query sees every row: none those behind
    it, with WINDOWED or EVICTS none before `since` [M], but with EVICTS the first `keep`. Page tables are read before
    the kernel that was launched before has ended: none of this token writes them.
    """
    SCALES: tl.constexpr = K_SCALES > 0 or V_SCALES > 0
    # Addresses are read three tiles ahead by hand, so that rows themselves are what the compiler reads ahead. Each is
    # put together in steps: the compiler does not pipeline loops in which values only move up.
    last = hi - 1
    own = head.to(tl.int64) * RECORD
    at = _page(table, lo, origin, front, wrap, TILES, RING) + offset + own
    first = _page(table, tl.minimum(lo + 1, last), origin, front, wrap, TILES, RING) + offset
    page = _page(table, tl.minimum(lo + 2, last), origin, front, wrap, TILES, RING)
    wait_for_previous(PDL)
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
        kd = _scales(at, lo, seen, K_SCALES, TILES, BN, MASKED)
    if V_SCALES > 0:
        vd = _scales(at, lo, seen, V_SCALES, TILES, BN, MASKED)
    for t in tl.range(bound(lo), bound(hi), num_stages=STAGES):
        page_next = _page(table, tl.minimum(t + 3, last), origin, front, wrap, TILES, RING)
        rows = (t % TILES) * BN + tl.arange(0, BN)
        seen = _seen(t, oldest, newest, BN)
        if SCALES:  # by hand too: they are too small for the compiler to do it
            following = tl.minimum(t + 1, last)
            seen_next = _seen(following, oldest, newest, BN)
            kd_next = kd
            vd_next = vd
            if K_SCALES > 0:
                kd_next = _scales(first + own, following, seen_next, K_SCALES, TILES, BN, MASKED)
            if V_SCALES > 0:
                vd_next = _scales(first + own, following, seen_next, V_SCALES, TILES, BN, MASKED)
        s = dot_keys(q0, q1, q2, q3, at, rows, seen, K_ROW, DIM_K, PAD_K, CODEC_K, NK, MASKED)
        if OFF_K != 0:
            s = s - off[:, None]
        if K_SCALES > 0:
            s = s * kd.to(tl.float32)[None, :]
        if FACTOR_K != 0:
            s = s * factor_k
        if CENTRED:
            there = slot(t // TILES, origin, front, wrap, RING) * TILES + t % TILES
            s = _centre_scores(s, qc_tile, qb_row, angles, there, ROPE, ROPE_PAD, BN)
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        if MASKED:
            place = t * BN + tl.arange(0, BN)
            visible = place[None, :] <= position[:, None]
            if EVICTS:
                visible = visible & ((place < keep)[None, :] | (place[None, :] >= since[:, None]))
            elif WINDOWED:
                visible = visible & (place[None, :] >= since[:, None])
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
        at = first + own
        first = page + offset
        page = page_next
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
