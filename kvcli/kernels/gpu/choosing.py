"""What blocks of a prompt read where they do not read all pages, and the means of keys by which queries choose.

reference/choosing.py is the specification. A block of a prompt: `score`, and `mask`; its pages are read in sparse.py. A
token of an answer chooses in picking.py.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvcli.codecs import SummaryLayout
from kvcli.kernels.gpu.language import SERIAL, dot4
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.rows import LOG2_E, Queries
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.paged import CHOICE_BLOCK, Choice

TILE = 64  # means that a program looks at
FINE = tl.constexpr(254)  # fine steps in a coarse one
FORCED = tl.constexpr(1.0e30)  # the score of what is read in any case
NEVER = tl.constexpr(-1.0e30)  # of what is not there
LEAST = tl.constexpr(-1.0e29)  # of what is, and the most is as far from 0


@triton.jit
def _summarize(
    keys, summaries, offset, DIM: tl.constexpr, PAD: tl.constexpr, PITCH: tl.constexpr, MEANS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """One program: a page, a head and a mean. keys float16 [pages * MEANS * ROWS, kv_heads, DIM]."""
    page = tl.program_id(0).to(tl.int64)
    heads = tl.num_programs(1)
    mean = tl.program_id(1) * MEANS + tl.program_id(2)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    row = ((page * MEANS + tl.program_id(2)) * ROWS + r) * heads + tl.program_id(1)
    x = tl.load(keys + row[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)
    found = tl.clamp(tl.sum(x, 0) / ROWS, -LARGEST_HALF, LARGEST_HALF)
    scale = tl.max(tl.abs(found), 0) / 127.0
    codes = tl.floor(found / tl.maximum(scale, 1e-30) + 0.5).to(tl.int8)
    at = tl.load(summaries + page) + offset
    tl.store(at.to(tl.pointer_type(tl.int8)) + mean * PITCH + d, codes, mask=d < DIM)
    tl.store((at + heads * MEANS * PITCH).to(tl.pointer_type(tl.float32)) + mean, scale)


def summarize(keys: torch.Tensor, summaries: torch.Tensor, offset: int, each: SummaryLayout) -> None:
    """The means of keys float16 [pages * page_size, kv_heads, dim] to where `summaries`, int64 [pages], says; a layer's
    are `offset` bytes behind."""
    pages, (rows, heads, dim) = len(summaries), keys.shape
    launch(_summarize, (pages, heads, each.means))(
        keys, summaries, offset, dim, padded(dim), each.pitch, each.means, rows // pages // each.means, num_warps=1
    )  # fmt: skip


@triton.jit
def load_means(
    summaries, limits, tile, head, heads, offset, PAD: tl.constexpr, PITCH: tl.constexpr, MEANS: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Of a head's means of BN entries of the table the codes, int32 [BN * MEANS, PAD / 4], four in a word, and the
    scales; and of each mean, whether its entry is chosen among, and whether it is there at all.

    So few registers hold them that all programs of some 2,000 pages find room, and have theirs on the way before they
    wait for the queries.
    """
    row = tl.arange(0, BN * MEANS)
    d = tl.arange(0, PAD // 4)
    at = tile * BN + row // MEANS
    there = (at >= tl.load(limits)) & (at < tl.load(limits + 1))
    base = tl.load(summaries + at, mask=there, other=0)
    known = base != 0
    mean = head * MEANS + row % MEANS
    p = tl.multiple_of((base + offset + mean * PITCH).to(tl.pointer_type(tl.int32)), 16)
    codes = tl.load(p[:, None] + d[None, :], mask=known[:, None] & (d < PITCH // 4)[None, :], other=0)
    p = (base + offset + heads * MEANS * PITCH).to(tl.pointer_type(tl.float32)) + mean
    return codes, tl.load(p, mask=known, other=0.0), known, there


@triton.jit
def _words(codes, PAD: tl.constexpr):
    """Whole numbers of 8 bits as floats, [PAD], four in a word: int32 [PAD / 4]."""
    bytes = tl.reshape(codes.to(tl.int32) & 0xFF, (PAD // 4, 4))
    return tl.sum(bytes << (8 * tl.arange(0, 4))[None, :], 1)


@triton.jit
def scores_of(q, codes, scales, known, there, PAD: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr):
    """The scores of BN entries by a pooled query, float32 [PAD]: whole multiples of a scale, with 15 bits, so that
    products with codes are sums of integers."""
    largest = tl.max(tl.abs(q), 0)
    scaled = q * tl.where(largest > 1e-30, 127.0 / largest, 0.0)
    coarse = tl.floor(scaled + 0.5)
    fine = tl.floor((scaled - coarse) * FINE + 0.5)
    products = dot4(codes, _words(coarse, PAD)[None, :]) * FINE + dot4(codes, _words(fine, PAD)[None, :])
    s = tl.sum(products, 1).to(tl.float32) * (scales * (largest / (127.0 * FINE)))
    s = tl.where(s == s, tl.clamp(s, LEAST, -LEAST), LEAST)
    s = tl.where(known, s, tl.where(there, FORCED, NEVER))
    return tl.max(tl.reshape(s, (BN, MEANS)), 1)


@triton.jit(do_not_specialize=["offset", "room"])
def _score(
    q, summaries, limits, scores, offset, room,
    DIM: tl.constexpr, PAD: tl.constexpr, PITCH: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One program: a head, BN entries of the table and a block's pooled query, q [blocks, kv_heads, DIM]."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    tile = tl.program_id(1)
    codes, scales, known, there = load_means(summaries, limits, tile, head, heads, offset, PAD, PITCH, MEANS, BN)
    d = tl.arange(0, PAD)
    own = tl.program_id(2) * heads + head
    pooled = tl.load(q + own * DIM + d, mask=d < DIM, other=0.0)
    found = scores_of(pooled, codes, scales, known, there, PAD, MEANS, BN)
    entry = tile * BN + tl.arange(0, BN)
    tl.store(scores + own * room + entry, found, mask=entry < room)


def score(q: torch.Tensor, pages: DevicePages, summaries: torch.Tensor) -> torch.Tensor:
    """What the pages of `summaries`, int64 [n], score by pooled queries, q float32 [blocks, kv_heads, dim_k]: float32
    [blocks, kv_heads, n]."""
    r, told, n = pages.record, pages.summary, len(summaries)
    assert told is not None
    scores = torch.empty(*q.shape[:2], n, device=q.device)
    limits = torch.tensor([0, n], dtype=torch.int64).to(q.device)
    each = max(1, TILE // told.means)
    launch(_score, (r.kv_heads, triton.cdiv(n, each), len(q)))(
        q, summaries, limits, scores, pages.layer * told.bytes, n, r.dim_k, padded(r.dim_k), told.pitch, told.means,
        each, **launch_options(SERIAL, 4),
    )  # fmt: skip
    return scores


def mask(queries: Queries, pages: DevicePages, choice: Choice, start: int) -> torch.Tensor:
    """What blocks of a step from position `start` on read of the entries `PageLists.past`: bool [kv_heads, blocks,
    n]."""
    r, lists, t = pages.record, pages.lists, len(pages.lists.shift)
    (lo, hi), some = lists.past, lists.selection
    assert some is not None
    front, heads = start % CHOICE_BLOCK, queries.q.shape[1]
    blocks = -(-(front + t) // CHOICE_BLOCK)
    each = queries.q[:t].view(t, r.kv_heads, heads // r.kv_heads, r.dim_k).float().mean(2)
    each = torch.nn.functional.pad(each, (0, 0, 0, 0, front, blocks * CHOICE_BLOCK - front - t))
    sums = each.view(blocks, CHOICE_BLOCK, r.kv_heads, r.dim_k).sum(1)
    ends = torch.arange(blocks, device=sums.device) * CHOICE_BLOCK - front
    counts = (ends + CHOICE_BLOCK).clamp(max=t) - ends.clamp(min=0)
    scores = score(sums / counts[:, None, None], pages, some.summaries[lo:hi]).transpose(0, 1)
    forced = scores >= FORCED.value
    among = scores.masked_fill(forced, -torch.inf)
    if choice.pages:
        order = among.sort(dim=-1, descending=True, stable=True).indices[..., : choice.pages]
        return torch.zeros_like(forced).scatter_(-1, order, True) | forced
    return forced | (among >= among.amax(-1, keepdim=True) + math.log(choice.threshold) * LOG2_E)
