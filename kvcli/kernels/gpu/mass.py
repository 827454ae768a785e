"""The mass of attention: what each row gets of the queries of a step. Keys are read once more, behind attention, when
the largest score of each query and the sum over all rows are known; probabilities are rounded and added up as whole
numbers, as `kernels.Watch` says, so that no order changes them.

Keys come decoded, as float16 (past.py), whatever their codec is. A program keeps some of them in registers and goes
through queries: through those that see all of these rows without a mask, and with one through the others, which are
those beside the diagonal, at an edge of the window, or in the last block of the step.

A probability becomes a whole number without a conversion, which would take four times as long: to 2 ** 23 multiples of
MASS_UNIT are added, so that the lower bits of the float are the number; their bits are added up as integers, and what
2 ** 23 adds is taken off at the end.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.attention import LOG2_E, Partials
from kvcli.kernels.gpu.language import SERIAL, fence_copies
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.past import STAGED_ROWS, stage_keys
from kvcli.kernels.gpu.rows import Queries
from kvcli.kernels.gpu.shares import Class
from kvcli.kernels.gpu.span import EDGE
from kvcli.kernels.gpu.tiles import bound, launch_options
from kvcli.kernels.paged import MASS_UNIT, PagedKV, Watch

UNIT_BITS = tl.constexpr(MASS_UNIT.bit_length() - 1)
WHOLE = tl.constexpr(8388608.0)  # 2 ** 23: floats from here to twice that are whole numbers
WHOLE_BITS = tl.constexpr(0x4B000000)
_LOG2_E = tl.constexpr(LOG2_E)
COLUMNS = tl.constexpr(16)  # queries whose numbers are added up apart: all of one are in one thread
MOST = tl.constexpr(4096)  # queries of a program: so many times MASS_UNIT / COLUMNS is below 2 ** 32
WARPS = 4
THREE = 168  # registers of a thread, for three programs on a multiprocessor


@triton.jit
def log_weights(tops, totals, sinks, heads, cells, parts, there, PARTS: tl.constexpr, SINKS: tl.constexpr):
    """float32 [n]: the logarithm to base 2 of what exp2(score) of queries is divided by, of partial results in
    `cells` [n] and on, `parts` of each, for those that are `there` [n], of `heads` [n]; `sinks`: of each head."""
    p = tl.arange(0, PARTS)
    at = cells[:, None] + p[None, :]
    each = there[:, None] & (p < parts)[None, :]
    weights = tl.load(totals + at, mask=each, other=0.0)
    top = tl.where(weights > 0, tl.load(tops + at, mask=each, other=-1.0e30), -1.0e30)
    highest = tl.max(top, 1)
    beside = highest * 0.0
    if SINKS:
        sink = tl.load(sinks + heads, mask=there, other=-1.0e30) * _LOG2_E
        highest = tl.maximum(highest, sink)
        beside = tl.exp2(sink - highest)
    return highest + tl.log2(tl.sum(weights * tl.exp2(top - highest[:, None]), 1) + beside)


@triton.jit(do_not_specialize=["rows", "parts"])
def _norms(
    tops, totals, sinks, norms, rows, parts,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, PARTS: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """What is taken from the scores of a KV head and block of queries, so that exp2 gives multiples of MASS_UNIT."""
    head, block = tl.program_id(0), tl.program_id(1)
    r = tl.arange(0, QUERIES)
    row = block * BLOCK + r // GROUP
    there = (r < BLOCK * GROUP) & (row < rows)
    heads = head * GROUP + r % GROUP
    found = log_weights(tops, totals, sinks, heads, (row * HEADS + heads) * parts, parts, there, PARTS, SINKS)
    to = norms + (head * tl.num_programs(1) + block) * QUERIES + r
    tl.store(to, tl.where(there & (found > -1.0e30), found - UNIT_BITS, float("inf")))


@triton.jit
def _add_block(
    found, k, q, norms, block, opens, closes, rows, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr,
    PAD: tl.constexpr, KEYS: tl.constexpr, CAPPED: tl.constexpr, LARGEST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """`found` int32 [KEYS, COLUMNS] with what keys get of a block of queries. With MASKED a key is seen by rows of the
    step from `opens` to `closes` [KEYS]; else by all of the block, of which all are there."""
    r = tl.arange(0, QUERIES)
    d = tl.arange(0, PAD)
    at = (r // GROUP * HEADS + r % GROUP)[:, None] * DIM + d[None, :]
    first = q + tl.full((), BLOCK * HEADS * DIM, tl.int64) * block
    row = block * BLOCK + r // GROUP
    if MASKED:
        there = (r < BLOCK * GROUP) & (row < rows)
        x = tl.load(first + at, mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    elif BLOCK * GROUP == QUERIES and DIM == PAD:
        x = tl.load(first + at)
    else:
        x = tl.load(first + at, mask=(r < BLOCK * GROUP)[:, None] & (d < DIM)[None, :], other=0.0)
    norm = tl.load(norms + block * QUERIES + r)
    fence_copies(KEYS)
    s = tl.dot(k, tl.trans(x))
    if CAPPED:
        s = softcap - 2.0 * softcap / (tl.exp2(s * (2.0 * 1.4426950408889634 / softcap)) + 1.0)
    s = s - norm[None, :]
    if MASKED:
        s = tl.where((row[None, :] >= opens[:, None]) & (row[None, :] < closes[:, None]), s, float("-inf"))
    numbers = (tl.exp2(s) + WHOLE).to(tl.int32, bitcast=True)
    numbers = tl.reshape(numbers, (KEYS, QUERIES // COLUMNS, COLUMNS))
    if LARGEST:
        return tl.maximum(found, tl.max(numbers, 1))
    else:
        return found + tl.sum(numbers, 1)


@triton.jit(do_not_specialize=["start", "rows", "entries", "since", "window", "pitch"])
def _mass(
    q, keys, edges, norms, mass, start, rows, entries, since, window, pitch, softcap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    LARGEST: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One KV head, KEYS rows of those of `edges`, and the queries of some blocks, the last ones first: most rows are
    seen there. `keys` [rows of the edges, kv_heads, DIM]; `norms`: see `_norms`."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    FEW: tl.constexpr = MOST // QUERIES
    lo = (tl.num_programs(2) - 1 - tl.program_id(2)) * FEW
    n = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    there = n < entries * SIZE
    edge = edges + n // SIZE * EDGE
    slot = n % SIZE
    place = tl.load(edge + 1, mask=there, other=0).to(tl.int32) + slot
    opens = tl.maximum(tl.load(edge + 4, mask=there, other=0).to(tl.int32), tl.maximum(place, since)) - start
    closes = tl.load(edge + 5, mask=there, other=0).to(tl.int32)
    if WINDOWED:
        closes = tl.minimum(closes, place + window)
    closes = tl.minimum(closes - start, rows)
    shown = there & (slot >= tl.load(edge + 2, mask=there, other=0)) & (slot < tl.load(edge + 3, mask=there, other=0))
    shown = shown & (tl.maximum(opens, 0) < closes)
    # Blocks [lo, hi) are seen by some of the rows that are shown, [a, b) wholly by all of them.
    begin = tl.maximum(tl.min(tl.where(shown, opens, rows), 0), 0)
    end = tl.max(tl.where(shown, closes, 0), 0)
    hi = tl.minimum(lo + FEW, tl.cdiv(end, BLOCK))
    lo = tl.maximum(lo, begin // BLOCK)
    if lo >= hi:
        return
    a = tl.minimum(tl.maximum(tl.cdiv(tl.max(tl.where(shown, opens, 0), 0), BLOCK), lo), hi)
    b = tl.minimum(tl.maximum(tl.min(tl.where(shown, closes, rows), 0) // BLOCK, a), hi)
    d = tl.arange(0, PAD)
    k = tl.load(
        keys + (n * heads + head)[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0
    )
    q += head * GROUP * DIM
    norms += head * tl.cdiv(rows, BLOCK) * QUERIES
    found = tl.full((KEYS, COLUMNS), WHOLE_BITS if LARGEST else 0, tl.int32)
    for i in tl.range(bound(lo), bound(hi - (b - a)), num_stages=STAGES):
        found = _add_block(
            found, k, q, norms, tl.where(i < a, i, i + (b - a)), opens, closes, rows, softcap, HEADS, GROUP, BLOCK,
            QUERIES, DIM, PAD, KEYS, CAPPED, LARGEST, True,
        )  # fmt: skip
    for i in tl.range(bound(a), bound(b), num_stages=STAGES):
        found = _add_block(
            found, k, q, norms, i, opens, closes, rows, softcap, HEADS, GROUP, BLOCK, QUERIES, DIM, PAD, KEYS, CAPPED,
            LARGEST, False,
        )  # fmt: skip
    to = mass + head.to(tl.int64) * pitch + place
    if LARGEST:
        got = tl.max(found, 1) - WHOLE_BITS
        tl.atomic_max(to, got.to(tl.int64), mask=shown & (got > 0), sem="relaxed")
    else:
        added = (hi - lo).to(tl.int64) * (QUERIES // COLUMNS * WHOLE_BITS)
        sums = tl.sum((found.to(tl.int64) - added) & 0xFFFFFFFF, 1)
        tl.atomic_add(to, sums, mask=shown & (sums > 0), sem="relaxed")


@dataclass(frozen=True)
class Tile:
    """What a program multiplies at once: keys, and queries of `block` positions; pipeline stages; registers of a
    thread, 0 = as many as the compiler takes."""

    keys: int
    queries: int
    block: int
    stages: int
    registers: int

    @classmethod
    def of(cls, dim: int, group: int) -> Tile:
        """By the padded head dim, and by the query heads of a KV head."""
        keys, queries = (128, 64) if dim <= 128 else (64, 64) if dim == 256 else (64, 32)
        if group > queries:
            keys, queries = 64, triton.next_power_of_2(group)
        return cls(keys, queries, queries // group, 2, THREE if dim <= 128 else 0)


def add_mass(
    queries: Queries, kv: PagedKV, pages: DevicePages, found: Partials, watch: Watch, start: int, window: int,
    softcap: float, sinks: torch.Tensor | None,
) -> None:  # fmt: skip
    """Note in `watch.mass` what rows got of the T queries from position `start` on; `found`: their partial results."""
    assert watch.mass is not None
    (rows, heads, parts), r = found.tops.shape, pages.record
    group, pad = heads // r.kv_heads, padded(r.dim_k)
    tile = Tile.of(pad, group)
    blocks = -(-rows // tile.block)
    norms = torch.empty(r.kv_heads, blocks, tile.queries, device=found.tops.device)
    launch(_norms, (r.kv_heads, blocks))(
        found.tops, found.totals, found.tops if sinks is None else sinks, norms, rows, parts, heads, group, tile.block,
        tile.queries, triton.next_power_of_2(parts), sinks is not None, num_warps=WARPS,
    )  # fmt: skip
    each = STAGED_ROWS // r.page_size
    for is_open, turned, words, edges in _lists(kv, norms.device):
        of = pages.open if is_open and pages.open is not None else pages
        q = queries.q[rows:] if turned else queries.q
        for some, shown in zip(words.split(each), edges.split(each), strict=True):
            grid = r.kv_heads, -(-len(some) * r.page_size // tile.keys), -(-blocks * tile.queries // MOST.value)
            launch(_mass, grid)(
                q, stage_keys(of, some), shown, norms, watch.mass, start, rows, len(some), watch.since, window,
                watch.mass.stride(0), softcap * LOG2_E, heads, group, tile.block, tile.queries, r.page_size, r.dim_k,
                pad, tile.keys, window > 0, softcap > 0, watch.largest, tile.stages,
                **launch_options(SERIAL, WARPS, tile.registers),
            )  # fmt: skip


Lists = list[tuple[bool, bool, torch.Tensor, torch.Tensor]]


def _lists(kv: PagedKV, device: torch.device) -> Lists:
    """All entries, made once for the layers that share them: of open pages or not, scored by turned queries or not,
    their words and their edges on the device."""
    made = kv.entries.made
    if "mass" not in made:
        lists: Lists = []
        for is_open, of in enumerate(kv.classes):
            slots = np.arange(len(of.entries)) if kv.open and not is_open and kv.record.codec_k.centred else None
            found = Class.of(of.entries, kv.record.page_size, slots)
            for turned in (False, True):
                if len(edges := found.edges[found.turned == turned]):
                    words, shown = (torch.from_numpy(x).to(device) for x in (edges[:, 0].copy(), edges))
                    lists.append((bool(is_open), turned, words, shown))
        made["mass"] = lists
    found_lists: Lists = made["mass"]  # type: ignore[assignment]
    return found_lists
