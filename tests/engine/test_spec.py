"""Guessed tokens change speed alone: whatever is guessed, an answer is to the bit what it is without guesses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import alone, same, watched
from engines import DRAWN as PLAINLY_DRAWN
from engines import GREEDY as PLAINLY_GREEDY
from engines import PROMPT, open_tiny, run
from erring import Erring, guessed
from hypothesis import given, settings
from hypothesis import strategies as st
from reusecases import NOWHERE, Told, store_in

from kvcli.codecs import CODECS
from kvcli.errors import UsageError
from kvcli.options import CacheOptions, EvictOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence as Rows
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.engine.spec import pace, texts
from kvcli.runtime.engine.spec.pace import CPU_COSTS, Judgement, Pace
from kvcli.runtime.engine.spec.texts import Pool, Text, Texts
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import CUDA

POLICIES = (
    EvictOptions(), EvictOptions("sink", window=48, keep=5), EvictOptions("window", window=48),
    EvictOptions("shift", keep=3),
)  # fmt: skip
OFF = {"spec": "off"}
DRAWN, GREEDY = (replace(options, spec="suffix") for options in (PLAINLY_DRAWN, PLAINLY_GREEDY))


@functools.cache
def engine_of(
    variant: str, backend: str, codec: str, evict: EvictOptions = EvictOptions(), tail: int = 1, ctx: int = 160
) -> Engine:
    options = CacheOptions(ctx, codec, codec, page_size=16, ubatch=24, tail=tail, evict=evict)
    return open_tiny(variant, backend, options)


options_of_answers = st.builds(
    lambda drawn, seed, n, stop, penalty: replace(
        DRAWN if drawn else GREEDY, seed=seed, max_tokens=n, stop=stop, repeat_penalty=penalty
    ),
    *(st.booleans(), st.integers(0, 9), st.integers(0, 60), st.sampled_from([(), (), ("e",)])),
    st.sampled_from([1.0, 1.3]),
)
CASES = [
    *(("llama", "native", codec, POLICIES[i % 2], 1) for i, codec in enumerate(CODECS)),
    *(("llama", "native", codec, policy, i % 2) for i, (codec, policy) in
      enumerate((codec, policy) for codec in ("int8", "int4") for policy in POLICIES[1:])),
    *((variant, "native", "int8", POLICIES[0], 1) for variant in ("gemma3", "llama4", "gemma4", "gpt-oss")),
    ("llama", "reference", "int4", POLICIES[0], 1), ("falcon-h1", "native", "int4", POLICIES[1], 0),
]  # fmt: skip
MORE = [
    *(("llama", "native", codec, policy, 1) for codec in CODECS for policy in POLICIES[:2]),
    *(("llama", "native", codec, policy, tail) for codec in ("f16", "int8", "int4") for policy in POLICIES[1:]
      for tail in (0, 1)),
    *(("gemma3", "native", codec, POLICIES[0], 1) for codec in ("f16", "int4")),
]  # fmt: skip
CASES += [pytest.param(*case, marks=pytest.mark.thorough) for case in dict.fromkeys(MORE) if case not in CASES]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "backend", "codec", "evict", "tail"), CASES)
@settings(max_examples=4)
@given(options=options_of_answers, n=st.integers(1, 90), wrong=st.sampled_from([2, 5, 1000]), seed=st.integers(0, 99))
def test_answers_are_those_without_guesses(
    variant: str, backend: str, codec: str, evict: EvictOptions, tail: int, options: SampleOptions, n: int, wrong: int,
    seed: int,
) -> None:  # fmt: skip
    engine = engine_of(variant, backend, codec, evict, tail)
    if backend == "reference":  # which takes ten times as long; still beyond a page, and a chunk
        n, options = min(n, 30), replace(options, max_tokens=min(options.max_tokens, 20))
    assert same(*guessed(engine, PROMPT[:n], options, wrong, seed))
    engine.pool.check([])


@pytest.mark.parametrize(
    ("variant", "codec", "tail"),
    [("gemma3", "f16", 1), ("gemma3", "int8", 0), ("gemma3", "int4", 1), ("qwen35", "f16", 1), ("qwen35", "int8", 1)],
)
def test_later_turns_and_caches_find_the_same_rows(variant: str, codec: str, tail: int, tmp_path: Path) -> None:
    """Of the sequence itself, of the tree in memory, and of the store; with the same checkpoints of states."""
    engine, options, found = engine_of(variant, "native", codec, tail=tail), replace(DRAWN, max_tokens=40), []
    expected = alone(engine, PROMPT[:30], replace(options, **OFF)).ids
    for spec in ("off", "suffix"):
        with (
            pytest.MonkeyPatch.context() as patched,
            closing(engine.prompt_caches(store_in(tmp_path / spec), Told())) as c,
        ):
            if spec != "off":
                patched.setattr(engine.session, "guesses", lambda _: Erring(engine.session, expected, 3, 1))
            seq, asked = engine.new_sequence(), replace(options, spec=spec)
            ends = [run(engine, seq, PROMPT[:30], asked, caches=c)]
            patched.undo()
            turn = [*PROMPT[:30], *ends[0].ids, *PROMPT[50:60]]
            assert ends[0].usage.drafted_tokens > (10 if spec != "off" else -1)
            ends.append(run(engine, seq, turn, replace(asked, **OFF), caches=c))
            fresh = engine.new_sequence()
            ends.append(run(engine, fresh, turn, replace(asked, **OFF), caches=c))
            pages = [sorted(each.numbered()) for each in (seq, fresh)]
            found.append(([(e.ids, e.usage.cache_read_tokens) for e in ends], pages, seq.tokens))
            seq.close()
            fresh.close()
    assert found[0] == found[1]
    engine.pool.check([])


def test_several_requests_guess_in_one_step() -> None:
    engine = engine_of("llama", "native", "int8")
    asked = [(PROMPT[5 * i : 40 + 5 * i], replace(DRAWN, seed=i, max_tokens=50)) for i in range(4)]
    expected = [alone(engine, prompt, replace(options, **OFF)) for prompt, options in asked]
    erring = iter([Erring(engine.session, one.ids, 4, i) for i, one in enumerate(expected)])
    with pytest.MonkeyPatch.context() as patched, closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        patched.setattr(engine.session, "guesses", lambda method: next(erring))
        found = [watched(engine, *each, caches=caches) for each in asked]
        scheduler, events = Scheduler(engine, 3), {id(each.request): each.events for each in found}
        for each in found:
            scheduler.submit(each.request)
        while not scheduler.idle:
            for request, more in scheduler.step():
                events[id(request)] += more
    for one, two in zip(found, expected, strict=True):
        assert one.ids == two.ids and one.end.usage.accepted_tokens > 10
        one.request.seq.close()
    engine.pool.check([])


@pytest.mark.parametrize(("variant", "codec"), [("llama", "f16"), ("llama", "int8"), ("qwen35", "int8")])
def test_guesses_behind_tokens_that_a_device_chose(variant: str, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has computed the row of the newest token, too, whose logits are gone. Where a state could not go back behind
    that row, it chooses none."""
    engine, options = engine_of(variant, "native", codec), replace(DRAWN, max_tokens=60)
    expected = alone(engine, PROMPT[:30], replace(options, **OFF))

    def device_tokens(seq: Rows, history: list[int], sampler: Sampler, logits: torch.Tensor) -> Iterator[int]:
        known = list(history)
        assert seq.states is None
        while True:
            known.append(sampler.sample(logits, known, len(known)))
            logits = engine.logits(engine.forward(seq, known[-1:]))[0]
            yield known[-1]

    monkeypatch.setattr(engine, "device_tokens", device_tokens)
    monkeypatch.setattr(engine, "device", Device(CUDA))
    monkeypatch.setattr(engine, "synchronize", lambda: None)
    monkeypatch.setattr(engine.session, "guesses", lambda _: Erring(engine.session, expected.ids, 4, 2))
    found = watched(engine, PROMPT[:30], options)
    while not found.request.finished:
        found.events += engine.step([found.request])[0]
    assert found.ids == expected.ids and 10 < found.end.usage.accepted_tokens < found.end.usage.drafted_tokens
    found.request.seq.close()
    engine.pool.check([])


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_an_answer_that_repeats_itself_takes_fewer_steps(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "took", lambda *_: None)  # steps take what is assumed
    engine = engine_of("llama", "native", "f16", ctx=320)
    options = replace(GREEDY, max_tokens=200, logit_bias={7: 1e4})
    seq = engine.new_sequence()
    usage = run(engine, seq, PROMPT[:20], replace(options, spec=method)).usage
    assert usage.accepted_tokens <= usage.drafted_tokens and usage.decode_steps + usage.accepted_tokens == 199
    assert usage.decode_steps < 120 and usage.tokens_per_step > 1.6
    seq.close()
    usage = run(engine, engine.new_sequence(), PROMPT[:20], replace(options, spec="off")).usage
    assert (usage.drafted_tokens, usage.accepted_tokens, usage.decode_steps) == (0, 0, 199)


def test_a_method_that_is_none_is_refused() -> None:
    engine = engine_of("llama", "native", "f16")
    with pytest.raises(UsageError, match="`spec` must be suffix, ngram, draft, mtp or off, not tree"):
        engine.request(engine.new_sequence(), PROMPT[:9], replace(GREEDY, spec="tree"))


def naive(ids: list[int], most: int, limit: int) -> list[int]:
    """What followed the longest end of a text, of powers of two up to `limit`, that stood before: all places."""
    for length in (n for n in reversed(texts.LENGTHS) if n <= limit):
        found = [i for i in range(length, len(ids)) if ids[i - length : i] == ids[-length:]]
        if found:
            return [ids[found[-1]]] if most else []
    return []


@given(st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_ngram_takes_what_followed_last(ids: list[int]) -> None:
    found = Texts("ngram", None)
    found.extend(ids)
    assert found.guess(1).ids == naive(ids, 1, texts.NGRAM_MOST)


def test_suffix_takes_what_followed_most_often_also_in_earlier_answers() -> None:
    pool = Pool()
    pool.add([1, 2, 3, 4, 9])
    pool.add([1, 2, 3, 4, 8, 6])
    pool.add([1, 2, 3, 4, 8, 5])
    found = Texts("suffix", pool.text)
    found.extend([0, 1, 2, 3, 4])
    assert found.guess(3) == ([8, 5], 4), "of 5 and 6 the newest, and no token of another answer"
    found.extend([7, 0, 1, 2, 3, 4])
    assert found.guess(2) == ([8, 5], 4), "ends of 2, 4, 8, ... tokens are looked for"
    found.extend([7, 6, 0, 1, 2, 3, 4, 7, 0, 1, 2, 3, 4])
    assert found.guess(2) == ([7, 6], 8)
    assert Texts("ngram", pool.text).guess(3).ids == []


def test_a_text_that_repeats_goes_on_with_what_is_guessed() -> None:
    found = Texts("suffix", None)
    found.extend([5, 6, 7, 5, 6, 7, 5, 6])
    assert found.guess(7).ids == [7, 5, 6, 7, 5, 6, 7]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "POOL_TOKENS", 64)
    pool = Pool()
    for i in range(30):
        pool.add([i, i + 1, i + 2])
        assert len(pool.text.ids) <= 64
    assert pool.text.find([29, 30], 4)[0] == 2
    text = Text()
    text.extend(range(1000))
    assert text.find([3, 4], 4) == (2, [5])


def test_guesses_that_are_wrong_are_no_longer_computed_and_seen_to_be_right_again() -> None:
    judgement = Judgement(Pace(CPU_COSTS))
    assert judgement.worth(32, 15) == 3 and judgement.worth(2, 15) == 0
    for _ in range(20):
        judgement.saw(32, False)
    assert judgement.worth(32, 15) == 0
    for _ in range(60):
        judgement.saw(32, True)
    assert judgement.worth(32, 15) > 0 and judgement.worth(32, 2) == 2


def test_steps_that_take_longer_than_they_are_worth() -> None:
    paced = Pace(CPU_COSTS)
    for _ in range(200):
        paced.took(1, 1, 1.0)
        paced.took(4, 4, 5.0)
    assert 4.5 < paced.costs[0] <= 5.0 and Judgement(paced).worth(32, 3) == 0
    for _ in range(3000):
        paced.took(1, 1, 1.0)
    assert abs(paced.costs[0] - CPU_COSTS[0]) < 0.1, "the measurement is forgotten"
    assert pace.ROWS[-1] <= 16


def test_a_step_that_captured_a_graph_says_nothing_of_others() -> None:
    paced = Pace(CPU_COSTS)
    paced.took(1, 1, 0.001)
    for rows in (4, 8, 16):
        paced.took(rows, 1, 1.0)
    assert paced.may and tuple(paced.costs) == CPU_COSTS


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.floats(0.5, 9.0)), max_size=200))
def test_what_guesses_cost_is_bounded(steps: list[tuple[bool, int, float]]) -> None:
    """Whatever they take, and however seldom they are right."""
    paced, lost, other, worst = Pace(CPU_COSTS), 0.0, 0, 0.0
    for guesses, tokens, seconds in [(False, 1, 1.0), *steps]:
        if guesses and paced.may:
            paced.took(4, tokens, seconds)
            lost, worst = lost + seconds - tokens, max(worst, seconds)
        else:
            paced.took(1, 1, 1.0)
            other += 1
        assert lost < 0.015 * other + 1.0 + worst
