"""Answers whose thinking is told apart, begun for the model, or ended after its budget; log probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from engines import DRAWN, GREEDY, PROMPT, fresh, open_tiny

from kvcli.errors import UsageError
from kvcli.options import SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End, Token
from kvcli.runtime.engine.scheduler import Scheduler
from kvcli.runtime.text.reasoning import STYLES, Thinking

THINK = STYLES[0]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_tiny("llama", "auto")


def thinking_of(engine: Engine, tail: str = "<think>\n", lead: str = "", budget: int = -1) -> Thinking:
    return Thinking((THINK,), tail, lead, frozenset(), lambda text: engine.tokenizer.encode(text, False), budget)


def answer(engine: Engine, options: SampleOptions, thinking: Thinking | None) -> tuple[str, str, End, list[Token]]:
    """Text, thinking, the end, and the tokens of one answer to `PROMPT`."""
    seq = engine.new_sequence()
    events = list(engine.generate(seq, PROMPT[:30], options, thinking=thinking))
    end, tokens = events[-1], [event for event in events if isinstance(event, Token)]
    assert isinstance(end, End)
    assert seq.tokens == [*PROMPT[:30], *end.ids][: seq.length]
    seq.close()
    text, reasoning = ("".join(getattr(t, name) for t in tokens) + getattr(end, name) for name in ("text", "reasoning"))
    return text, reasoning, end, tokens


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_is_ended_after_its_budget(engine, budget):
    options = replace(GREEDY, max_tokens=24, loop_stop=False)
    closing = engine.tokenizer.encode(THINK.closing, add_bos=False)
    text, reasoning, end, _ = answer(engine, options, thinking_of(engine, budget=budget))
    free = answer(engine, options, None)[2].ids
    assert end.ids[: budget + len(closing)] == [*free[:budget], *closing]
    assert end.usage.reasoning_tokens == budget + len(engine.tokenizer.encode("\n</think>", False))
    assert len(end.ids) == 24
    assert reasoning == engine.tokenizer.decode(free[:budget], continues=True).strip()
    assert text == engine.tokenizer.decode(end.ids[budget + len(closing) :], continues=True).lstrip()
    # What comes then is what the model says of this text, prefilled.
    known = [*PROMPT[:30], *end.ids[:-1]]
    with torch.inference_mode():
        assert int(masked(engine, fresh(engine, known)[0]).argmax()) == end.ids[-1]


def masked(engine: Engine, logits: torch.Tensor) -> torch.Tensor:
    return logits.index_fill(0, torch.tensor(sorted(engine.tokenizer.eog_ids)), float("-inf"))


def test_without_a_budget_nothing_is_forced_and_nothing_lost(engine):
    text, reasoning, end, _ = answer(engine, GREEDY, thinking_of(engine))
    assert text == "" and end.ids == answer(engine, GREEDY, None)[2].ids
    assert reasoning == engine.tokenizer.decode(end.ids, continues=True).strip()
    assert end.usage.reasoning_tokens == len(end.ids)
    outside = answer(engine, GREEDY, thinking_of(engine, tail="", budget=0))
    assert outside[:2] == (engine.tokenizer.decode(end.ids, continues=True), "")


def test_a_budget_beyond_the_limits_ends_as_they_say(engine):
    end = answer(engine, replace(GREEDY, max_tokens=3), thinking_of(engine, budget=5))[2]
    assert (end.finish_reason, len(end.ids)) == ("length", 3)


def test_what_is_given_comes_first_and_is_no_token(engine):
    text, reasoning, end, tokens = answer(engine, GREEDY, thinking_of(engine, "", "<think>a</think>Yes,"))
    assert (text, reasoning) == ("Yes," + engine.tokenizer.decode(end.ids, continues=True), "a")
    assert [token.id for token in tokens] == [None, *end.ids]


def test_stop_strings_are_looked_for_in_the_answer_alone(engine):
    free = answer(engine, GREEDY, None)[0]
    options = replace(GREEDY, stop=(free[2:5],))
    assert answer(engine, options, thinking_of(engine))[2].finish_reason == "length"
    assert answer(engine, options, thinking_of(engine, tail=""))[2].finish_reason == "stop"


def test_several_answers_have_thinking_of_their_own(engine):
    options, first = replace(DRAWN, loop_stop=False), engine.new_sequence()
    plans = [thinking_of(engine, budget=budget) for budget in (2, 4)]
    twin = engine.request(engine.new_sequence(), PROMPT[:30], replace(options, sequence=1), thinking=plans[1])
    request = engine.request(first, PROMPT[:30], options, twins=[twin], thinking=plans[0])
    scheduler = Scheduler(engine, 2)
    scheduler.submit(request)
    scheduler.submit(twin)
    while not scheduler.idle:
        scheduler.step()
    closing = len(engine.tokenizer.encode("\n</think>", False))
    assert [each.end.usage.reasoning_tokens for each in (request, twin)] == [min(12, n + closing) for n in (2, 4)]
    assert [len(each.end.ids) for each in (request, twin)] == [12, 12]
    for each in (request, twin):
        each.seq.close()


@pytest.mark.parametrize("temperature", [0.0, 4.0])
def test_log_probabilities_are_of_the_models_own_distribution(engine, temperature):
    options = replace(DRAWN, temperature=temperature, top_k=3, repeat_penalty=1.3, logprobs=4)
    _, _, end, tokens = answer(engine, options, None)
    for number, token in enumerate(tokens):
        with torch.inference_mode():
            logits = fresh(engine, [*PROMPT[:30], *end.ids[:number]])[0]
        expected = torch.log_softmax(logits.double(), 0)
        assert token.logprobs.chosen.id == token.id and len(token.logprobs.top) == 4
        for each in (token.logprobs.chosen, *token.logprobs.top):
            assert each.logprob == pytest.approx(float(expected[each.id]), abs=1e-4)
            assert each.token == engine.tokenizer.piece(each.id)
        values = [each.logprob for each in token.logprobs.top]
        assert values == sorted(values, reverse=True) and values[0] == pytest.approx(float(expected.max()), abs=1e-4)


def test_log_probabilities_are_told_where_they_are_asked_for(engine):
    assert all(token.logprobs is None for token in answer(engine, GREEDY, None)[3])
    assert all(token.logprobs.top == () for token in answer(engine, replace(GREEDY, logprobs=0), None)[3])
    with pytest.raises(UsageError, match="`logprobs` must be a whole number from 0 to 100"):
        answer(engine, replace(GREEDY, logprobs=-1), None)
