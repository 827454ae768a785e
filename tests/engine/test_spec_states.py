"""Guessed tokens where layers keep a state: whatever is guessed, an answer is to the bit what it is without guesses."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
from batches import alone, same, watched
from engines import DRAWN, GREEDY, PROMPT, open_tiny
from erring import Erring, guessed
from kernelcases import need_native
from reusecases import NOWHERE, Told

from kvcli.errors import DoesNotFit, KVError
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.statelayout import GUESSED_ROWS
from kvcli.runtime.cache.states import States
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.engine.spec.pace import ROWS, Drafted, Judgement

FAMILIES = ("lfm2", "qwen35", "granitehybrid-dense", "falcon-h1", "nemotron_h", "qwen3next", "qwen35moe", "lfm2moe")
OFF = {"spec": "off"}


@functools.cache
def engine_of(variant: str, codec: str = "f16", backend: str = "native", ctx: int = 320) -> Engine:
    return open_tiny(variant, backend, CacheOptions(ctx, codec, codec, page_size=16, ubatch=24))


@pytest.mark.parametrize(
    ("variant", "codec", "backend"),
    [*((variant, ("f16", "int8", "int4")[i % 3], "native") for i, variant in enumerate(FAMILIES[:5])),
     ("qwen35", "int8", "reference"),
     *(pytest.param(x, "int4", "native", marks=pytest.mark.thorough) for x in FAMILIES)],
)  # fmt: skip
def test_answers_are_those_without_guesses(variant: str, codec: str, backend: str) -> None:
    """Greedy and drawn ones, with guesses of all lengths that are wrong at any place."""
    engine, n = engine_of(variant, codec, backend), 24 if backend == "reference" else 256
    for options, wrong in ((replace(GREEDY, max_tokens=n), 5), (replace(DRAWN, max_tokens=n // 4), 2)):
        plain, found = guessed(engine, PROMPT[:41], replace(options, spec="suffix"), wrong, 1)
        assert same(plain, found) and len(found.ids) == options.max_tokens
        assert 0 < found.end.usage.accepted_tokens < found.end.usage.drafted_tokens
    engine.pool.check([])
    assert ROWS[-1] <= GUESSED_ROWS


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_texts_guess(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Judgement, "worth", lambda self, matched, there: there)
    engine, options = engine_of("qwen35"), replace(GREEDY, max_tokens=128, spec=method)
    prompt = [*PROMPT[:20], *PROMPT[:30]]
    expected, found = alone(engine, prompt, replace(options, **OFF)), alone(engine, prompt, options)
    assert same(expected, found) and found.end.usage.drafted_tokens > 20
    engine.pool.check([])


@pytest.mark.parametrize(
    ("variant", "codec"),
    [
        ("qwen35-ahead", "int4"),
        pytest.param("qwen35moe-ahead", "int8", marks=pytest.mark.thorough),
        pytest.param("qwen3next-ahead", "f16", marks=pytest.mark.thorough),
    ],
)
def test_the_models_own_layer_guesses(variant: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    need_native()
    monkeypatch.setattr(Drafted, "worth", lambda self, most: max(0, min(most, 3)))
    load = LoadOptions(variant, 2, "native", mtp=True)
    engine = Engine.open(tiny.make(variant).path, load, CacheOptions(320, codec, codec, page_size=16, ubatch=24))
    for options in (replace(GREEDY, max_tokens=256), replace(DRAWN, max_tokens=40)):
        plain, found = alone(engine, PROMPT[:50], replace(options, **OFF)), alone(engine, PROMPT[:50], options)
        assert same(plain, found) and len(found.ids) == options.max_tokens < 2 * found.end.usage.drafted_tokens
    engine.pool.check([])


def test_several_requests_guess_in_one_step() -> None:
    """Beside prompts that are read; one of them is parked meanwhile, and the rows of all stay within the plan."""
    engine = engine_of("granitehybrid-dense", "int8")
    asked = [(PROMPT[5 * i : 40 + 5 * i], replace(DRAWN, seed=i, max_tokens=50)) for i in range(4)]
    expected = [alone(engine, prompt, replace(options, **OFF)) for prompt, options in asked]
    erring = iter([Erring(engine.session, one.ids, 4, i) for i, one in enumerate(expected)])
    with pytest.MonkeyPatch.context() as patched, closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        patched.setattr(engine.session, "guesses", lambda method: next(erring))
        found = [watched(engine, *each, caches=caches) for each in asked]
        scheduler, events = Scheduler(engine, 3), {id(each.request): each.events for each in found}
        for each in found:
            scheduler.submit(each.request)
        for count in range(1000):
            if scheduler.idle:
                break
            for request, more in scheduler.step():
                events[id(request)] += more
            if count == 12:
                found[1].request.park()
    for one, two in zip(found, expected, strict=True):
        assert one.ids == two.ids and one.end.usage.accepted_tokens > 10
        one.request.seq.close()
    assert engine.pool.committed_bytes <= engine.predict(100, 4).kv_bytes
    engine.pool.check([])


def test_an_answer_that_is_given_up_leaves_nothing() -> None:
    engine = engine_of("lfm2")
    ids = alone(engine, PROMPT[:20], replace(DRAWN, max_tokens=40)).ids
    for count in (2, 5, 9):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(engine.session, "guesses", lambda _: Erring(engine.session, ids, 3, 2))
            events = engine.generate(
                seq := engine.new_sequence(), PROMPT[:20], replace(DRAWN, max_tokens=40, spec="ngram")
            )
            for _ in range(count):
                next(events)
            events.close()  # type: ignore[attr-defined]
            seq.close()
            engine.pool.check([])


def test_an_error_while_guesses_are_looked_at_leaves_rows_of_the_history(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of("lfm2"), replace(GREEDY, max_tokens=40, spec="suffix")
    ids = alone(engine, PROMPT[:20], replace(options, **OFF)).ids
    monkeypatch.setattr(engine.session, "guesses", lambda _: Erring(engine.session, ids, 1000, 2))
    for count in range(2, 12):
        request = watched(engine, PROMPT[:20], options).request
        calls, sample = itertools.count(1), request.sampler.sample

        def fail(*of_row: Any, calls: Iterator[int] = calls, sample: Any = sample, count: int = count) -> int:
            if next(calls) == count:
                raise KVError("no token")
            return int(sample(*of_row))

        request.sampler.sample = fail  # type: ignore[method-assign]
        while request.error is None:
            engine.step([request])
        assert request.seq.tokens == request.history[: request.seq.length] and request.seq.length >= 20
        assert request.seq.states is not None and request.seq.states._journal.room is request.seq.certain is None
        request.seq.close()
    engine.pool.check([])


def test_a_gpu_says_that_the_host_chooses_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for variant, reason in (("qwen35", "`spec=suffix` guesses, and a row too many"), ("llama", "")):
        engine = engine_of(variant)
        assert engine.sampled_on_host(replace(GREEDY, spec="suffix")) == ""
        monkeypatch.setattr(engine, "graph", object())
        if reason:
            assert engine.sampled_on_host(replace(GREEDY, spec="suffix")).startswith(reason)


def test_where_nothing_is_guessed_there_is_no_room_for_the_state_before_guesses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be that of a checkpoint, which is dropped for it."""
    engine = engine_of("qwen35")
    monkeypatch.setattr(engine.session, "guesses", lambda _: Erring(engine.session, [], 3, 2))
    monkeypatch.setattr(States, "can_guess", lambda self: pytest.fail("there are no guesses"))
    assert len(alone(engine, PROMPT[:30], replace(GREEDY, max_tokens=30, spec="suffix")).ids) == 30


def test_a_step_with_guesses_that_fails_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else rows from there on would hold their pages: later ones might be taken back."""
    for variant in ("llama", "lfm2"):
        engine, options = engine_of(variant), replace(GREEDY, max_tokens=40, spec="suffix")
        ids = alone(engine, PROMPT[:20], replace(options, **OFF)).ids
        with monkeypatch.context() as patched:
            patched.setattr(
                engine.session, "guesses", lambda _, ids=ids, engine=engine: Erring(engine.session, ids, 3, 2)
            )
            request = watched(engine, PROMPT[:20], options).request
            while request.seq.certain is None:
                engine.step([request])
                reserve = request.seq.reserve
                patched.setattr(request.seq, "reserve", Mock(side_effect=DoesNotFit("no room")))
                with suppress(DoesNotFit):
                    engine.step([request])
                patched.setattr(request.seq, "reserve", reserve)
            request.park()
            assert request.wants(64) and request.seq.certain is None
        request.seq.close()
        engine.pool.check([])


def test_without_room_for_the_state_before_them_nothing_is_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of("qwen35"), replace(GREEDY, max_tokens=30)
    expected = alone(engine, PROMPT[:30], options)
    monkeypatch.setattr(engine.pool, "take_spare", lambda arena: None)
    monkeypatch.setattr(engine.session, "guesses", lambda _: Erring(engine.session, expected.ids, 3, 2))
    found = alone(engine, PROMPT[:30], replace(options, spec="suffix"))
    assert found.ids == expected.ids and found.end.usage.drafted_tokens == 0
    engine.pool.check([])
