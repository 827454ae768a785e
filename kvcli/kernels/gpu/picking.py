"""Which pages a token of an answer reads, chosen by the launch that makes its queries: `prepare`.

reference/choosing.py is the specification. Beside the programs of rows.py are those that score pages, a key-value head
and a tile of the table each. They have their means on the way before the projections are there, and make the pooled
query themselves. The last one of a head picks: it finds the least score that is read, and lists the pages that score as
much, for attention.py to walk in place of the table. So choosing costs no launch of its own, and attention stands ready
meanwhile.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.gpu import rows
from kvcli.kernels.gpu.choosing import FORCED, NEVER, load_means, scores_of
from kvcli.kernels.gpu.language import SERIAL, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages
from kvcli.kernels.gpu.rows import Queries, hadamard, head_of, prepare_head, query_gain, row_and_page, turning
from kvcli.kernels.gpu.tiles import bound, launch_options

TILE, WARPS = 128, 4  # means that a program looks at
DIGITS = 7  # of two bits, of a score
BEST, FINEST = tl.constexpr((1 << 2 * DIGITS) - 2), tl.constexpr(256.0)  # the number of the best score; steps of one


@triton.jit
def _counted(number, final, least, step, FIELD: tl.constexpr):
    """How many numbers, and `final` among them, are at least one, two and three steps above `least`; without it each
    below 2 ** FIELD."""
    one = (number >= least + step).to(tl.int32)
    two = (number >= least + 2 * step).to(tl.int32)
    three = (number >= least + 3 * step).to(tl.int32)
    if FIELD > 10:
        all = tl.sum(one + (two.to(tl.int64) << FIELD) + (three.to(tl.int64) << (2 * FIELD)), 0)
    else:
        all = tl.sum(one + (two << FIELD) + (three << (2 * FIELD)), 0)
    only: tl.constexpr = (1 << FIELD) - 1
    ones = (all & only).to(tl.int32) + (final >= least + step)
    twos = ((all >> FIELD) & only).to(tl.int32) + (final >= least + 2 * step)
    return ones, twos, (all >> (2 * FIELD)).to(tl.int32) + (final >= least + 3 * step)


@triton.jit
def _pick(scores, table, chosen, end, count, entries, digits, N: tl.constexpr):
    """List the words of the `count` best entries below `end`, in the order of the table; of equal ones the first.

    Scores, to base 2, become numbers of 14 bits by how far they are from the best one: steps are finer than the codes
    of means, and what is 64 below is nothing. The least one that is read is found two bits at a time: by how many
    entries have each next pair or a larger one.
    """
    FIELD: tl.constexpr = 10 if N <= 1024 else 20
    n = tl.arange(0, N)
    words = tl.load(table + n, mask=n < entries, other=0)
    s = tl.load(scores + n, mask=n < end, other=NEVER, cache_modifier=".cg")  # others wrote them meanwhile
    forced = s >= FORCED
    below = (s - tl.max(tl.where(forced, NEVER, s), 0)) * FINEST
    number = tl.clamp(below, -1.0 * BEST, 0.0).to(tl.int32) + BEST
    number = tl.where(forced, BEST + 1, tl.where(s > NEVER, number, -1))
    counted, final = number, -1
    if N == 1024:  # as many as are counted with 10 bits, and one more
        counted = tl.where(n < N - 1, number, -1)
        final = tl.max(tl.where(n < N - 1, -1, number), 0)
    least = 0
    above = 0  # entries with larger numbers than any that `least` may yet become
    step = 1 << 2 * digits - 2
    # A loop that stays one: instructions that are not there yet, as at the next layer, take longer than running them.
    for _ in tl.range(bound(0), bound(digits), loop_unroll_factor=1):
        one, two, three = _counted(counted, final, least, step, FIELD)
        above = tl.where(three >= count, above, tl.where(two >= count, three, tl.where(one >= count, two, one)))
        least += tl.where(three >= count, 3, tl.where(two >= count, 2, tl.where(one >= count, 1, 0))) * step
        step = step >> 2
    more, same = (number > least).to(tl.int32), (number == least).to(tl.int32)
    left = count - above
    if N > 16384:
        before, alike = tl.cumsum(more, 0), tl.cumsum(same, 0)
    else:
        both = tl.cumsum(more + (same << 16), 0)
        before, alike = both & 0xFFFF, both >> 16
    place = before + tl.minimum(alike, left) - 1
    tl.store(chosen + place, words, mask=(more > 0) | ((same > 0) & (alike <= left)))


@triton.jit
def _pooled(
    head, at, qkv, bias, q_norm, c, s, eps, factor, amplitude, growth, length, past, GROUP: tl.constexpr,
    DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr, BIASED: tl.constexpr,
    NORMED: tl.constexpr, LAST: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """The mean of a key-value head's queries, as `prepare_head` makes them: float32 [PAD]."""
    q = tl.zeros((PAD,), tl.float32)
    for g in tl.static_range(GROUP):
        own = (head * GROUP + g) * DIM
        x, _ = head_of(qkv + own, bias + own, q_norm, c, s, eps, DIM, PAD, ROPE, BIASED, NORMED, LAST)
        q += x
    if GAIN:
        gain = query_gain(at, growth, length, past)
        q *= tl.where(tl.arange(0, PAD) < ROPE, gain * amplitude, gain)
    if TURN > 0:
        q = hadamard(q, PAD, TURN)
    return q * (factor / GROUP)


@triton.jit(do_not_specialize=["offset", "length", "past", "told", "entries", "tiles", "digits"])
def _prepare_and_pick(
    position, into, offset,
    qkv, shift, frequencies, bias, q_norm, k_norm, centre, q, qc, qb, eps, factor, amplitude, growth, length, past,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, RECORD: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, TURN_K: tl.constexpr,
    TURN_V: tl.constexpr, BIASED: tl.constexpr, Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr, CENTRED: tl.constexpr,
    LAST: tl.constexpr, GAIN: tl.constexpr, TURNS: tl.constexpr, APART: tl.constexpr, STORES: tl.constexpr,
    summaries, table, limits, scores, done, chosen, told, room, entries, tiles, digits,
    PITCH: tl.constexpr, MEANS: tl.constexpr, BN: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first KV_HEADS * tiles programs score BN entries for a head, the others are those of `prepare` (rows.py) for
    one row. `done`: int32 [KV_HEADS], 0 before and behind: how many programs have scored."""
    program = tl.program_id(0)
    if program < KV_HEADS * tiles:
        GROUP: tl.constexpr = HEADS // KV_HEADS
        head = program // tiles
        tile = program % tiles
        codes, scales, known, there = load_means(summaries, limits, tile, head, KV_HEADS, told, PAD_K, PITCH, MEANS, BN)
        end = tl.load(limits + 1).to(tl.int32)
        count = tl.load(limits + 2).to(tl.int32)
        at = tl.load(position)
        c, s = 0.0, 0.0
        if ROPE > 0:
            c, s = turning(at, frequencies, ROPE, PAD_K)
        wait_for_previous(PDL)
        pooled = _pooled(
            head, at, qkv, bias, q_norm, c, s, eps, factor, amplitude, growth, length, past, GROUP, DIM_K, PAD_K, ROPE,
            TURN_K, BIASED, Q_NORMED, LAST, GAIN,
        )  # fmt: skip
        found = scores_of(pooled, codes, scales, known, there, PAD_K, MEANS, BN)
        entry = tile * BN + tl.arange(0, BN)
        tl.store(scores + head * room + entry, found, mask=entry < room)
        tl.debug_barrier()  # all threads have stored theirs before one counts
        if tl.atomic_add(done + head, 1, sem="acq_rel") == tiles - 1:
            tl.store(done + head, 0)
            _pick(scores + head * room, table, chosen + head * room, end, count, entries, digits, N)
    else:
        at, word = row_and_page(0, position, into, SIZE, APART)
        prepare_head(
            0, 1, program - KV_HEADS * tiles, at, word + offset, qkv, shift, frequencies, bias, q_norm, k_norm, centre,
            q, qc, qb, eps, factor, amplitude, growth, length, past, HEADS, KV_HEADS, DIM_K, PAD_K, DIM_V, PAD_V, ROPE,
            SIZE, RECORD, K_ROW, V_ROW, V_OFFSET, CODEC_K, CODEC_V, TURN_K, TURN_V, BIASED, Q_NORMED, K_NORMED,
            CENTRED, LAST, GAIN, TURNS, APART, STORES, PDL,
        )  # fmt: skip


def prepare(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    pages: DevicePages,
    out: Queries | None = None,
    pdl: int = SERIAL,
    entries: int = 0,
) -> Queries:
    """`rows.prepare`, and where a token chooses what it reads (`DevicePages.chooses`), its choice: `Selected.chosen` of
    the lists gets the words of the pages that each head reads, as many as `HostLists` counted, in the order of the
    table. `entries`: of the table, at most; 0 = as many as it has room for."""
    some, told, r = pages.lists.selection, pages.summary, pages.record
    if some is None or told is None or not pages.chooses:
        return rows.prepare(qkv, layer, pages, out, pdl)
    out, programs, given = rows.arguments(qkv, layer, pages, out)
    most, room = len(some.summaries), some.chosen.shape[1]
    entries = min(entries or most, most)
    each = max(1, TILE // told.means)
    tiles, n = triton.cdiv(entries, each), triton.next_power_of_2(entries)
    launch(_prepare_and_pick, (r.kv_heads * tiles + programs,))(
        *given, some.summaries, pages.lists.table, some.limits, some.scores, some.done, some.chosen,
        pages.layer * told.bytes, room, entries, tiles, DIGITS, told.pitch, told.means, each, n, pdl,
        **launch_options(pdl, max(WARPS, min(32, n // 512))),
    )  # fmt: skip
    return out
