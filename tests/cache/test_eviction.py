"""Evicted rows in kernels and page lists: attention is that of a naive cache, which keeps keys before RoPE and numbers
what is left anew; pages are as planned and come back to the pool.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from cachecases import append, read, rows, tiny_layout, write
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelcases import backend, one_thread
from sealedcases import PAIRS, SEALED, Cache, PoisonedPool, layout

from kvcli.errors import UsageError
from kvcli.kernels.reference.rotation import rotate
from kvcli.options import EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.shift import Halves
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.model.rope import RopeTable

SIZE, DIM = 16, 32
POLICIES = [policy.retention for name in eviction.names() if (policy := eviction.policy(name)).retention]
TYPES = [(t, t) for t in ("f32", "f16", "bf16", *SEALED)] + list(PAIRS)
FAR = 10_000_000


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


def turned(rows: torch.Tensor, positions: np.ndarray, rope: RopeTable, sign: int = 1) -> torch.Tensor:
    """RoPE in float64: rows [heads, n, DIM] at those positions, or back from there."""
    angles = torch.from_numpy(sign * positions[:, None].astype(np.float64) * rope.frequencies)  # [n, half]
    half = angles.shape[1]
    a, b, rest = rows[..., :half], rows[..., half : 2 * half], rows[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class Evicting(Cache):
    """A layer's rows with eviction. Queries come before RoPE."""

    def ask(self, q: torch.Tensor, start: int, softcap: float = 0.0) -> torch.Tensor:
        """float32 [T, heads * DIM] for q [T, heads, DIM], as a model computes it."""
        shift, span = self.kv.shift(start, len(q)), ((start, len(q)),)
        queries = [q.clone()] if shift is None else [q.clone(), q.clone()]
        for each, by in zip(queries, (np.zeros(len(q)), shift), strict=False):
            self.ops.rope_(each, *self.rope.inside(span, by))
            if self.kv.rotated[0]:
                self.ops.rotate_(each)
        second = None if shift is None else queries[1]
        return self.ops.attention(queries[0], self.kv, start, 0, DIM**-0.5, softcap, self.angles, second)

    def naive(self, q: torch.Tensor, start: int, softcap: float = 0.0) -> torch.Tensor:
        """The same in float64, one query at a time, over keys that are brought back before RoPE and numbered anew."""
        retention, kv_heads = self.layout.retention, self.kv.record.kv_heads
        group, out = q.shape[1] // kv_heads, []
        for position, query in enumerate(q.double(), start):
            first = retention.start(position)
            rows = [*range(min(retention.keep, first)), *range(first, position + 1)]
            keys, values = self._rows(rows, position // SIZE)
            keys = turned(keys, np.arange(len(rows)), self.rope)
            query = turned(query[:, None], np.array([len(rows) - 1]), self.rope)
            scores = (query @ keys.repeat_interleave(group, 0).transpose(1, 2)) * DIM**-0.5  # [heads, 1, n]
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out.append((scores.softmax(-1) @ values.repeat_interleave(group, 0)).flatten())
        return torch.stack(out)

    def _rows(self, rows: list[int], own: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[kv_heads, n, DIM]: what is stored of these positions, keys before RoPE and in their own basis."""
        keys, values = [], []
        for page in sorted({row // SIZE for row in rows}):
            slots = [row % SIZE for row in rows if row // SIZE == page]
            k, v = self.rows(page, own, max(slots) + 1)
            keys.append(k[:, slots])
            values.append(v[:, slots])
        k, v = torch.cat(keys, 1), torch.cat(values, 1)
        return turned(rotate(k) if self.kv.rotated[0] else k, np.array(rows), self.rope, -1), v


def fill(cache: Cache, steps: list[int], seed: int) -> torch.Generator:
    """Random rows in steps of these lengths."""
    random = torch.Generator().manual_seed(seed)
    heads = cache.layout.groups[0].kv_heads
    for n in steps:
        at = cache.seq.length
        k, v = (torch.randn(n, heads, DIM, generator=random) for _ in "kv")
        cache.ops.rope_(k, *cache.rope.at(at, n))
        cache.append(k, v)
    return random


def check(cache: Evicting, steps: list[int], group: int, random: torch.Generator, softcap: float = 0.0) -> None:
    """All queries of the last step."""
    n = steps[-1]
    q = 2 * torch.randn(n, cache.kv.record.kv_heads * group, DIM, generator=random)
    start = cache.seq.length - n
    expected = cache.naive(q, start, softcap)
    assert expected.isfinite().all()
    assert (cache.ask(q, start, softcap) - expected).abs().max() < 2e-5


@pytest.mark.slow
@settings(max_examples=25)
@given(
    types=st.sampled_from(TYPES),
    policy=st.sampled_from((Rolling, Halves)),
    name=st.sampled_from(("reference", "")),
    heads=st.sampled_from(((1, 1), (2, 1), (1, 3), (2, 2))),  # of KV, and queries for each: MHA, MQA and GQA
    keep=st.integers(0, 3 * SIZE + 2),
    window=st.integers(SIZE, 5 * SIZE),
    steps=st.lists(st.integers(1, 75), min_size=1, max_size=6),
    pages=st.sampled_from(((1, 1), (0, 1), (1, 0), (2, 1), (3, 0))),  # sinks, tail
    seed=st.integers(0, 99),
)
def test_attention_is_that_of_a_naive_cache(
    types: tuple[str, str],
    policy: type[Retention],
    name: str,
    heads: tuple[int, int],
    keep: int,
    window: int,
    steps: list[int],
    pages: tuple[int, int],
    seed: int,
):
    sinks, tail = pages if any(pages) else (1, 1)
    where = layout(types, (DIM, DIM), heads[0], SIZE, sinks=sinks, tail=tail)
    cache = Evicting(backend(name), where.evicting(policy(keep, window, SIZE)))
    check(cache, steps, heads[1], fill(cache, steps, seed), 20.0 if seed % 5 == 0 else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("reference", "avx512", "avx2", "base"))
@pytest.mark.parametrize(
    "types",
    (("int4", "int8"), *(pytest.param(x, marks=pytest.mark.thorough) for x in (("f16", "f16"), ("fp8", "int4")))),
    ids="/".join,
)
def test_after_many_evictions_and_over_several_spans(name: str, types: tuple[str, str]):
    """Kept rows and the window lie in spans of pages of their own; single queries and many."""
    where = layout(types, (DIM, DIM), 2, SIZE).evicting(Rolling(200, 170, SIZE))
    cache = Evicting(backend(name), where)
    fill(cache, [70] * 20, 1)
    for last in (1, 50):
        check(cache, [last], 2, fill(cache, [last], last))


@pytest.mark.parametrize("name", ("reference", ""))
@pytest.mark.parametrize("types", (("f32", "f32"), ("int4", "int4")), ids="/".join)
def test_positions_beyond_ten_million(name: str, types: tuple[str, str]):
    """As if so many tokens had gone by after the first ones; the naive cache stays below position 100."""
    cache = Evicting(backend(name), layout(types, (DIM, DIM), 1, SIZE).evicting(Rolling(20, 40, SIZE)))
    fill(cache, [3 * SIZE], 1)
    cache.seq.tokens.extend([0] * FAR)
    cache.seq.drop()
    assert sorted(number for _, number in cache.seq.numbered()) == [0, 1]
    random = fill(cache, [60, 30, 1, 9], 2)
    check(cache, [9], 2, random)
    assert len(cache.kv.entries) < 9


def pages_held(cache: Cache) -> list[int]:
    return [cache.pool.used(arena) for arena in range(len(cache.layout.arenas))]


@pytest.mark.slow
@pytest.mark.parametrize("types", (("f16", "f16"), ("int8", "int8")), ids="/".join)
@pytest.mark.parametrize(
    ("keep", "window", "step"),
    [
        pytest.param(*sizes, step, marks=() if step == usual else pytest.mark.thorough)
        for sizes, usual in (((0, 16), 1), ((4, 33), 16), ((32, 64), 40), ((50, 17), 1))
        for step in (1, 16, 40)
    ],
)
@pytest.mark.parametrize("policy", (Rolling, Halves))
def test_pages_are_planned_and_come_back(
    types: tuple[str, str], keep: int, window: int, step: int, policy: type[Retention]
):
    where = layout(types, (DIM, DIM), 1, SIZE).evicting(policy(keep, window, SIZE))
    cache = Cache(backend("reference"), where)
    held = []
    for start in range(0, 400, step):
        n = min(step, 400 - start, (start // SIZE + -(-step // SIZE)) * SIZE - start)
        fill(cache, [n], start)
        held.append(pages_held(cache))
        if n < step:
            fill(cache, [step - n], start)
    planned, peaks = where.arena_pages(400, step), [cache.pool.peak(a) for a in range(len(where.arenas))]
    assert all(0 <= most - peak <= 1 for most, peak in zip(planned, peaks, strict=True)), (planned, peaks)
    if types == ("f16", "f16"):
        assert peaks[0] == planned[0]
    late = held[len(held) // 2 :]
    assert max(x[0] for x in late) <= planned[0] and held[-1][0] >= where.groups[0].retention.kept_pages - 1
    cache.seq.close()
    cache.pool.check([])
    assert pages_held(cache) == [0] * len(where.arenas)


def test_a_fork_shares_kept_pages_and_closing_one_leaves_the_other():
    cache = Cache(backend("reference"), layout(("int4", "int4"), (DIM, DIM)).evicting(Rolling(20, 32, SIZE)))
    fill(cache, [150], 3)
    used = pages_held(cache)
    twin = cache.seq.fork()
    assert pages_held(cache) == used
    cache.pool.check([*cache.seq.holds(), *twin.holds()])
    cache.seq.close()
    cache.pool.check(twin.holds())
    twin.reserve([1] * 5)
    twin.close()
    cache.pool.check([])


def test_what_was_evicted_cannot_be_gone_back_to():
    cache = Cache(backend("reference"), layout(("f16", "f16"), (DIM, DIM)).evicting(Rolling(4, 32, SIZE)))
    seq = cache.seq
    fill(cache, [40, 7], 3)
    assert (seq.evicted, seq.kept, seq.rewindable(10)) == (0, 47, 10)  # a page is still all there
    fill(cache, [1, 40], 4)
    assert seq.rewindable(48) == 48 and seq.evicted == 44 and seq.kept == 44
    fill(cache, [1], 4)
    assert seq.rewindable(80) == 80 and seq.rewindable(60) == 0
    seq.rewind(0)
    cache.pool.check([])
    assert (seq.length, seq.evicted, seq.losses()) == (0, 0, ())


def test_losses_say_why():
    kept = layout(("f16", "f16"), (DIM, DIM)).evicting(Rolling(4, 32, SIZE))
    sealed = layout(("int8", "f16"), (DIM, DIM))
    seq, other = Sequence(PoisonedPool(kept)), Sequence(PoisonedPool(sealed))
    seq.reserve([0] * 100)
    seq.commit([0] * 100)
    assert seq.losses() == ("evicted: 60 tokens, kept the first 4 and the last 32",)
    assert other.losses() == ("quantized: keys int8, values f16",)


@given(st.sampled_from((Rolling, Halves)), st.integers(0, 70), st.integers(16, 90), st.integers(0, 400))
def test_the_kernels_and_the_plan_agree_on_what_is_seen(policy: type[Retention], keep: int, window: int, position: int):
    retention = policy(keep, window, SIZE)
    where = layout(("f32", "f32"), (DIM, DIM)).evicting(retention)
    seq, gaps = Sequence(PoisonedPool(where)), [retention.gap(p) for p in range(position + 1)]
    for n, expected in ((position, gaps[:-1]), (1, gaps[-1:])):  # from the start, and with old pages gone
        shift = seq.reserve([0] * n).shifts[0]
        assert shift is None if keep == 0 or not any(expected) else shift.tolist() == expected
        seq.commit([0] * n)
    gap = gaps[-1]
    seen = where.groups[0].rows_seen(position + 1)
    assert seen == position + 1 - gap <= keep + policy.room(window, SIZE) - 1 + (policy is Halves)
    assert seen >= min(position + 1, window)
    first = where.groups[0].first_page(position)
    assert first * SIZE == retention.start(position) <= max(0, position - window + 1)


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("append", "append", "give up", "fork", "rewind", "close")), st.integers(0, 70)),
    min_size=5,
    max_size=16,
)


@settings(max_examples=30)
@given(OPERATIONS, st.sampled_from((Rolling, Halves)), st.integers(0, 40), st.integers(16, 60))
def test_whatever_is_done_every_row_that_can_be_seen_is_right(
    operations: list[tuple[str, int]], policy: type[Retention], keep: int, window: int
):
    """Sequences that share pages; a row says which token and position it belongs to."""
    retention = policy(keep, window, SIZE)
    pool = PoisonedPool(tiny_layout().evicting(retention))
    live, tokens = [(Sequence(pool), [])], iter(range(1, 1 << 20))
    for kind, n in operations:
        seq, known = live[n % len(live)]
        if kind == "append":
            ids = [next(tokens) for _ in range(n + 1)]
            append(seq, ids)
            known += ids
        elif kind == "give up":
            write(seq.reserve([0] * (n + 1)), [0] * (n + 1))
        elif kind == "fork":
            live.append((seq.fork(), list(known)))
        elif kind == "rewind":
            length = seq.rewindable(max(0, len(known) - n))
            seq.rewind(length)
            del known[length:]
        elif len(live) > 1:
            live.remove((seq, known))
            seq.close()
        pool.check(held for each, _ in live for held in each.holds())
        for each, expected in live:
            check_visible(each, expected, retention)


def check_visible(seq: Sequence, tokens: list[int], retention: Retention) -> None:
    """Rows of the full layer (model layer 1) that the next query reads."""
    assert seq.tokens == tokens
    first = retention.start(len(tokens))
    for start, end in ((0, min(retention.keep, first, len(tokens))), (first, len(tokens))):
        if start < end:
            found = read(seq.views()[1][0], start, end)
            assert all(map(torch.equal, found, rows(tokens[start:end], start, 1)))


# --- policies


def test_policies_are_files():
    assert eviction.names()[0] == "none" and {"shift", "sink", "snapkv", "window"} < set(eviction.names())
    assert eviction.retention(EvictOptions(), 64, 64) is None
    assert eviction.retention(EvictOptions("window"), 1024, 64) == Rolling(0, 960, 64)
    assert eviction.retention(EvictOptions("sink"), 1024, 64) == Rolling(4, 896, 64)
    assert eviction.retention(EvictOptions("sink", keep=65), 1024, 64) == Rolling(65, 832, 64)
    assert eviction.retention(EvictOptions("sink", 100, 0), 1024, 64) == Rolling(0, 100, 64)
    assert eviction.retention(EvictOptions("sink", 100, -1), 1024, 64) == Rolling(0, 960, 64)
    assert eviction.retention(EvictOptions("shift"), 1024, 64) == Halves(4, 448, 64)
    assert eviction.retention(EvictOptions("shift", 100, 65), 1024, 64) == Halves(65, 100, 64)


@given(st.integers(0, 70), st.integers(16, 90))
def test_a_shift_lets_go_of_the_older_half(keep: int, window: int):
    """Against a cache that is filled token by token: when it is full, half of its pages go, but for the kept rows."""
    half, cached, retention = -(-window // SIZE), list[int](), Halves(keep, window, SIZE)
    for position in range(500):
        pages = sorted({row // SIZE for row in cached if row >= keep})
        if position % SIZE == 0 and len(pages) == 2 * half:
            cached = [row for row in cached if row < keep or row // SIZE not in pages[:half]]
        cached.append(position)
        assert position - retention.gap(position) == len(cached) - 1, position
        left = next(p for p in range(position + 1, position + 300) if retention.gap(p) > retention.gap(position))
        assert retention.until_next(position) == left - position


@given(
    st.sampled_from(("window", "sink", "shift")), st.sampled_from((16, 64)), st.integers(1, 3000), st.integers(0, 500)
)
def test_the_default_is_the_largest_window_that_fits(policy: str, size: int, ctx: int, keep: int):
    asked = EvictOptions(policy, 0, None if policy == "window" else keep)
    least = eviction.least_context(asked, size)
    if ctx < least:
        with pytest.raises(UsageError, match=rf"(?m)context of {ctx:,} tokens is too short .* = {least:,}$") as refused:
            eviction.retention(asked, ctx, size)
        assert f"a context of {least} or more" in refused.value.hint
        return
    found = eviction.retention(asked, ctx, size)
    assert found is not None and found.window >= size
    room = ctx - found.kept_pages * size
    assert found.room(found.window, size) <= room < found.room(found.window + 1, size)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            EvictOptions("lru"),
            "`evict` must be one of none, expected, h2o, keydiff, kvzip, random, shift, sink, snapkv, tova, window, not"
            " 'lru'",
        ),
        (EvictOptions("none", 100), "`window` needs `evict`"),
        (EvictOptions("none", keep=4), "`keep` needs `evict=shift` or `evict=sink`"),
        (EvictOptions("window", keep=4), "`keep` needs .*, not window"),
        (EvictOptions("sink", keep=-2), "`keep` must be 0 or more, .* not -2"),
        (EvictOptions("sink", 63), "`window` is 63, less than a page of 64"),
        (
            EvictOptions("sink", 512, 4),
            r"64 for the 4 kept in whole pages \+ 512 of window \+ 64 more before old ones go = 640",
        ),
        (EvictOptions("sink", keep=400), r"448 for the 400 kept in whole pages \+ at least 64 of window .* = 576"),
    ],
)
def test_what_cannot_be_is_refused_with_the_arithmetic(asked: EvictOptions, message: str):
    with pytest.raises(UsageError, match=message):
        eviction.retention(asked, 512, 64)
