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

from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.gpu.language import SERIAL, half_of, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, Selected, padded
from kvcli.kernels.gpu.rows import LOG2_E, Queries, hadamard, head_of, query_gain, turning
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.paged import CHOICE_BLOCK, Choice
from kvcli.kernels.reference.rotation import block

TILE, TOKEN_TILE = 64, 128  # means that a program looks at, where it has a block of queries or those of a token
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


@triton.jit
def _load_means(
    summaries, limits, head, offset, DIM: tl.constexpr, PAD: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr
):
    """A head's means of BN entries of the table, int32 [BN * MEANS, PAD / 2]; and of each, whether its entry is chosen
    among, and whether it is there at all.

    They are read two elements in a word: so few registers hold them that all programs of some 2,000 pages find room,
    and have theirs on the way before they wait for the queries.
    """
    row = tl.arange(0, BN * MEANS)
    d = tl.arange(0, PAD // 2)
    at = tl.program_id(1) * BN + row // MEANS
    there = (at >= tl.load(limits)) & (at < tl.load(limits + 1))
    base = tl.load(summaries + at, mask=there, other=0)
    known = base != 0
    p = (base + offset).to(tl.pointer_type(tl.int32)) + ((head * MEANS + row % MEANS) * (DIM // 2))
    means = tl.load(p[:, None] + d[None, :], mask=known[:, None] & (d < DIM // 2)[None, :], other=0)
    return means, known, there


@triton.jit
def _store_scores(scores, means, known, there, even, odd, room, MEANS: tl.constexpr, BN: tl.constexpr):
    """The scores of these entries by a pooled query, whose elements are `even` and `odd` ones [PAD / 2]."""
    s = tl.sum(half_of(means, False) * even[None, :] + half_of(means, True) * odd[None, :], 1)
    s = tl.where(known, s, tl.where(there, FORCED, NEVER))
    best = tl.max(tl.reshape(s, (BN, MEANS)), 1)
    best = tl.where(best == best, best, LEAST)
    entry = tl.program_id(1) * BN + tl.arange(0, BN)
    tl.store(scores + entry, best, mask=entry < room)


@triton.jit(do_not_specialize=["offset", "room"])
def _score(
    q, summaries, limits, scores, offset, room,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head, BN entries of the table and a block of queries, q [blocks, kv_heads * GROUP, DIM]."""
    head = tl.program_id(0)
    block = tl.program_id(2)
    means, known, there = _load_means(summaries, limits, head, offset, DIM, PAD, MEANS, BN)
    wait_for_previous(PDL)
    d = tl.arange(0, PAD // 2)
    even = tl.zeros((PAD // 2,), tl.float32)
    odd = even
    first = q + (block * tl.num_programs(0) + head) * GROUP * DIM
    for g in tl.static_range(GROUP):
        even += tl.load(first + g * DIM + 2 * d, mask=d < DIM // 2, other=0.0).to(tl.float32)
        odd += tl.load(first + g * DIM + 2 * d + 1, mask=d < DIM // 2, other=0.0).to(tl.float32)
    to = scores + (block * tl.num_programs(0) + head) * room
    _store_scores(to, means, known, there, even / GROUP, odd / GROUP, room, MEANS, BN)


@triton.jit(do_not_specialize=["offset", "room", "length", "past"])
def _score_token(
    qkv, position, frequencies, bias, q_norm, summaries, limits, scores, offset, room, eps, factor, amplitude, growth,
    length, past,
    GROUP: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
    BIASED: tl.constexpr, NORMED: tl.constexpr, LAST: tl.constexpr, GAIN: tl.constexpr, MEANS: tl.constexpr,
    BN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: a head and BN entries, by what `prepare` (rows.py) makes of the head's queries, beside it."""
    head = tl.program_id(0)
    means, known, there = _load_means(summaries, limits, head, offset, DIM, PAD, MEANS, BN)
    i = tl.arange(0, PAD)
    at = tl.load(position)
    c, s = 0.0, 0.0
    if ROPE > 0:
        c, s = turning(at, frequencies, ROPE, PAD)
    wait_for_previous(PDL)
    q = tl.zeros((PAD,), tl.float32)
    for g in tl.static_range(GROUP):
        own = (head * GROUP + g) * DIM
        x, _ = head_of(qkv + own, bias + own, q_norm, c, s, eps, DIM, PAD, ROPE, BIASED, NORMED, LAST)
        q += x
    if GAIN:
        gain = query_gain(at, growth, length, past)
        q *= tl.where(i < ROPE, gain * amplitude, gain)
    if TURN > 0:
        q = hadamard(q, PAD, TURN)
    even, odd = tl.split(tl.reshape(q * (factor / GROUP), (PAD // 2, 2)))
    _store_scores(scores + head * room, means, known, there, even, odd, room, MEANS, BN)


@triton.jit(do_not_specialize=["room", "entries"])
def _pick(scores, table, limits, chosen, room, entries, N: tl.constexpr, PDL: tl.constexpr):
    """One program: a head, whose best entries go to its list, in the order of the table.

    Scores become numbers of 20 bits, which are as precise as means are. The least number that is read is found two bits
    at a time: by how many entries have each next pair or a larger one. Of equal ones the first are read.
    """
    head = tl.program_id(0)
    n = tl.arange(0, N)
    end = tl.load(limits + 1).to(tl.int32)
    count = tl.load(limits + 2).to(tl.int32)
    words = tl.load(table + n, mask=n < entries, other=0)
    wait_for_previous(PDL)
    s = tl.load(scores + head * room + n, mask=n < end, other=NEVER)
    bits = s.to(tl.int32, bitcast=True)
    number = (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> 12) + (1 << 19)
    number = tl.where(s > NEVER, number, -1)
    least = 0
    for i in tl.static_range(10):
        step = 1 << (18 - 2 * i)
        one = tl.sum((number >= least + step).to(tl.int32), 0)
        two = tl.sum((number >= least + 2 * step).to(tl.int32), 0)
        three = tl.sum((number >= least + 3 * step).to(tl.int32), 0)
        least += tl.where(three >= count, 3, tl.where(two >= count, 2, tl.where(one >= count, 1, 0))) * step
    more, same = (number > least).to(tl.int32), (number == least).to(tl.int32)
    left = count - tl.sum(more, 0)  # of those that are as good as the least one
    before, alike = tl.cumsum(more, 0), tl.cumsum(same, 0)
    place = before + tl.minimum(alike, left) - 1
    tl.store(chosen + head * room + place, words, mask=(more > 0) | ((same > 0) & (alike <= left)))


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


def score_token(qkv: torch.Tensor, layer: AttentionLayer, pages: DevicePages, entries: int, pdl: int = SERIAL) -> None:
    """Scores for the queries that `prepare` makes of a token's projections, qkv float32 [1, n], which may run beside
    this: see `score`. `entries`: of the table, at most."""
    r, some = pages.record, pages.lists.selection
    assert some is not None
    frequencies = None if layer.rope is None else layer.rope.frequencies_on(qkv.device)
    present = (qkv if x is None else x for x in (frequencies, layer.bias, layer.q_norm))  # something stands for none
    gains = layer.amplitude != 1 or layer.temperature is not None
    each = max(1, TOKEN_TILE // pages.means)
    launch(_score_token, (r.kv_heads, triton.cdiv(min(entries, some.chosen.shape[1]), each)))(
        qkv, pages.lists.position, *present, some.summaries, some.limits, some.scores, pages.summary_offset,
        some.scores.shape[2], layer.eps, layer.scale * LOG2_E, layer.amplitude, *(layer.temperature or (0.0, 1, 0)),
        layer.heads // r.kv_heads, r.dim_k, padded(r.dim_k), 0 if frequencies is None else 2 * frequencies.shape[0],
        block(r.dim_k) if pages.rotated[0] else 0, layer.bias is not None, layer.q_norm is not None, layer.norms_last,
        gains, pages.means, each, pdl, **launch_options(pdl, 4),
    )  # fmt: skip


def choose(queries: Queries, pages: DevicePages, entries: int, pdl: int = SERIAL, scored: bool = False) -> torch.Tensor:
    """What a token reads of the table, in its order: int64 [kv_heads, room] words, of each head as many as `HostLists`
    counted. `entries`: of the table, at most. `scored`: `score_token` was there before."""
    r, lists = pages.record, pages.lists
    some = lists.selection
    assert some is not None
    entries = min(entries, some.chosen.shape[1])
    if not scored:
        heads = queries.q.shape[1] // r.kv_heads
        score(queries.q, heads, pages, some.scores, some.summaries, some.limits, entries, pdl)
    take_best(some, lists.table, entries, pdl)
    return some.chosen


def take_best(some: Selected, table: torch.Tensor, entries: int, pdl: int = SERIAL) -> None:
    """The words of the best of the first `entries` of the table, by `some.scores`, to `some.chosen`."""
    heads, room = some.chosen.shape
    n = triton.next_power_of_2(entries)
    launch(_pick, (heads,))(
        some.scores, table, some.limits, some.chosen, room, entries, n, pdl,
        **launch_options(pdl, max(1, min(32, n // 128))),
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
