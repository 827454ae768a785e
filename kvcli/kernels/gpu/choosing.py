"""What queries read where they do not read all pages, and the means of keys by which they choose.

reference/choosing.py is the specification. A token of an answer: `score`, then `take_best`, which lists the pages of
each key-value head for attention.py to walk. A block of a prompt: `score`, and `mask`; its pages are read in sparse.py.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.language import SERIAL, half_of, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, Selected, padded
from kvcli.kernels.gpu.rows import LOG2_E, Queries
from kvcli.kernels.gpu.tiles import LARGEST_HALF, bound, launch_options
from kvcli.kernels.paged import CHOICE_BLOCK, Choice

TILE = 64  # means that a program looks at
RANKED, COMPARED = 32, 128  # entries whose ranks a program finds, and with how many at a time it compares them
FORCED = tl.constexpr(1.0e30)  # the score of what is read in any case
NEVER = tl.constexpr(-1.0e30)  # of what is not there
LEAST = tl.constexpr(-1.0e29)  # of what is


@triton.jit
def _summarize(keys, summaries, offset, DIM: tl.constexpr, PAD: tl.constexpr, MEANS: tl.constexpr, ROWS: tl.constexpr):
    """One program: a page, a head and a mean. keys float16 [pages * MEANS * ROWS, kv_heads, DIM]."""
    page = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    mean = tl.program_id(2)
    r = tl.arange(0, ROWS)
    d = tl.arange(0, PAD)
    row = ((page * MEANS + mean) * ROWS + r) * tl.num_programs(1) + head
    x = tl.load(keys + row[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0).to(tl.float32)
    found = tl.clamp(tl.sum(x, 0) / ROWS, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
    at = (tl.load(summaries + page) + offset).to(tl.pointer_type(tl.float16)) + (head * MEANS + mean) * DIM
    tl.store(at + d, found, mask=d < DIM)


def summarize(keys: torch.Tensor, summaries: torch.Tensor, offset: int, means: int) -> None:
    """The means of keys float16 [pages * page_size, kv_heads, dim] to where `summaries`, int64 [pages], says; a layer's
    are `offset` bytes behind."""
    pages, (rows, heads, dim) = len(summaries), keys.shape
    launch(_summarize, (pages, heads, means))(
        keys, summaries, offset, dim, padded(dim), means, rows // pages // means, num_warps=1
    )  # fmt: skip


@triton.jit(do_not_specialize=["offset", "room"])
def _score(
    q, summaries, limits, scores, offset, room,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head, BN entries of the table and a block of queries, q [blocks, kv_heads * GROUP, DIM].

    Means are read two elements in a word: so few registers hold them that all programs of some 2,000 pages find room,
    and have theirs on the way before they wait for the queries.
    """
    head = tl.program_id(0)
    block = tl.program_id(2)
    row = tl.arange(0, BN * MEANS)
    d = tl.arange(0, PAD // 2)
    at = tl.program_id(1) * BN + row // MEANS
    there = (at >= tl.load(limits)) & (at < tl.load(limits + 1))
    base = tl.load(summaries + at, mask=there, other=0)
    known = base != 0
    p = (base + offset).to(tl.pointer_type(tl.int32)) + ((head * MEANS + row % MEANS) * (DIM // 2))
    means = tl.load(p[:, None] + d[None, :], mask=known[:, None] & (d < DIM // 2)[None, :], other=0)
    wait_for_previous(PDL)
    even = tl.zeros((PAD // 2,), tl.float32)
    odd = even
    first = q + (block * tl.num_programs(0) + head) * GROUP * DIM
    for g in tl.static_range(GROUP):
        even += tl.load(first + g * DIM + 2 * d, mask=d < DIM // 2, other=0.0).to(tl.float32)
        odd += tl.load(first + g * DIM + 2 * d + 1, mask=d < DIM // 2, other=0.0).to(tl.float32)
    s = tl.sum(half_of(means, False) * (even / GROUP)[None, :] + half_of(means, True) * (odd / GROUP)[None, :], 1)
    s = tl.where(known, s, tl.where(there, FORCED, NEVER))
    best = tl.max(tl.reshape(s, (BN, MEANS)), 1)
    best = tl.where(best == best, best, LEAST)  # no number would have no rank
    entry = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(scores + (block * tl.num_programs(0) + head) * room + entry, best, mask=entry < room)


@triton.jit
def _below(x):
    """The largest float32 below x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits - 1, tl.where(x < 0, bits + 1, -2147483647))
    return bits.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["room", "entries"])
def _rank(
    scores, table, limits, chosen, room, entries, BN: tl.constexpr, N: tl.constexpr, CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head and BN entries, each of which goes to the place of its rank if it is one that is read.

    An entry's rank is how many score higher, or as high and stand before it. All are compared with all: of a few
    thousand that takes less time than one program for a head, which would have to go over them bit by bit.
    """
    head = tl.program_id(0)
    at = tl.program_id(1) * BN + tl.arange(0, BN)
    own = tl.program_id(1) * BN // N * N  # where the N entries begin that have these among them
    n = tl.arange(0, N)
    words = tl.load(table + at, mask=at < entries, other=0)
    count = tl.load(limits + 2).to(tl.int32)
    of_head = scores + head * room
    wait_for_previous(PDL)
    mine = tl.load(of_head + at, mask=at < entries, other=NEVER)
    below = _below(mine)
    others = tl.load(of_head + own + n, mask=own + n < entries, other=NEVER)[None, :]
    ahead = ((others == mine[:, None]) & ((own + n)[None, :] < at[:, None])).to(tl.int32)
    for first in tl.range(0, bound(entries), CHUNKS * N):
        for i in tl.static_range(CHUNKS):
            start = first + i * N
            others = tl.load(of_head + start + n, mask=start + n < entries, other=NEVER)[None, :]
            ahead += (others > tl.where(start < own, below, mine)[:, None]).to(tl.int32)
    rank = tl.sum(ahead, 1)
    tl.store(chosen + head * room + rank, words, mask=(mine > NEVER) & (rank < count))


def score(
    q: torch.Tensor, group: int, pages: DevicePages, scores: torch.Tensor, summaries: torch.Tensor,
    limits: torch.Tensor, entries: int, pdl: int = SERIAL,
) -> None:  # fmt: skip
    """Scores float32 [blocks, kv_heads, room] of the first `entries` of `summaries`, int64 [n], of which those from
    limits[0] to limits[1] are there. q float16 or float32 [blocks, kv_heads * group, dim_k]."""
    r, blocks = pages.record, scores.shape[0]
    each = max(1, TILE // pages.means)
    launch(_score, (r.kv_heads, triton.cdiv(entries, each), blocks))(
        q, summaries, limits, scores, pages.summary_offset, scores.shape[2],
        group, r.dim_k, padded(r.dim_k), pages.means, each, pdl, **launch_options(pdl, 4),
    )  # fmt: skip


def choose(queries: Queries, pages: DevicePages, entries: int, pdl: int = SERIAL) -> torch.Tensor:
    """What a token reads of the table: int64 [kv_heads, room] words, of each head as many as `HostLists` counted, best
    ones first. `entries`: of the table, at most."""
    r, lists = pages.record, pages.lists
    some = lists.selection
    assert some is not None
    entries = min(entries, some.chosen.shape[1])
    score(queries.q, queries.q.shape[1] // r.kv_heads, pages, some.scores, some.summaries, some.limits, entries, pdl)
    take_best(some, lists.table, entries, pdl)
    return some.chosen


def take_best(some: Selected, table: torch.Tensor, entries: int, pdl: int = SERIAL) -> None:
    """The words of the best of the first `entries` of the table, by `some.scores`, to `some.chosen`."""
    heads, room = some.chosen.shape
    chunks = min(16, triton.next_power_of_2(triton.cdiv(entries, COMPARED)))
    launch(_rank, (heads, triton.cdiv(entries, RANKED)))(
        some.scores, table, some.limits, some.chosen, room, entries, RANKED, COMPARED, chunks, pdl,
        **launch_options(pdl, 4),
    )  # fmt: skip


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
    scores = torch.empty(blocks, r.kv_heads, hi - lo, device=sums.device)
    limits = torch.tensor([0, hi - lo], dtype=torch.int64).to(sums.device)
    score(sums / counts[:, None, None], 1, pages, scores, some.summaries[lo:hi], limits, hi - lo)
    scores = scores.transpose(0, 1)
    forced = scores >= FORCED.value
    among = scores.masked_fill(forced, -torch.inf)
    if choice.pages:
        order = among.sort(dim=-1, descending=True, stable=True).indices[..., : choice.pages]
        return torch.zeros_like(forced).scatter_(-1, order, True) | forced
    return forced | (among >= among.amax(-1, keepdim=True) + math.log(choice.threshold) * LOG2_E)
