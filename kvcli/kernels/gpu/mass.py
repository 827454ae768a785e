"""The mass of attention: what each row gets of the queries of a step. Keys are read once more, behind attention, when
the largest score of each query and the sum over all rows are known; probabilities are rounded and added up as whole
numbers, as `kernels.Watch` says, so that no order changes them.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import LOG2_E, Partials, block_rows, programs, tiling
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.places import address, slot
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.shares import Class
from kvcli.kernels.gpu.span import EDGE, centre_scores, edge_bound, edge_word, load_queries, load_scales, seen_rows
from kvcli.kernels.gpu.tiles import bound, dot_keys, head_factor, left_centre, tile_parts
from kvcli.kernels.paged import MASS_UNIT, PagedKV, Watch

UNIT = tl.constexpr(MASS_UNIT)
Lists = list[tuple[bool, int, torch.Tensor]]  # open pages or not, 1 = scored by turned queries, edges on the device


@triton.jit(do_not_specialize=["start", "rows", "entries", "each", "since", "turned", "offset", "window", "pitch"])
def _mass(
    q, qc, qb, edges, angles, scale_k, norms, mass,
    start, rows, entries, each, since, turned, offset, window, pitch, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, SIZE: tl.constexpr,
    DIM_K: tl.constexpr, PAD_K: tl.constexpr, CODEC_K: tl.constexpr, NK: tl.constexpr, RECORD: tl.constexpr,
    K_ROW: tl.constexpr, K_SCALES: tl.constexpr, OFF_K: tl.constexpr, FACTOR_K: tl.constexpr, CENTRED: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, BN: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """One KV head, a block of queries, as in `attention`, and `each` entries of those in `edges`."""
    head = tl.program_id(0)
    TILES: tl.constexpr = SIZE // BN
    r = tl.arange(0, M)
    base = (start // BLOCK + tl.program_id(2)) * BLOCK
    position = base + r // GROUP
    ok = (r < BLOCK * GROUP) & (position >= start) & (position < start + rows)
    newest = tl.minimum(base + BLOCK, start + rows) - 1
    first = tl.maximum(base, start)
    position = tl.minimum(tl.maximum(position, first), newest)
    row = (position - start).to(tl.int64) * HEADS + head * GROUP + r % GROUP
    oldest = 0
    if WINDOWED:
        oldest = first - window + 1
    asks = row + turned * rows * HEADS
    q0 = load_queries(q, ok, asks, 0, NK, DIM_K, PAD_K)
    q1 = q0
    q2 = q0
    q3 = q0
    total_q = tl.sum(q0.to(tl.float32), 1)
    if NK > 1:
        q1 = load_queries(q, ok, asks, 1, NK, DIM_K, PAD_K)
        total_q += tl.sum(q1.to(tl.float32), 1)
    if NK > 2:
        q2 = load_queries(q, ok, asks, 2, NK, DIM_K, PAD_K)
        q3 = load_queries(q, ok, asks, 3, NK, DIM_K, PAD_K)
        total_q += tl.sum(q2.to(tl.float32), 1) + tl.sum(q3.to(tl.float32), 1)
    off = OFF_K * total_q
    qb_row = total_q
    qc_tile = q0
    if CENTRED:
        qb_row = tl.load(qb + asks, mask=ok, other=0.0)
        if ROPE > 0:
            j = tl.arange(0, ROPE_PAD)
            turns = ok[:, None] & (j < ROPE)[None, :]
            qc_tile = tl.load(qc + asks[:, None] * ROPE + j[None, :], mask=turns, other=0.0)
    norm = tl.load(norms + row, mask=ok, other=0.0)
    counts = ok & (position >= since)
    lo = tl.program_id(1) * each
    hi = tl.minimum(lo + each, entries)
    if newest < since:
        hi = lo
    for t in tl.range(bound(lo * TILES), bound(hi * TILES)):
        word = edge_word(edges, t, TILES, EDGE) + offset + head.to(tl.int64) * RECORD
        seen = seen_rows(edges, t, oldest, newest, TILES, BN, True)
        at = address(word, CENTRED)
        slots = (t % TILES) * BN + tl.arange(0, BN)
        s = dot_keys(q0, q1, q2, q3, at, slots, seen, K_ROW, DIM_K, PAD_K, CODEC_K, NK, True)
        if OFF_K != 0:
            s = s - off[:, None]
        if K_SCALES > 0:
            s = s * load_scales(at, t, seen, K_SCALES, TILES, BN, True).to(tl.float32)[None, :]
        if FACTOR_K != 0:
            s = s * (tl.load(scale_k + head) * FACTOR_K)
        if CENTRED:
            s = centre_scores(s, qc_tile, qb_row, angles, slot(word) * TILES + t % TILES, ROPE, ROPE_PAD, BN)
        if CAPPED:
            s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
        place = edge_bound(edges, t, 1, TILES) + slots
        asked = (position >= edge_bound(edges, t, 4, TILES)) & (position < edge_bound(edges, t, 5, TILES)) & counts
        visible = seen[None, :] & asked[:, None] & (place[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (place[None, :] > position[:, None] - window)
        p = tl.where(visible, tl.exp2(s - norm[:, None]), 0.0)
        units = (p * UNIT + 0.5).to(tl.int32)
        to = mass + head.to(tl.int64) * pitch + place
        if LARGEST:
            got = tl.max(units, 0)
            tl.atomic_max(to, got.to(tl.int64), mask=seen & (got > 0), sem="relaxed")
        else:
            got = tl.sum(units, 0)
            tl.atomic_add(to, got.to(tl.int64), mask=seen & (got > 0), sem="relaxed")


def add_mass(
    queries: Queries, kv: PagedKV, pages: DevicePages, found: Partials, watch: Watch, start: int, window: int,
    softcap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Note in `watch.mass` what rows got of the T queries from position `start` on; `found`: their partial results."""
    assert watch.mass is not None
    heads, rows = queries.q.shape[1], len(pages.lists.shift)
    chip, norms = Chip.of(queries.q.device), _norms(found, sinks)
    block, m = block_rows(pages.record, heads, rows, chip)
    blocks = (start + rows - 1) // block - start // block + 1
    for is_open, turned, edges in _lists(kv, queries.q.device):
        each = pages.open if is_open and pages.open is not None else pages
        r, dim = each.record, padded(each.record.dim_k)
        tiles = tiling(r.codec_k, r.codec_k, dim, rows == 1)
        enough = max(1, programs(chip, False) // (r.kv_heads * blocks))
        entries = max(1, -(-len(edges) // enough))
        centred = not is_open and pages.centre is not None
        rope = 0 if pages.angles is None else pages.angles.shape[1]
        some = queries.q  # stands for what is not there
        launch(_mass, (r.kv_heads, -(-len(edges) // entries), blocks))(
            queries.q, queries.qc, queries.qb, edges, some if pages.angles is None else pages.angles,
            some if pages.scale_k is None or is_open else pages.scale_k, norms, watch.mass,
            start, rows, len(edges), entries, watch.since, turned, each.offset, window, watch.mass.stride(0),
            softcap * LOG2_E,
            heads, heads // r.kv_heads, block, m, r.page_size, r.dim_k, dim, r.codec_k.numbers, tile_parts(r.codec_k),
            r.record_bytes, r.k_row_bytes, r.k_scales, left_centre(r.codec_k), head_factor(r.codec_k), centred, rope,
            max(16, triton.next_power_of_2(rope)), window > 0, softcap > 0, min(tiles.open_rows, r.page_size),
            watch.largest, num_warps=tiles.warps,
        )  # fmt: skip


def _norms(found: Partials, sinks: torch.Tensor | None) -> torch.Tensor:
    """float32 [T, heads]: the logarithm to base 2 of what exp2(score) is divided by."""
    tops = torch.where(found.totals > 0, found.tops, -torch.inf)
    top = tops.amax(-1)
    if sinks is not None:
        top = torch.maximum(top, sinks * LOG2_E)
    total = (torch.where(found.totals > 0, found.totals, 0.0) * torch.exp2(tops - top[..., None])).sum(-1)
    if sinks is not None:
        total += torch.exp2(sinks * LOG2_E - top)
    return top + total.log2()


def _lists(kv: PagedKV, device: torch.device) -> Lists:
    """All entries as edges, made once for the layers that share them."""
    made = kv.entries.made
    if "mass" not in made:
        lists: Lists = []
        for is_open, of in enumerate(kv.classes):
            slots = np.arange(len(of.entries)) if kv.open and not is_open and kv.record.codec_k.centred else None
            found = Class.of(of.entries, kv.record.page_size, slots)
            for turned in (0, 1):
                if len(edges := found.edges[found.turned == turned]):
                    lists.append((bool(is_open), turned, torch.from_numpy(edges).to(device)))
        made["mass"] = lists
    found_lists: Lists = made["mass"]  # type: ignore[assignment]
    return found_lists
