"""Attention over pages, split over the sequence: `attend` makes partial results, `combine` (combine.py) merges them.

A program has one KV head, the queries of a block of positions within one page, for all heads of the group, and a part
of what they see: entries that all of them see wholly, or others, whose rows are masked, or open ones, which are in
another format. Which these are was worked out on the host (shares.py): kernels know no policy. A CUDA graph replays
while the context grows: where its programs read what they read stays in its place.

Scores and the running softmax are in base 2; `prepare` (rows.py) has scaled the queries for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.codecs import Codec, RecordLayout
from kvcli.kernels.gpu import shares
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.span import EDGE, NOTHING, span
from kvcli.kernels.gpu.tiles import head_factor, launch_options, left_centre, tile_parts

WHOLE, EDGES, OPEN = (tl.constexpr(x) for x in (shares.WHOLE, shares.EDGES, shares.OPEN))
LOG2_E = 1.4426950408889634
SEALED_BYTES = 43 << 10  # of shared memory that a program over sealed pages may take
MOST_LEFT = 16  # queries of a key-value head on the right: sums of more would not stay in registers
FIVE = 200  # registers of a thread, for five programs of two warps on a multiprocessor


@triton.jit
def tile_end(edges, hi, newest, TILES: tl.constexpr, BN: tl.constexpr):
    """The tile behind the last one, of edges up to `hi`, that a query at `newest` sees rows of."""
    last = edges + (hi - 1) * EDGE
    rows = tl.minimum(tl.load(last + 3), newest + 1 - tl.load(last + 1)).to(tl.int32)
    return (hi - 1) * TILES + tl.maximum(tl.minimum(tl.cdiv(rows, BN), TILES), 1)


@triton.jit
def cells_of(t, head, parts, starts, HEADS: tl.constexpr, APART: tl.constexpr):
    """Where the partial results of a head of row t begin among those of all, and how many they are; APART: see
    `Partials`."""
    if APART:
        first = tl.load(starts + t)
        return (head * parts + first).to(tl.int64), tl.load(starts + t + 1) - first
    else:
        return (t * HEADS + head) * parts, parts


@triton.jit(do_not_specialize=["rows_end", "offset", "open_offset", "window", "room", "noted_room", "noted_edges"])
def _attend(
    q, qc, qb, position, work, table, chosen, edges, angles, scale_k, scale_v, out, tops, totals, noted,
    rows_end, offset, open_offset, window, softcap, room, noted_room, noted_edges,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr, PAD_V: tl.constexpr,
    CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, NK: tl.constexpr, NV: tl.constexpr,
    RECORD: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr, OFF_K: tl.constexpr, OFF_V: tl.constexpr, FACTOR_K: tl.constexpr, FACTOR_V: tl.constexpr,
    OPEN_K: tl.constexpr, OPEN_V: tl.constexpr, OPEN_NK: tl.constexpr, OPEN_NV: tl.constexpr,
    OPEN_RECORD: tl.constexpr, OPEN_K_ROW: tl.constexpr, OPEN_V_ROW: tl.constexpr, OPEN_V_OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, EDGED: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OPEN_BN: tl.constexpr, OPEN_STAGES: tl.constexpr,
    CHOSEN: tl.constexpr, NOTED: tl.constexpr, APART: tl.constexpr, LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    parts = tl.num_programs(1)
    share = tl.program_id(1)
    ITEM: tl.constexpr = 6 if APART else 4
    item = work + (tl.program_id(2) * parts + share) * ITEM
    kind = tl.load(item)
    turned = tl.load(item + 1)
    lo = tl.load(item + 2)
    hi = tl.load(item + 3)
    r = tl.arange(0, M)
    if APART:
        own = tl.load(item + 4)
        first = tl.load(position + own).to(tl.int32)
        newest = first
        at = first + r * 0
        ok = r < tl.where(kind == 0, 0, GROUP)
        row = own.to(tl.int64) * HEADS + head * GROUP + r % GROUP
        cell = (head * GROUP + r % GROUP).to(tl.int64) * parts + tl.load(item + 5)
        scale_k += own * tl.num_programs(0)
        scale_v += own * tl.num_programs(0)
    else:
        start = tl.load(position).to(tl.int32)  # no kernel of this token writes it
        end = start + rows_end
        base = (start // BLOCK + tl.program_id(2)) * BLOCK
        at = base + r // GROUP  # positions
        ok = (r < BLOCK * GROUP) & (at >= start) & (at < end)
        first = tl.maximum(base, start)
        newest = tl.minimum(base + BLOCK, end) - 1
        at = tl.minimum(tl.maximum(at, first), newest)
        row = (at - start).to(tl.int64) * HEADS + head * GROUP + r % GROUP
        cell = row * parts + share
    asks = row + turned * rows_end * HEADS  # where the query stands in q
    oldest = 0
    if WINDOWED:
        oldest = first - window + 1
    TILES: tl.constexpr = SIZE // BN  # 0 where a tile has two pages
    OPEN_TILES: tl.constexpr = SIZE // OPEN_BN
    noted_at = noted + row[:, None] * noted_room
    if kind != WHOLE:
        noted_at += noted_edges
    if kind == WHOLE:
        if CHOSEN:
            wait_for_previous(PDL)  # the kernel before has written what is chosen, a row of `room` words of each head
            if turned == 0:
                table = chosen + head.to(tl.int64) * room
        begin = lo * TILES
        stop = hi * TILES
        if TILES == 0:
            stop = tl.cdiv(hi - lo, 2)
            table += lo
            noted_at += lo * SIZE
        span(
            begin, stop, hi - lo, q, qc, qb, ok, asks, at, oldest, newest, window, head, table, offset, angles,
            scale_k, scale_v, out, tops, totals, cell, softcap, noted_at, BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V,
            CODEC_K, CODEC_V, NK, NV, RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OFF_K, OFF_V, FACTOR_K,
            FACTOR_V, CENTRED, ROPE, ROPE_PAD, WINDOWED, CAPPED, False, TILES, BN, STAGES, NOTED, LEFT, PDL,
        )  # fmt: skip
    elif kind == OPEN:
        stop = tile_end(edges, hi, newest, OPEN_TILES, OPEN_BN)
        span(
            lo * OPEN_TILES, stop, 0, q, qc, qb, ok, asks, at, oldest, newest, window, head, edges, open_offset, angles,
            scale_k, scale_v, out, tops, totals, cell, softcap, noted_at, BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V,
            OPEN_K, OPEN_V, OPEN_NK, OPEN_NV, OPEN_RECORD, OPEN_K_ROW, OPEN_V_ROW, OPEN_V_OFFSET, 0, 0, 0.0, 0.0, 0.0,
            0.0, False, ROPE, ROPE_PAD, WINDOWED, CAPPED, True, OPEN_TILES, OPEN_BN, OPEN_STAGES, NOTED, LEFT, PDL,
        )  # fmt: skip
    elif kind != EDGES:
        wait_for_previous(PDL)
        tl.store(tops + cell, tl.full((M,), NOTHING, tl.float32), mask=ok)
        tl.store(totals + cell, tl.zeros((M,), tl.float32), mask=ok)
    elif EDGED:
        stop = tile_end(edges, hi, newest, OPEN_TILES, OPEN_BN)
        span(
            lo * OPEN_TILES, stop, 0, q, qc, qb, ok, asks, at, oldest, newest, window, head, edges, offset, angles,
            scale_k, scale_v, out, tops, totals, cell, softcap, noted_at, BLOCK, M, DIM_K, PAD_K, DIM_V, PAD_V,
            CODEC_K, CODEC_V, NK, NV, RECORD, K_ROW, V_ROW, V_OFFSET, K_SCALES, V_SCALES, OFF_K, OFF_V, FACTOR_K,
            FACTOR_V, CENTRED, ROPE, ROPE_PAD, WINDOWED, CAPPED, True, OPEN_TILES, OPEN_BN, OPEN_STAGES, NOTED, LEFT,
            PDL,
        )  # fmt: skip


@dataclass(frozen=True)
class Partials:
    """Results over parts of the rows: float32 `out` [T, heads, parts, dim_v] (undefined where nothing was seen), and
    `tops`, `totals` [T, heads, parts]: the largest score and the sum of 2 ** (score - largest). Where rows are `apart`
    (`PageLists`) they are of the items of work: [1, heads, items, ...]."""

    out: torch.Tensor
    tops: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, pages: DevicePages, parts: int) -> Partials:
        """Buffers for `rows` queries, on the pages' device."""
        device = pages.lists.table.device
        return cls(
            torch.empty(rows, heads, parts, pages.record.dim_v, device=device),
            torch.empty(rows, heads, parts, device=device),
            torch.empty(rows, heads, parts, device=device),
        )

    @classmethod
    def of(cls, pages: DevicePages, rows: int, heads: int, parts: int = 0) -> Partials:
        """Buffers for what the lists of `pages` say; `parts` of each row, where rows are not apart, 0 = all that are
        listed."""
        work = pages.lists.work
        if pages.lists.apart:
            return cls.empty(1, heads, pages, len(work))
        return cls.empty(rows, heads, pages, parts or work.shape[1])


def part_count(splits: int, sealed: bool, turns: bool) -> int:
    """Partial results of a decoded query: `splits` shares of what is seen wholly, and the other parts: of pages that
    are not, and where pages are sealed of open ones; as many again where entries are turned."""
    return max(splits, 1 + turns) + (1 + sealed) * (1 + turns)


def programs(chip: Chip, sealed: bool) -> int:
    """Programs that decoding one query is worth, of all heads: two on each multiprocessor, and of sealed pages, which
    take less shared memory, as many as there is room for up to four, as measured on an H100."""
    each = min(4, max(2, chip.shared_bytes // SEALED_BYTES)) if sealed else 2
    return each * chip.multiprocessors


@dataclass(frozen=True)
class Tiling:
    """Rows of a tile, warps and pipeline stages (one more than tiles on their way at once) for the sealed (or only)
    pages, of which a tile may have two where it is `left`; rows and stages for the open ones; registers of a thread,
    0 = as many as the compiler takes. `left`: cached rows are the left side of products (see `tiles.times`), which want
    no more than two warps: four would have them by warp groups."""

    rows: int
    warps: int
    stages: int
    open_rows: int = 32
    open_stages: int = 2
    registers: int = 0
    left: bool = False


def tiling(codec_k: Codec, codec_v: Codec, dim: int, decode: bool) -> Tiling:
    """By the wider of the two codecs; `dim` is the padded head dim.

    int4, int8, fp8 and f16 up to 128 are as measured, the others such that few registers spill. Programs that
    together want more than 196 KB of shared memory of a multiprocessor cost 3 us a layer: it is then divided anew
    between this kernel and the next, which waits for that.
    """
    both = (codec_k, codec_v)
    parts, large, wide = min(tile_parts(c) for c in both), dim > 128, any(c.bits == 32 for c in both)
    above = any(4 < c.bits < 8 for c in both)  # a second plane of bits
    if dim > 256:
        return Tiling(16, 8 if wide or not decode else 4, 2, 16)
    if not decode:
        return Tiling(32, 4, 2) if large or wide else Tiling(64, 4, 2)
    if parts == 4:
        if large:
            return Tiling(32, 4 if above else 2, 2, 16)
        return Tiling(64, 2, 2, 32, 3, FIVE, left=True) if above else Tiling(128, 2, 2, left=True)
    if parts == 2:
        if large:
            return Tiling(32, 2, 2, 16)
        floats = any(c.mantissa for c in both)
        return Tiling(64, 2, 2, 32, 3, FIVE, left=True) if floats else Tiling(128, 2, 2, left=True)
    if wide:
        return Tiling(16 if large else 32, 4, 2, 16)
    return Tiling(32, 4, 2, 16) if large else Tiling(64, 4 if any(c.mantissa == 7 for c in both) else 2, 2)


def block_rows(record: RecordLayout, heads: int, rows: int, chip: Chip) -> tuple[int, int]:
    """How many positions make a block of a step of `rows`, and how many queries a program has, of all heads, but
    where `Tiling.left`.

    With 64 the products go by warp groups, whose numbers are wrong (Triton 3.6) where keys come in two parts and values
    in four; and where they go by tensor memory (sm_100), some do not compile (Triton 3.9).
    """
    group, pad = heads // record.kv_heads, max(padded(record.dim_k), padded(record.dim_v))
    few = pad > 128 or tile_parts(record.codec_k) != tile_parts(record.codec_v) or chip.capability[0] == 10
    m = max(16 if rows == 1 or pad > 256 else 32 if few else 64, triton.next_power_of_2(group))
    return 1 if rows == 1 else min(record.page_size, 1 << ((m // group).bit_length() - 1)), m


def attend(
    queries: Queries,
    pages: DevicePages,
    window: int = 0,
    softcap: float = 0.0,
    out: Partials | None = None,
    pdl: int = SERIAL,
    tiles: Tiling | None = None,
) -> Partials:
    """Causal attention of the T queries of a step over pages: partial results.

    `window`, `softcap`: see `kernels.attention`; the lists of `pages` were made for that window. Where a token
    chooses what it reads, picking.py has chosen before; where its probabilities are noted, its scores are left in
    `Noted.scores`.
    """
    r, lists, heads = pages.record, pages.lists, queries.q.shape[1]
    rows = len(lists.shift)
    opened = pages.open or pages
    o, group = opened.record, heads // r.kv_heads
    if out is None:
        out = Partials.of(pages, rows, heads)
    pad_k, pad_v = padded(r.dim_k), padded(r.dim_v)
    alone = rows == 1 or lists.apart
    block, m = block_rows(r, heads, 1 if alone else rows, Chip.of(queries.q.device))
    if tiles is None:
        tiles = tiling(r.codec_k, r.codec_v, max(pad_k, pad_v), alone)
    left = alone and tiles.left and group <= MOST_LEFT
    if left:
        m = max(8, triton.next_power_of_2(group))
    pairs = left and m == 8  # wider sums of two pages would not stay in registers
    rows_of_tile = tiles.rows if pairs else min(tiles.rows, 64)
    rope = 0 if pages.angles is None else pages.angles.shape[1]
    some, noted = queries.q, lists.noted if rows == 1 else None  # `some` stands for what is not there
    chosen = lists.selection.chosen if lists.selection is not None and pages.chooses else lists.table[None]
    launch(_attend, (r.kv_heads, out.tops.shape[2], 1 if lists.apart else len(lists.work)))(
        queries.q, queries.qc, queries.qb, lists.position, lists.work, lists.table, chosen, lists.edges,
        some if pages.angles is None else pages.angles, some if pages.scale_k is None else pages.scale_k,
        some if pages.scale_v is None else pages.scale_v, out.out, out.tops, out.totals,
        out.tops if noted is None else noted.scores,
        rows, pages.offset, opened.offset, window, softcap * LOG2_E, chosen.shape[1],
        0 if noted is None else noted.scores.shape[1], 0 if noted is None else noted.edges_from,
        heads, group, block, m, r.page_size, r.dim_k, pad_k, r.dim_v, pad_v,
        r.codec_k.numbers, r.codec_v.numbers, tile_parts(r.codec_k), tile_parts(r.codec_v), r.record_bytes,
        r.k_row_bytes, r.v_row_bytes, r.v_offset, r.k_scales, r.v_scales, left_centre(r.codec_k),
        left_centre(r.codec_v), head_factor(r.codec_k), head_factor(r.codec_v),
        o.codec_k.numbers, o.codec_v.numbers, tile_parts(o.codec_k), tile_parts(o.codec_v), o.record_bytes,
        o.k_row_bytes, o.v_row_bytes, o.v_offset, pages.centre is not None, rope, max(16, triton.next_power_of_2(rope)),
        lists.edged, window > 0, softcap > 0, min(rows_of_tile, (1 + pairs) * r.page_size), tiles.stages,
        min(tiles.open_rows, r.page_size), tiles.open_stages, pages.chooses, noted is not None, lists.apart, left, pdl,
        **launch_options(pdl, tiles.warps, tiles.registers),
    )  # fmt: skip
    return out
