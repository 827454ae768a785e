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
from kvcli.kernels.gpu.tiles import add_values, bound, column, dot_keys, elements, times
from kvcli.kernels.gpu.unpacking import LIFT1, LIFT2, LIFT3

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
def tile_word(table, t, last, i: tl.constexpr, TILES: tl.constexpr, PITCH: tl.constexpr):
    """That of tile t, or of the last tile. Where a tile has two pages (TILES is 0), of number i of these, or of the
    last page."""
    if TILES == 0:
        return tl.load(table + tl.minimum(2 * t + i, last))
    else:
        return edge_word(table, tl.minimum(t, last), TILES, PITCH)


@triton.jit
def rows_of(t, TILES: tl.constexpr, BN: tl.constexpr):
    """int32 [BN]: where the rows of tile t stand in their page."""
    if TILES == 0:
        return tl.arange(0, BN) % (BN // 2)
    else:
        return (t % TILES) * BN + tl.arange(0, BN)


@triton.jit
def of_pages(a, b, N: tl.constexpr, TILES: tl.constexpr):
    """What belongs to the page of a tile; of a tile with two pages, what belongs to each, [N], half of them to one."""
    if TILES == 0:
        return tl.where(tl.arange(0, N) < N // 2, a, b)
    else:
        return a


@triton.jit
def load_scales(at, t, seen, AT: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, MASKED: tl.constexpr):
    """The float16 scales of the rows of tile t, [BN]; `at`: the address of the head's record in its page, or of each
    row."""
    p = tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16) + AT // 2 + rows_of(t, TILES, BN)  # see `plain_tile`
    if MASKED:
        return tl.load(p, mask=seen, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def scales_of(
    at, table, t, oldest, newest, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, TILES: tl.constexpr,
    BN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Those of the keys and of the values of tile t; zeros where there are none."""
    seen = seen_rows(table, t, oldest, newest, TILES, BN, MASKED)
    kd = tl.zeros((BN,), tl.float16)
    vd = kd
    if K_SCALES > 0:
        kd = load_scales(at, t, seen, K_SCALES, TILES, BN, MASKED)
    if V_SCALES > 0:
        vd = load_scales(at, t, seen, V_SCALES, TILES, BN, MASKED)
    return kd, vd


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
def centre_scores(
    qc, qb, angles, rows, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr
):  # fmt: skip
    """The scores of the mean that the keys of a tile lack, one for every CENTRE_ROWS = 16 rows: float32 [M, 16], or
    transposed (see `times`), of which BN / 16 are there; `rows` [16]: of the angles. Without RoPE they are all the
    same."""
    if ROPE == 0:
        return column(qb, LEFT)
    else:
        g = tl.arange(0, 16)
        j = tl.arange(0, ROPE_PAD)
        p = angles + rows[:, None].to(tl.int64) * ROPE + j[None, :]
        a = tl.load(p, mask=(g < BN // 16)[:, None] & (j < ROPE)[None, :], other=0.0)
        return times(qc, tl.trans(a), None, LEFT) + column(qb, LEFT)


@triton.jit
def centres_of(word, word_2, t, TILES: tl.constexpr, BN: tl.constexpr):
    """int32 [16]: rows of the angles of a tile's centres, of which the first BN / 16 are there. A page of two has half
    of these."""
    g = tl.arange(0, 16)
    if TILES == 0:
        HALF: tl.constexpr = BN // 32
        return tl.where(g < HALF, slot(word), slot(word_2) - 1) * HALF + g
    else:
        return (slot(word) * TILES + t % TILES) * (BN // 16) + g


@triton.jit
def add_centre(s, c, ROPE: tl.constexpr, BN: tl.constexpr, LEFT: tl.constexpr):
    """s [M, BN], or transposed, plus those scores. They are spread over the rows by a product with ones and zeros, in
    two halves so that nothing is lost."""
    if ROPE == 0:
        return s + c
    else:
        high = c.to(tl.float16)
        low = (c - high.to(tl.float32)).to(tl.float16)
        spread = (tl.arange(0, 16)[:, None] == (tl.arange(0, BN) // 16)[None, :]).to(tl.float16)
        if LEFT:
            return tl.dot(tl.trans(spread), low, tl.dot(tl.trans(spread), high, s))
        else:
            return tl.dot(low, spread, tl.dot(high, spread, s))


@triton.jit
def add_weights(sums, decay, w, ones, LEFT: tl.constexpr):
    """Sums of weights, [M, 8], all of whose columns are the same, times decay [M], plus those of w [M, BN]: a product
    with ones. LEFT: w is transposed, and sums [BN, M] are added up behind the loop, of which few are in a thread."""
    if LEFT:
        return sums * decay[None, :] + w.to(tl.float32)
    else:
        return tl.dot(w, ones, sums * decay[:, None])


@triton.jit
def span(
    lo, hi, pages, q, qc, qb, ok, row, position, oldest, newest, window, head, table, offset, angles, scale_k, scale_v,
    out, tops, totals, cell, softcap, noted,
    BLOCK: tl.constexpr, M: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, NOTED: tl.constexpr,
    LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Queries over the rows of tiles [lo, hi), lo < hi: writes one partial result.

    A tile is BN rows; TILES make a page. With 0 there two pages make a tile, the last of which may lack one: there are
    `pages` of them, with which the table begins. `ok`, `row`, `position`, `cell` [M]: whether there is such a query,
    where it stands in q, its position, and where its result goes. `table`: the words of pages, all of whose rows every
    query sees; with MASKED `edges` (see `Shares`) of such as not every query sees wholly: none sees rows before
    `oldest` or behind `newest`. With NOTED scores are written: those of tile t from `noted` [M, 1] + t * BN on. Tables
    are read before the kernel that was launched before has ended: none of this token writes them. LEFT: scores and sums
    are transposed (see `times`), for queries of one position.
    """
    tl.static_assert(not LEFT or BLOCK == 1, "queries at several positions stand on the left")
    tl.static_assert(LEFT or TILES > 0, "two pages make a tile of rows on the left alone")
    PITCH: tl.constexpr = EDGE if MASKED else 1
    SCALES: tl.constexpr = K_SCALES > 0 or V_SCALES > 0
    # Addresses are read three tiles ahead by hand, so that rows themselves are what the compiler reads ahead. Each is
    # put together in steps: the compiler does not pipeline loops in which values only move up.
    PAIRS: tl.constexpr = TILES == 0
    last = (pages if PAIRS else hi) - 1
    own = head.to(tl.int64) * RECORD
    word = tile_word(table, lo, last, 0, TILES, PITCH) + offset + own
    first = tile_word(table, lo + 1, last, 0, TILES, PITCH) + offset
    page = tile_word(table, lo + 2, last, 0, TILES, PITCH)
    if PAIRS:  # and of the second page of a tile
        word_2 = tile_word(table, lo, last, 1, TILES, PITCH) + offset + own
        first_2 = tile_word(table, lo + 1, last, 1, TILES, PITCH) + offset
        page_2 = tile_word(table, lo + 2, last, 1, TILES, PITCH)
    else:
        word_2 = word
        first_2 = first
        page_2 = page
    wait_for_previous(PDL)
    q0 = load_queries(q, ok, row, 0, NK, DIM_K, PAD_K)
    q1 = q0
    q2 = q0
    q3 = q0
    off = OFF_K * tl.sum(q0.to(tl.float32), 1)
    if NK > 1:
        q1 = load_queries(q, ok, row, 1, NK, DIM_K, PAD_K)
        off += (OFF_K + LIFT1 * (CODEC_K.bits == 4)) * tl.sum(q1.to(tl.float32), 1)
    if NK > 2:
        q2 = load_queries(q, ok, row, 2, NK, DIM_K, PAD_K)
        q3 = load_queries(q, ok, row, 3, NK, DIM_K, PAD_K)
        off += (OFF_K + LIFT2 * (CODEC_K.bits == 4)) * tl.sum(q2.to(tl.float32), 1)
        off += (OFF_K + LIFT3 * (CODEC_K.bits == 4)) * tl.sum(q3.to(tl.float32), 1)
    if FACTOR_K != 0:
        factor_k = tl.load(scale_k + head) * FACTOR_K
    if CENTRED:
        qb_row = tl.load(qb + row, mask=ok, other=0.0)
        qc_tile = q0
        if ROPE > 0:
            j = tl.arange(0, ROPE_PAD)
            qc_tile = tl.load(qc + row[:, None] * ROPE + j[None, :], mask=ok[:, None] & (j < ROPE)[None, :], other=0.0)
    top = tl.full((M,), NOTHING, tl.float32)
    total = tl.zeros((BN, M) if LEFT else (M, 8), tl.float32)  # see `add_weights`
    weight = total
    ones = tl.full((BN, 8), 1.0, tl.float16)
    a0 = tl.zeros((PAD_V // NV, M) if LEFT else (M, PAD_V // NV), tl.float32)
    a1 = tl.zeros((1, M) if LEFT else (M, 1), tl.float32)
    a2 = a1
    a3 = a1
    if NV > 1:
        a1 = a0
    if NV > 2:
        a2 = a0
        a3 = a0
    if SCALES:
        at = of_pages(address(word, CENTRED), address(word_2, CENTRED), BN, TILES)
        kd, vd = scales_of(at, table, lo, oldest, newest, K_SCALES, V_SCALES, TILES, BN, MASKED)
    if SCALES and LEFT:
        kd = kd.to(tl.float32)
        vd = vd.to(tl.float32)
        at = of_pages(address(first + own, CENTRED), address(first_2 + own, CENTRED), BN, TILES)
        following = tl.minimum(lo + 1, hi - 1)
        kd_next, vd_next = scales_of(at, table, following, oldest, newest, K_SCALES, V_SCALES, TILES, BN, MASKED)
    for t in tl.range(bound(lo), bound(hi), num_stages=STAGES):
        page_next = tile_word(table, t + 3, last, 0, TILES, PITCH)
        if PAIRS:
            page_2_next = tile_word(table, t + 3, last, 1, TILES, PITCH)
        rows = rows_of(t, TILES, BN)
        seen = seen_rows(table, t, oldest, newest, TILES, BN, MASKED)
        # Scales by hand too: they are too small for the compiler to do it. Two tiles ahead where there are registers;
        # there they are floats a turn before they are used, for moved up alone they would keep it from copying ahead.
        if SCALES and not LEFT:
            following = tl.minimum(t + 1, last)
            at = address(first + own, CENTRED)
            kd_next, vd_next = scales_of(at, table, following, oldest, newest, K_SCALES, V_SCALES, TILES, BN, MASKED)
        if SCALES and LEFT:
            at = of_pages(address(page + offset + own, CENTRED), address(page_2 + offset + own, CENTRED), BN, TILES)
            following = tl.minimum(t + 2, hi - 1)
            kd_later, vd_later = scales_of(at, table, following, oldest, newest, K_SCALES, V_SCALES, TILES, BN, MASKED)
        at = of_pages(address(word, CENTRED), address(word_2, CENTRED), BN, TILES)
        if CENTRED:  # while products with keys are on
            groups = centres_of(word, word_2, t, TILES, BN)
            c = centre_scores(qc_tile, qb_row, angles, groups, ROPE, ROPE_PAD, BN, LEFT)
        keys = column(at, False) if PAIRS else at
        values = column(at, LEFT) if PAIRS else at
        s = dot_keys(q0, q1, q2, q3, keys, rows, seen, K_ROW, DIM_K, PAD_K, CODEC_K, NK, MASKED, LEFT)
        if OFF_K != 0:
            s = s - column(off, LEFT)
        if K_SCALES > 0:
            s = s * column(kd.to(tl.float32), not LEFT)
        if FACTOR_K != 0:
            s = s * factor_k
        if CENTRED:
            s = add_centre(s, c, ROPE, BN, LEFT)
        if CAPPED:  # softcap * tanh(s / softcap)
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        if MASKED:
            visible = column(seen, not LEFT)
            if BLOCK > 1:
                place = positions_of(table, t, TILES, BN)
                asks = (position >= edge_bound(table, t, 4, TILES)) & (position < edge_bound(table, t, 5, TILES))
                visible = visible & asks[:, None] & (place[None, :] <= position[:, None])
                if WINDOWED:
                    visible = visible & (place[None, :] > position[:, None] - window)
            s = tl.where(visible, s, float("-inf"))
        asked = ok[:, None]
        if PAIRS:
            there = tl.arange(0, BN) < (pages - 2 * t) * (BN // 2)
            s = tl.where(column(there, not LEFT), s, float("-inf"))
            asked = asked & there[None, :]
        if NOTED:
            tl.store(noted + (t * BN + tl.arange(0, BN))[None, :], tl.trans(s) if LEFT else s, mask=asked)
        higher = tl.maximum(top, tl.max(s, 0 if LEFT else 1))
        decay = tl.exp2(top - higher)
        p = tl.exp2(s - column(higher, LEFT))
        top = higher
        w = p.to(tl.float16)
        total = add_weights(total, decay, w, ones, LEFT)
        if V_SCALES > 0:
            w = (p * column(vd.to(tl.float32), not LEFT)).to(tl.float16)
        if OFF_V != 0:
            weight = add_weights(weight, decay, w, ones, LEFT)
        a0, a1, a2, a3 = add_values(
            w, decay, a0, a1, a2, a3, values, rows, seen, V_ROW, DIM_V, PAD_V, CODEC_V, NV, MASKED, V_OFFSET, LEFT
        )
        if SCALES and LEFT:
            kd = kd_next.to(tl.float32)
            vd = vd_next.to(tl.float32)
            kd_next = kd_later
            vd_next = vd_later
        if SCALES and not LEFT:
            kd = kd_next
            vd = vd_next
        word = first + own
        first = page + offset
        page = page_next
        if PAIRS:
            word_2 = first_2 + own
            first_2 = page_2 + offset
            page_2 = page_2_next
    weight = column(tl.sum(weight, 0) if LEFT else tl.max(weight, 1), LEFT)
    factor_v = 1.0
    if FACTOR_V != 0:
        factor_v = tl.load(scale_v + head) * FACTOR_V
    tl.store(tops + cell, top, mask=ok)
    tl.store(totals + cell, tl.sum(total, 0) if LEFT else tl.max(total, 1), mask=ok)
    store_part(out, cell, ok, (a0 - OFF_V * weight) * factor_v, 0, NV, DIM_V, PAD_V, LEFT)
    LIFTED: tl.constexpr = CODEC_V.bits == 4
    if NV > 1:
        store_part(out, cell, ok, (a1 - (OFF_V + LIFT1 * LIFTED) * weight) * factor_v, 1, NV, DIM_V, PAD_V, LEFT)
    if NV > 2:
        store_part(out, cell, ok, (a2 - (OFF_V + LIFT2 * LIFTED) * weight) * factor_v, 2, NV, DIM_V, PAD_V, LEFT)
        store_part(out, cell, ok, (a3 - (OFF_V + LIFT3 * LIFTED) * weight) * factor_v, 3, NV, DIM_V, PAD_V, LEFT)


@triton.jit
def store_part(
    out, cell, ok, part, i: tl.constexpr, N: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
    LEFT: tl.constexpr = False,
):  # fmt: skip
    """Part i of N of the queries' results, float32 [M, PAD / N], or transposed: see `times`."""
    d = elements(i, N, DIM, PAD)
    if LEFT:
        tl.store(out + cell[None, :] * DIM + d[:, None], part, mask=ok[None, :] & (d < DIM)[:, None])
    else:
        tl.store(out + cell[:, None] * DIM + d[None, :], part, mask=ok[:, None] & (d < DIM)[None, :])
