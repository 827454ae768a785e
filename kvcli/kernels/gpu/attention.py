"""Attention over pages, split over the sequence: `attend` makes partial results, `combine` (combine.py) merges them.

A program has one KV head, the queries of a block of positions within one page, for all heads of the group, and a part
of what they see: an equal share of the sealed (or only) pages before their own, or their own page, or the sinks. The
last two have programs of their own: those pages are in another format, or not full. How the pages are shared out
follows from the position, which is read on the device, and from the number of shares: a CUDA graph replays while the
context grows.

Where old rows are evicted, the pages of the first `keep` rows are scored with the second queries (see `Queries`), which
are the first ones as long as nothing is gone. Such a page may be seen in part: it has a program of its own, so that
shares are of pages that are seen whole.

Scores and the running softmax are in base 2; `prepare` (rows.py) has scaled the queries for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.codecs import Codec
from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.places import oldest_row
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.span import NOTHING, span
from kvcli.kernels.gpu.tiles import head_factor, launch_options, left_centre, tile_parts

LOG2_E = 1.4426950408889634


@triton.jit
def _share(share, splits, lo_page, hi_page, kept_lo, kept_hi, TILES: tl.constexpr, KEEPS: tl.constexpr):
    """Tiles [lo, hi) of one of `splits` shares of pages [lo_page, hi_page), of which there may be none. With KEEPS the
    first ones are of pages [kept_lo, kept_hi); and whether this is one of those."""
    n = tl.maximum(hi_page - lo_page, 0)
    kept = share < 0
    if KEEPS:
        n_kept = tl.maximum(kept_hi - kept_lo, 0)
        of_kept = tl.cdiv(splits * n_kept, tl.maximum(n_kept + n, 1))
        of_kept = tl.minimum(of_kept, splits - (n > 0).to(tl.int32))
        kept = share < of_kept
        n = tl.where(kept, n_kept, n)
        lo_page = tl.where(kept, kept_lo, lo_page)
        splits = tl.where(kept, of_kept, splits - of_kept)
        share = tl.where(kept, share, share - of_kept)
    n *= TILES
    each = tl.cdiv(n, splits)
    return lo_page * TILES + share * each, lo_page * TILES + tl.minimum(share * each + each, n), kept


@triton.jit(
    do_not_specialize=[
        "rows_end", "splits", "origin", "front", "wrap", "keep", "retained", "offset", "open_offset", "window",
    ]
)  # fmt: skip
def _attend(
    q, qc, qb, position, table, open_table, angles, scale_k, scale_v, out, tops, totals,
    rows_end, splits, origin, front, wrap, keep, retained, offset, open_offset, window, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr,
    CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    OPEN_K: tl.constexpr, OPEN_V: tl.constexpr, OPEN_NK: tl.constexpr, OPEN_NV: tl.constexpr,
    OPEN_RECORD: tl.constexpr, OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, SINKS: tl.constexpr, OWN_OPEN: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OPEN_BN: tl.constexpr,
    OPEN_STAGES: tl.constexpr, RING: tl.constexpr, EVICTS: tl.constexpr, KEEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    parts = tl.num_programs(1)
    share = parts - 1 - tl.program_id(1)  # open pages first: those take longest
    start = tl.load(position).to(tl.int32)  # no kernel of this token writes it
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
    asks = row  # where the query stands in q
    some = first <= newest
    since = at
    oldest = 0
    if WINDOWED:
        oldest = tl.maximum(first - window + 1, 0)
        since = at - window + 1
    own = first // SIZE
    visible = oldest // SIZE  # pages
    if EVICTS:
        since = oldest_row(at, keep, retained, SIZE)
        visible = tl.maximum(oldest_row(first, keep, retained, SIZE) // SIZE, tl.cdiv(keep, SIZE))
    TILES: tl.constexpr = SIZE // BN
    OPEN_TILES: tl.constexpr = SIZE // OPEN_BN
    OPEN_BELOW: tl.constexpr = 0x7FFFFFFF if OWN_OPEN else SINKS
    hi_page = own
    if not OWN_OPEN:
        hi_page = own + 1
    lo = 0
    hi = 0
    if (share < splits) & some:
        lo, hi, kept = _share(
            share, splits, tl.maximum(visible, SINKS), hi_page, SINKS, tl.minimum(keep // SIZE, hi_page), TILES, KEEPS
        )
        if KEEPS:
            asks = row + tl.where(kept, rows_end * HEADS, 0)
    open_lo = 0
    open_hi = 0
    if (share == splits) & some & (own < OPEN_BELOW):  # the queries' own page
        open_lo = own * OPEN_TILES
        open_hi = newest // OPEN_BN + 1
    if (share == splits + 1) & some & (SINKS > 0):  # the sinks before it
        open_lo = visible * OPEN_TILES
        open_hi = tl.minimum(own, SINKS) * OPEN_TILES
    edge_lo = 0
    edge_hi = 0
    SEALED: tl.constexpr = OPEN_K != CODEC_K or OPEN_V != CODEC_V
    if KEEPS:
        edge = keep // SIZE
        if (share == splits + 2) & some & (SINKS > 0):  # those of them that are kept
            open_hi = tl.minimum(tl.minimum(own, SINKS), tl.cdiv(keep, SIZE)) * OPEN_TILES
            asks = row + rows_end * HEADS
        if (share == parts - 1) & some & (keep % SIZE > 0) & (edge >= SINKS) & (edge < hi_page):
            asks = row + rows_end * HEADS
            if SEALED:
                edge_lo = edge * OPEN_TILES
                edge_hi = edge_lo + OPEN_TILES
            else:
                open_lo = edge * OPEN_TILES
                open_hi = open_lo + OPEN_TILES
    if lo < hi:
        span(
            lo, hi, q, qc, qb, ok, asks, at, since, keep, oldest, newest, head, table, origin, front, wrap, offset,
            angles, scale_k, scale_v, out, tops, totals, cell, softcap, M, DIM_K, DIM_K, PAD_K, DIM_V, PAD_V, CODEC_K,
            CODEC_V, NK, NV, RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OFF_K, OFF_V, FACTOR_K, FACTOR_V,
            CENTRED, ROPE, ROPE_PAD, WINDOWED, CAPPED, EVICTS, RING,
            WINDOWED or not OWN_OPEN or (EVICTS and BLOCK > 1), TILES, BN, STAGES, PDL,
        )  # fmt: skip
    elif open_lo < open_hi:
        span(
            open_lo, open_hi, q, qc, qb, ok, asks, at, since, keep, oldest, newest, head, open_table, origin, front,
            wrap, open_offset, angles, scale_k, scale_v, out, tops, totals, cell, softcap, M, DIM_K, DIM_K, PAD_K,
            DIM_V, PAD_V, OPEN_K, OPEN_V, OPEN_NK, OPEN_NV, OPEN_RECORD, OPEN_K_ROW, OPEN_V_ROW, OPEN_V_OFFSET, 0, 0,
            0.0, 0.0, 0.0, 0.0, False, ROPE, ROPE_PAD, WINDOWED, CAPPED, EVICTS, RING, True, OPEN_TILES, OPEN_BN,
            OPEN_STAGES, PDL,
        )  # fmt: skip
    elif edge_lo >= edge_hi:
        wait_for_previous(PDL)
        tl.store(tops + cell, tl.full((M,), NOTHING, tl.float32), mask=ok)
        tl.store(totals + cell, tl.zeros((M,), tl.float32), mask=ok)
    elif KEEPS and SEALED:
        span(
            edge_lo, edge_hi, q, qc, qb, ok, asks, at, since, keep, oldest, newest, head, table, origin, front, wrap,
            offset, angles, scale_k, scale_v, out, tops, totals, cell, softcap, M, DIM_K, DIM_K, PAD_K, DIM_V, PAD_V,
            CODEC_K, CODEC_V, NK, NV, RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OFF_K, OFF_V, FACTOR_K,
            FACTOR_V, CENTRED, ROPE, ROPE_PAD, WINDOWED, CAPPED, EVICTS, RING, True, OPEN_TILES, OPEN_BN, OPEN_STAGES,
            PDL,
        )  # fmt: skip


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


def share_count(pages: DevicePages, splits: int) -> int:
    """`splits`, or what is needed of them: kept rows and others have other queries, and so other shares."""
    return max(splits, 1 + pages.keeps)


def other_parts(pages: DevicePages) -> int:
    """Partial results of a query beside those of the shares: its own page, and the sinks; of the sinks that are kept,
    and of the page of which only some rows are, apart."""
    sinks = pages.open is not None and pages.sinks > 0
    return 1 + sinks * (1 + pages.keeps) + pages.keeps


def part_count(pages: DevicePages, splits: int) -> int:
    """Partial results of a query: `splits` shares of the pages before its own, and the other parts."""
    return share_count(pages, splits) + other_parts(pages)


@dataclass(frozen=True)
class Tiling:
    """Rows of a tile, warps and pipeline stages (one more than tiles on their way at once) for the sealed (or only)
    pages; rows and stages for the open ones."""

    rows: int
    warps: int
    stages: int
    open_rows: int = 32
    open_stages: int = 2


def tiling(codec_k: Codec, codec_v: Codec, dim: int, decode: bool) -> Tiling:
    """By the wider of the two codecs; `dim` is the padded head dim.

    int4, int8 and f16 up to 128 are as measured on an H100, the others such that few registers spill. Programs that
    together want more than 196 KB of shared memory of a multiprocessor cost 3 us a layer: it is then divided anew
    between this kernel and the next, which waits for that.
    """
    both = (codec_k, codec_v)
    parts, large, wide = min(tile_parts(c) for c in both), dim > 128, any(c.bits == 32 for c in both)
    above = any(4 < c.bits < 8 for c in both)  # a second plane of bits
    if not decode:
        return Tiling(32, 4, 2) if large or wide else Tiling(64, 4, 2)
    if parts == 4:
        if large:
            return Tiling(32, 4 if above else 2, 2, 16)
        return Tiling(64, 2, 2 if above else 4, 32, 3)
    if parts == 2:
        return Tiling(32, 2, 2, 16) if large else Tiling(64, 2, 2, 32, 3)
    if wide:
        return Tiling(16 if large else 32, 4, 2, 16)
    return Tiling(32, 4, 2, 16) if large else Tiling(64, 4 if any(c.mantissa == 7 for c in both) else 2, 2)


def attend(
    queries: Queries,
    pages: DevicePages,
    position: torch.Tensor,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 1,
    out: Partials | None = None,
    pdl: int = SERIAL,
    tiles: Tiling | None = None,
) -> Partials:
    """Causal attention of T queries, the first at `position` (int64 [1] on the device), over pages: partial results.

    A query at position p sees rows (p - window, p], all of [0, p] when window is 0, or what `PagedKV.oldest` says.
    `softcap`: see `kernels.attention`. `splits`: shares that the pages before the queries' own are cut into (see
    `share_count`).
    """
    r, rows, heads = pages.record, queries.q.shape[0] // (1 + pages.keeps), queries.q.shape[1]
    opened = pages.where_rows_go
    o, group = opened.record, heads // r.kv_heads
    if out is None:
        out = Partials.empty(rows, heads, pages, splits)
    pad_k, pad_v = padded(r.dim_k), padded(r.dim_v)
    # Queries of a program, of all heads. With 64 the products go by warp groups, whose numbers are wrong (Triton 3.6)
    # where keys come in two parts and values in four.
    few = max(pad_k, pad_v) > 128 or tile_parts(r.codec_k) != tile_parts(r.codec_v)
    least = 16 if rows == 1 else 32 if few else 64
    m = max(least, triton.next_power_of_2(group))
    block = 1 if rows == 1 else min(r.page_size, 1 << ((m // group).bit_length() - 1))
    blocks = 1 if rows == 1 else (rows - 1) // block + 2
    if tiles is None:
        tiles = tiling(r.codec_k, r.codec_v, max(pad_k, pad_v), rows == 1)
    centred = pages.centre is not None
    rope = 0 if pages.angles is None else pages.angles.shape[1]
    some = queries.q  # stands for what is not there
    launch(_attend, (r.kv_heads, out.tops.shape[2], blocks))(
        queries.q, queries.qc, queries.qb, position, pages.table, opened.table,
        some if pages.angles is None else pages.angles, some if pages.scale_k is None else pages.scale_k,
        some if pages.scale_v is None else pages.scale_v, out.out, out.tops, out.totals,
        rows, share_count(pages, splits), *pages.places, pages.keep, pages.retained, pages.offset, opened.offset,
        window, softcap * LOG2_E,
        heads, group, block, m, r.page_size, r.dim_k, pad_k, r.dim_v, pad_v,
        r.codec_k.numbers, r.codec_v.numbers, tile_parts(r.codec_k), tile_parts(r.codec_v), r.record_bytes,
        r.k_row_bytes, r.v_row_bytes, r.v_offset, r.k_scales, r.v_scales, left_centre(r.codec_k),
        left_centre(r.codec_v), head_factor(r.codec_k), head_factor(r.codec_v),
        o.codec_k.numbers, o.codec_v.numbers, tile_parts(o.codec_k), tile_parts(o.codec_v), o.record_bytes,
        o.k_row_bytes, o.v_row_bytes, o.v_offset, centred, rope, max(16, triton.next_power_of_2(rope)),
        pages.sinks if pages.open else 0, pages.open is None or pages.tail > 0, window > 0, softcap > 0,
        min(tiles.rows, r.page_size), tiles.stages, min(tiles.open_rows, r.page_size), tiles.open_stages,
        pages.ring > 0, pages.evicts, pages.keeps, pdl,
        **launch_options(pdl, tiles.warps),
    )  # fmt: skip
    return out
