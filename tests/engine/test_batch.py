"""Several requests in one step, and the scheduler: to the bit, an answer is what it is when nothing else runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
from batches import Watched, alone, same, watched
from engines import DRAWN, GREEDY, PROMPT, open_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from reusecases import NOWHERE, Told

from kvcli.codecs import CODECS
from kvcli.errors import DoesNotFit, KVError
from kvcli.options import CacheOptions, EvictOptions, SampleOptions
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.cache.eviction.shift import Halves
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.engine import scheduler as schedulers
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import Prefill
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Caches

SINKS = EvictOptions("sink", window=48, keep=5)


@functools.cache
def engine_of(variant: str, backend: str, codec: str, evict: EvictOptions = EvictOptions(), tail: int = 1) -> Engine:
    options = CacheOptions(160, codec, codec, page_size=16, ubatch=24, tail=tail, evict=evict)
    return open_tiny(variant, backend, options)


options_of_answers = st.builds(
    lambda drawn, seed, n, stop: replace(DRAWN if drawn else GREEDY, seed=seed, max_tokens=n, stop=stop),
    *(st.booleans(), st.integers(0, 9), st.integers(0, 10), st.sampled_from([(), ("e",)])),
)
prompts = st.builds(
    lambda shared, n, own: [*PROMPT[:shared], *PROMPT[own : own + n]],
    *(st.sampled_from([0, 15, 40, 70]), st.integers(1, 40), st.integers(0, 99)),
)
lives = st.tuples(prompts, options_of_answers, st.integers(0, 12), st.none() | st.integers(0, 12))  # joins, leaves


def together(engine: Engine, some: list[tuple], parallel: int, caches: Caches | None) -> list[Watched]:
    """The requests, each submitted before a step of its own; some are cancelled before a later one."""
    scheduler, found, step = Scheduler(engine, parallel), [], 0
    left = [False] * len(some)
    for number, (prompt, options, _, _) in enumerate(some):
        cancelled = functools.partial(left.__getitem__, number)
        found.append(watched(engine, prompt, options, cancelled=cancelled, caches=caches or LIVE_ROWS))
    events = {id(each.request): each.events for each in found}
    while step <= 12 or not scheduler.idle:
        for number, (_, _, joins, leaves) in enumerate(some):
            if joins == step:
                scheduler.submit(found[number].request)
            if leaves is not None and leaves == step:
                left[number] = True
        for request, more in scheduler.step():
            events[id(request)] += more
            if request.finished:
                request.seq.close()
        step += 1
    return found


CASES = [
    *(("llama", "native", codec, EvictOptions()) for codec in CODECS),
    *(("gemma3", "native", codec, EvictOptions()) for codec in ("f16", "int8")),
    *(("llama", "native", codec, SINKS) for codec in ("f16", "int4")),
    *(
        pytest.param(*case, marks=pytest.mark.thorough)
        for case in (
            *(("gemma3", "native", codec, EvictOptions()) for codec in CODECS if codec not in ("f16", "int8")),
            ("llama", "native", "int8", SINKS),
        )
    ),
    ("llama", "reference", "int4", EvictOptions()),
    *(
        pytest.param("llama", "reference", codec, EvictOptions(), marks=pytest.mark.thorough)
        for codec in CODECS
        if codec != "int4"
    ),
    *(("deepseek2-lite", "native", codec, EvictOptions()) for codec in ("f16", "int8", "fp8")),
    pytest.param("gemma3", "reference", "f16", EvictOptions(), marks=pytest.mark.thorough),
    ("gemma3", "reference", "int4", SINKS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "backend", "codec", "evict"), CASES)
@settings(max_examples=3)
@given(some=st.lists(lives, min_size=2, max_size=8), parallel=st.integers(2, 8), cached=st.booleans())
def test_batch_is_single(
    variant: str, backend: str, codec: str, evict: EvictOptions, some: list[tuple], parallel: int, cached: bool
) -> None:
    engine = engine_of(variant, backend, codec, evict)
    if backend == "reference":  # which takes ten times as long
        some = some[:4]
    expected = [alone(engine, prompt, options) for prompt, options, _, _ in some]
    caches = engine.prompt_caches(NOWHERE, Told()) if cached else None
    try:
        for one, two, (_, _, _, leaves) in zip(together(engine, some, parallel, caches), expected, some, strict=True):
            one.check()
            if one.end.finish_reason == "interrupted":
                assert leaves is not None and one.ids == two.ids[: len(one.ids)]
            else:
                assert same(one, two)
    finally:
        if caches is not None:
            caches.close()
    engine.pool.check([])


@pytest.mark.parametrize("codec", ["f16", "int4"])
def test_each_sequence_may_have_a_policy_of_its_own(codec: str) -> None:
    """One forgets nothing, others the middle or the first rows too, in one step and over caches that they share."""
    engine, options, prompt = engine_of("llama", "native", codec), replace(GREEDY, max_tokens=60), PROMPT[:80]
    own = [None, Rolling(0, 32, 16), Rolling(20, 32, 16), Halves(5, 32, 16)]
    expected = [alone(engine, prompt, options, each) for each in own]
    assert len({tuple(one.ids) for one in expected}) > 1
    caches = engine.prompt_caches(NOWHERE, Told())
    for again in (False, True):
        some = [watched(engine, prompt, options, each, caches=caches) for each in own]
        finished(engine, some)
        for one, two, each in zip(some, expected, own, strict=True):
            one.check()
            assert same(one, two)
            assert (one.end.usage.cache_read_tokens > 0) == (again and each is None)  # others share no rows
    caches.close()
    engine.pool.check([])


def finished(engine: Engine, requests: list[Watched], parallel: int = 8) -> Scheduler:
    """The requests, submitted at once, to their ends."""
    scheduler, events = Scheduler(engine, parallel), {id(each.request): each.events for each in requests}
    for each in requests:
        scheduler.submit(each.request)
    while not scheduler.idle:
        for request, more in scheduler.step():
            events[id(request)] += more
            if request.finished:
                request.seq.close()
    return scheduler


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine whose pool has room for the bytes of so many 16-bit pages of 16 rows, taken one by one."""
    monkeypatch.setattr(layouts, "CHUNK_BYTES", 1)

    def open_it(codec: str, pages: int) -> Engine:
        engine = open_tiny("llama", "native", CacheOptions(160, codec, codec, 16, ubatch=24))
        engine.pool.budget_bytes = pages * max(arena.page_bytes for arena in engine.layout.arenas)
        return engine

    return open_it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "pages", "cached"),
    [
        ("f16", 14, True),
        ("int4", 12, False),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (("f16", 14, False), ("int8", 14, False), ("int8", 14, True), ("int4", 12, True))
        ),
    ],
)
def test_where_pages_run_out_the_youngest_waits_and_goes_on_the_same(
    tight: Callable[..., Engine], codec: str, pages: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedulers, "ANSWER_ROWS", 8)
    engine = tight(codec, pages)
    long = [replace(DRAWN, seed=seed, max_tokens=85) for seed in range(4)]
    prompts = [PROMPT[:30] + PROMPT[40 + 5 * n : 70 + 5 * n] for n in range(4)]
    caches = engine.prompt_caches(NOWHERE, Told()) if cached else None
    found = [watched(engine, *each, caches=caches or LIVE_ROWS) for each in zip(prompts, long, strict=True)]
    scheduler = finished(engine, found)
    assert scheduler.preemptions > 0
    engine.pool.budget_bytes = None
    expected = [alone(engine, *each) for each in zip(prompts, long, strict=True)]
    for one, two in zip(found, expected, strict=True):
        one.check()
        assert same(one, two) and len(one.ids) == 85
    if caches is not None:
        caches.close()
    engine.pool.check([])


def test_a_request_starts_when_there_is_room_for_its_prompt_and_some_answer(tight: Callable[..., Engine]) -> None:
    engine = tight("f16", 14)
    found = [watched(engine, PROMPT[:60], replace(GREEDY, max_tokens=20)) for _ in range(3)]
    scheduler = Scheduler(engine, 8)
    for each in found:
        scheduler.submit(each.request)
    for _ in range(9):
        scheduler.step()
    assert [each.request.seq.length > 0 for each in found] == [True, True, False]
    while not scheduler.idle:
        for request, _ in scheduler.step():
            if request.finished:
                request.seq.close()
    assert scheduler.preemptions == 0
    assert len({tuple(each.ids) for each in found}) == 1 and len(found[0].ids) == 20


def test_what_fits_in_no_pool_fails_alone(tight: Callable[..., Engine]) -> None:
    engine = tight("f16", 6)
    found = [watched(engine, PROMPT[:n], replace(GREEDY, max_tokens=5)) for n in (40, 120, 30)]
    finished(engine, found, 2)
    assert isinstance(found[1].request.error, DoesNotFit) and found[1].ids == []
    for one, n in ((found[0], 40), (found[2], 30)):
        assert same(one, alone(engine, PROMPT[:n], replace(GREEDY, max_tokens=5)))
    engine.pool.check([])


def test_an_error_of_one_is_no_error_of_another() -> None:
    engine = engine_of("llama", "native", "f16")
    nothing = dict.fromkeys(range(engine.config.vocab_size), float("-inf"))
    found = [watched(engine, PROMPT[:20], replace(GREEDY, logit_bias=bias)) for bias in ({}, nothing, {})]
    finished(engine, found)
    assert isinstance(found[1].request.error, KVError) and "every logit is -inf" in found[1].request.error.message
    assert [each.end.finish_reason for each in (found[0], found[2])] == ["length"] * 2


# --- several answers to one prompt


def with_twins(engine: Engine, prompt: list[int], some: list[SampleOptions], **more: object) -> list[Watched]:
    twins = [watched(engine, prompt, options, **more) for options in some[1:]]
    first = watched(engine, prompt, some[0], twins=[each.request for each in twins], **more)
    return [first, *twins]


@pytest.mark.parametrize(("variant", "codec"), [("llama", "f16"), ("gemma3", "int4"), ("llama", "int8")])
def test_twins_share_the_prompt_and_are_what_they_would_be_alone(variant: str, codec: str) -> None:
    engine = engine_of(variant, "native", codec)
    some = [replace(DRAWN, sequence=number, max_tokens=25 - number) for number in range(5)]
    expected = [alone(engine, PROMPT[:75], options) for options in some]
    found = with_twins(engine, PROMPT[:75], some)
    finished(engine, found)
    for one, two in zip(found, expected, strict=True):
        one.check()
        assert same(one, two)
    assert len({tuple(each.ids) for each in found}) == 5
    prefills = [[e for e in each.events if isinstance(e, Prefill)] for each in found]
    assert prefills[0][-1].done == 75 and not any(prefills[1:])
    assert [each.end.usage.cache_read_tokens for each in found] == [0, 75, 75, 75, 75]
    engine.pool.check([])


def test_twins_of_a_prompt_that_was_not_read_end_as_it_does(tight: Callable[..., Engine]) -> None:
    engine = engine_of("llama", "native", "f16")
    found = with_twins(engine, PROMPT[:75], [GREEDY, DRAWN], cancelled=lambda: True)
    finished(engine, found)
    assert [each.end.finish_reason for each in found] == ["interrupted"] * 2
    small = tight("f16", 3)
    found = with_twins(small, PROMPT[:75], [GREEDY, DRAWN])
    finished(small, found)
    assert all(isinstance(each.request.error, DoesNotFit) for each in found)
    small.pool.check([])
