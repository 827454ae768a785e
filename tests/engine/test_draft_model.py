"""A draft model changes speed alone: with its guesses an answer is to the bit what it is without."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace

import pytest
import torch
from batches import alone, same, watched
from draftcases import OFF, SINK, WINDOW, always_guess, both, check, drafts, engine_of, kept
from engines import DRAWN, GREEDY, PROMPT, run
from hypothesis import given, settings
from hypothesis import strategies as st
from reusecases import NOWHERE, Told

from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import CacheOptions, EvictOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.text.grammar import json_schema


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    always_guess(monkeypatch)


CASES = [
    *(("llama", "granite", codec, EvictOptions(), 1) for codec in ("f16", "int8", "int4")),
    ("llama", "qwen3", "int8", SINK, 0), ("llama", "qwen3", "int8", WINDOW, 1),
    *(pytest.param("llama", "qwen3", "int8", *case, marks=pytest.mark.thorough) for case in ((SINK, 1), (WINDOW, 0))),
    ("gemma3", "gemma3", "int4", EvictOptions(), 1), ("gpt-oss", "llama-sliding", "int8", EvictOptions(), 1),
    ("llama-padded", "llama", "f16", SINK, 1), ("llama", "llama-padded", "f16", EvictOptions(), 1),
    ("qwen35", "lfm2", "int8", EvictOptions(), 1), ("llama", "granitehybrid-dense", "int4", EvictOptions(), 1),
    ("falcon-h1", "qwen3", "f16", SINK, 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "draft", "codec", "evict", "tail"), CASES)
@settings(max_examples=3)
@given(st.booleans(), st.integers(0, 9), st.integers(1, 90), st.integers(0, 60), st.sampled_from([1.0, 1.3]))
def test_answers_are_those_without_a_draft_model(
    variant: str, draft: str, codec: str, evict: EvictOptions, tail: int, drawn: bool, seed: int, n: int, most: int,
    penalty: float,
) -> None:  # fmt: skip
    engine = engine_of(variant, draft, codec, evict, tail=tail)
    options = replace(DRAWN if drawn else GREEDY, seed=seed, max_tokens=most, repeat_penalty=penalty)
    assert same(*both(engine, PROMPT[:n], options))
    check(engine)


@pytest.mark.parametrize("options", [GREEDY, DRAWN])
@pytest.mark.parametrize(
    ("variant", "codec"),
    [("llama", "f16"), ("llama", "int4"), ("gemma3", "f16"), ("gemma3", "int4"), ("qwen35", "int4")],
)
def test_a_model_guesses_all_of_its_own_tokens(variant: str, codec: str, options: SampleOptions) -> None:
    """Its windows are no multiples of a page: what guesses let go of would be missed."""
    engine, options = engine_of(variant, variant, codec), replace(options, max_tokens=90)
    rows, forward = list[int](), drafts(engine).forward_all
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(drafts(engine), "forward_all", lambda parts: rows.append(len(parts[0][1])) or forward(parts))
        plain, found = both(engine, PROMPT[:60], options)
    usage = found.end.usage
    assert same(plain, found) and usage.drafted_tokens == usage.accepted_tokens > 60
    assert usage.tokens_per_step > 3  # four guesses, fewer before the end of a page
    assert sum(rows) <= 60 + 90  # no row twice
    check(engine)


def test_guesses_follow_a_grammar() -> None:
    engine = engine_of("llama", "llama")
    grammar = json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 30})
    plain, found = both(engine, PROMPT[:60], replace(DRAWN, max_tokens=90, grammar=grammar, ignore_eos=False))
    usage = found.end.usage
    assert same(plain, found) and usage.drafted_tokens == usage.accepted_tokens > 40


@pytest.mark.parametrize(("variant", "draft"), [("llama-padded", "llama"), ("llama", "llama-padded")])
def test_guesses_follow_a_grammar_whoever_has_more_logits(variant: str, draft: str) -> None:
    engine = engine_of(variant, draft)
    grammar = json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    options = replace(DRAWN, max_tokens=20, grammar=grammar, ignore_eos=False)
    assert same(*both(engine, PROMPT[:30], options))
    check(engine)


def test_guesses_are_made_again_where_there_was_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of("llama", "llama"), replace(DRAWN, max_tokens=20)
    expected, forward, refused = alone(engine, PROMPT[:30], replace(options, **OFF)), engine.forward_all, list[int]()
    request = engine.request(seq := engine.new_sequence(), PROMPT[:30], options)

    def refuses_once(rows: list[tuple[Sequence, list[int], bool]]) -> torch.Tensor:
        if request.answering and len(rows[0][1]) > 1 and not refused:
            refused.append(1)
            raise DoesNotFit("the KV pool is full")
        return forward(rows)

    monkeypatch.setattr(engine, "forward_all", refuses_once)
    while not request.finished:
        with suppress(DoesNotFit):  # the scheduler asks again
            engine.step([request])
    assert refused and request.end is not None and request.end.ids == expected.ids
    seq.close()
    check(engine)


def test_another_model_guesses_little_and_the_text_is_the_same() -> None:
    engine, options = engine_of("llama", "granite"), replace(DRAWN, max_tokens=90)
    plain, found = both(engine, PROMPT[:60], options)
    usage = found.end.usage
    assert same(plain, found) and usage.accepted_tokens < 0.15 * usage.drafted_tokens and usage.drafted_tokens > 100


@pytest.mark.parametrize("codec", ["f16", "int8"])
def test_turns_go_on_from_the_rows_of_the_draft_model(codec: str) -> None:
    engine, options = engine_of("llama", "llama", codec), replace(DRAWN, max_tokens=30)
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        first = run(engine, engine.new_sequence(), PROMPT[:60], options, caches=caches)
        turn, rows = [*PROMPT[:60], *first.ids, *PROMPT[60:70]], list[int]()
        forward = drafts(engine).forward_all
        with pytest.MonkeyPatch.context() as patched:
            counted = lambda parts: rows.append(len(parts[0][1])) or forward(parts)  # noqa: E731
            patched.setattr(drafts(engine), "forward_all", counted)
            found = run(engine, seq := engine.new_sequence(), turn, options, caches=caches)
        assert sum(rows) < 10 + 30 + 16 + 4  # but for the page that was being filled
        assert found.ids == alone(engine, turn, replace(options, **OFF)).ids
        seq.close()
    kept(engine).close()


def test_several_requests_have_guesses_in_one_step() -> None:
    engine = engine_of("llama", "qwen3", "int8")
    asked = [(PROMPT[5 * i : 40 + 5 * i], replace(DRAWN, seed=i, max_tokens=50)) for i in range(4)]
    expected = [alone(engine, prompt, replace(options, **OFF)) for prompt, options in asked]
    found = [watched(engine, *each) for each in asked]
    scheduler, events = Scheduler(engine, 3), {id(each.request): each.events for each in found}
    for each in found:
        scheduler.submit(each.request)
    for count in range(1000):
        if scheduler.idle:
            break
        for request, more in scheduler.step():
            events[id(request)] += more
        if count == 20:
            found[1].request.park()
    for one, two in zip(found, expected, strict=True):
        assert one.ids == two.ids and one.end.usage.drafted_tokens > 10
        one.request.seq.close()
    check(engine)


def test_an_answer_for_whose_rows_the_draft_model_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options = engine_of("llama", "llama"), replace(DRAWN, max_tokens=60)
    kept(engine).close()
    expected, take, left = (
        alone(engine, PROMPT[:30], replace(options, **OFF)),
        drafts(engine).pool.take,
        iter(range(4)),
    )

    def refuse(arena: int) -> int:
        if next(left, None) is None:
            raise DoesNotFit("the KV pool is full")
        return take(arena)

    monkeypatch.setattr(drafts(engine).pool, "take", refuse)
    found = alone(engine, PROMPT[:30], options)
    assert found.ids == expected.ids and 0 < found.end.usage.drafted_tokens < 60
    check(engine)


def test_an_answer_that_is_given_up_leaves_nothing() -> None:
    engine = engine_of("llama", "llama")
    for count in (1, 5, 9):
        events = engine.generate(seq := engine.new_sequence(), PROMPT[:60], replace(DRAWN, max_tokens=40))
        for _ in range(count):
            next(events)
        events.close()  # type: ignore[attr-defined]
        seq.close()
        check(engine)


def test_another_context_has_a_draft_model_too() -> None:
    engine = Engine(engine_of("llama", "llama", "int4").loaded)
    answer = alone(engine, PROMPT[:40], replace(GREEDY, max_tokens=20))
    larger = engine.reopened(240, SINK)
    assert drafts(larger).ctx_size == 240 and drafts(larger).retention == larger.retention
    assert same(*both(larger, PROMPT[:40], replace(GREEDY, max_tokens=120)))
    assert alone(larger, PROMPT[:40], replace(GREEDY, max_tokens=20)).ids == answer.ids
    assert larger.beside(CacheOptions(64)).draft is None
    with pytest.raises(UsageError, match="nothing can be guessed with `evict=h2o`"):
        larger.reopened(240, EvictOptions("h2o", budget="128"))
    check(larger)


@pytest.mark.slow
def test_drawn_tokens_have_the_distribution_of_the_model() -> None:
    """Chi-squared of the token behind the first one, which was guessed, over draws that differ by their seeds."""
    engine = engine_of("llama", "granite")
    how = SampleOptions(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0, ignore_eos=True, max_tokens=2)
    drawn = dict[tuple[int, ...], int]()
    request = None
    count = 200
    for seed in range(count):
        seq = engine.new_sequence()
        request = engine.request(seq, PROMPT[:9], replace(how, seed=seed, max_tokens=3))
        while not request.finished:
            engine.step([request])
        ids = tuple(request.history[9:11])
        drawn[ids] = drawn.get(ids, 0) + 1
        seq.close()
    assert request is not None
    seq, chances = engine.new_sequence(), dict[tuple[int, ...], float]()
    sampler = request.sampler
    first = zip(*sampler.distribution(engine.logits(engine.forward(seq, PROMPT[:9])[-1:])[0], PROMPT[:9]), strict=True)
    for a, p in first:
        twin = seq.fork()
        logits = engine.logits(engine.forward(twin, [int(a)])[-1:])[0]
        for b, q in zip(*sampler.distribution(logits, [*PROMPT[:9], int(a)]), strict=True):
            chances[int(a), int(b)] = p * q
        twin.close()
    seq.close()
    assert drawn.keys() <= chances.keys()
    found = sum((drawn.get(ids, 0) - count * p) ** 2 / (count * p) for ids, p in chances.items())
    assert found < len(chances) + 4 * (2 * len(chances)) ** 0.5
