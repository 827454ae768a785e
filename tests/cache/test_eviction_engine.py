"""Engines that evict, on tiny models: what comes out is a function of tokens and positions, equal to the bit however it
was come by; nothing ends at the context's end, and nothing is cut or forgotten without a word.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engines import GREEDY, last_logits, open_tiny, run, states
from fakes import FakeTemplate
from kernelcases import same_bits
from reusecases import Told

from kvcli.cli.commands.chat.chatoptions import ChatOptions
from kvcli.cli.commands.chat.session import ChatSession
from kvcli.cli.commands.chat.slash import handle
from kvcli.cli.interrupt import Interrupts
from kvcli.errors import ContextOverflow, UsageError
from kvcli.options import FORGET_NOTHING, CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache.sessions import Branches
from kvcli.runtime.text.conversation import Conversation

CTX, SIZE = 80, 16
TEXT = torch.randint(3, 370, (180,), generator=torch.manual_seed(9)).tolist()
SINK = EvictOptions("sink", 0, 5)
REFERENCE = ("llama", "reference", ("int4", "int8"), EvictOptions("sink", 30, 20))
CASES = [
    ("llama", "native", ("f16", "f16"), SINK),
    REFERENCE,
    pytest.param(("llama", "native", ("fp8", "int6"), EvictOptions("window", 17)), marks=pytest.mark.thorough),
    ("llama", "native", ("int4", "int8"), EvictOptions("shift", 20, 5)),
    ("gemma3", "native", ("int8", "int4"), SINK),
]


def open_evicting(variant: str, backend: str, types: tuple[str, str], evict: EvictOptions, **more: Any) -> Engine:
    return open_tiny(variant, backend, CacheOptions(CTX, *types, page_size=SIZE, evict=evict, **more))


def name(case: tuple[str, str, tuple[str, str], EvictOptions]) -> str:
    return f"{case[0]}-{case[1]}-{'/'.join(case[2])}-{case[3].policy}"


# Of tests that generate, which takes the reference long: it has the same rows, and what stands above is one code.
GENERATES = pytest.mark.parametrize(
    "engine",
    [pytest.param(case, marks=pytest.mark.thorough) if case is REFERENCE else case for case in CASES],
    indirect=True,
    ids=name,
)


@pytest.fixture(scope="module", params=CASES, ids=name)
def engine(request: pytest.FixtureRequest) -> Engine:
    found = open_evicting(*request.param)
    assert found.retention is not None and any("old tokens are forgotten" in x for x in found.notices)
    return found


def fresh(engine: Engine, ids: list[int]) -> torch.Tensor:
    """The same from an empty cache, in one piece."""
    seq = engine.new_sequence()
    found = states(engine, seq, ids)
    seq.close()
    return found


# --- functions of the position


@pytest.mark.slow
def test_any_chunking_gives_the_same_states(engine: Engine):
    whole = fresh(engine, TEXT)
    assert whole.isfinite().all()
    for ubatch in (1, 7, 16, 17, 48) if engine.loaded.backend == "native" else (48,):
        seq = engine.new_sequence()
        assert same_bits(states(engine, seq, TEXT, ubatch), whole), ubatch
        assert seq.evicted == engine.retention.gap(len(TEXT) - 1) > 0 and seq.kept <= CTX
        seq.close()


@pytest.mark.slow
def test_forks_undo_and_replay_give_the_same_states(engine: Engine):
    others = [x + 1 for x in TEXT[:60]]
    whole = fresh(engine, TEXT)
    branch = fresh(engine, TEXT[:150] + others)[150:]
    seq = engine.new_sequence()
    states(engine, seq, TEXT[:150], 33)
    twin = seq.fork()
    assert same_bits(states(engine, seq, TEXT[150:], 40), whole[150:])
    assert same_bits(states(engine, twin, others, 9), branch)
    for wanted in (179, 177, 120, 3):
        kept = seq.rewind_to(wanted)
        assert kept in (0, wanted, wanted // SIZE * SIZE)
        assert kept == 0 or wanted > 170 or wanted <= engine.retention.keep  # what an old window held is gone
        assert same_bits(states(engine, seq, TEXT[kept:], 50), whole[kept:]), wanted
    seq.close()
    twin.close()


def test_a_text_that_fits_is_read_as_if_nothing_were_evicted(engine: Engine):
    n = engine.retention.whole
    plain = open_tiny(
        "gemma3" if engine.config.arch == "gemma3" else "llama",
        engine.loaded.backend,
        CacheOptions(CTX, *engine.loaded.cache_types, page_size=SIZE),
    )
    expected = fresh(plain, TEXT[: n + 1])
    seq = engine.new_sequence()
    found = states(engine, seq, TEXT[:n])
    assert same_bits(found, expected[:-1]) and seq.evicted == 0
    assert engine.retention.until_next(n - 1) == 1
    after = states(engine, seq, TEXT[n : n + 1])
    assert seq.evicted > 0 and not same_bits(after, expected[-1:])
    seq.close()


@pytest.mark.parametrize("backend", ("native", "reference"))
@pytest.mark.parametrize("variant", ("llama", "llama-linear-rope", "llama-llama3-rope"))
def test_with_one_layer_it_is_as_if_the_middle_had_never_been(variant: str, backend: str):
    """Rows of a first layer know nothing of each other: so a plain prompt without the evicted tokens is the oracle, for
    every kind of RoPE."""
    evicting = open_evicting(variant, backend, ("f32", "f32"), EvictOptions("sink", 32, 5))
    plain = open_tiny(variant, backend, CacheOptions(CTX, "f32", "f32", page_size=SIZE))
    for each in (evicting, plain):
        each.model.weights = replace(each.model.weights, sublayers=each.model.weights.sublayers[:2])
    assert evicting.retention == Rolling(5, 32, SIZE)
    hidden = fresh(evicting, TEXT)
    for position in (47, 48, 111, 112, 179):
        first = evicting.retention.start(position)
        left = TEXT[:5] + TEXT[max(5, first) : position + 1]
        expected = fresh(plain, left)[-1]
        assert (hidden[position] - expected).abs().max() < 1e-4, position


# --- generation


@pytest.mark.slow
@GENERATES
def test_answers_go_on_and_max_tokens_is_obeyed(engine: Engine):
    seq = engine.new_sequence()
    for n in (30, 90):
        end = run(engine, seq, TEXT[:50], replace(GREEDY, max_tokens=n))
        assert (end.finish_reason, len(end.ids)) == ("length", n)
        held = [seq.pages(a) for a in range(len(engine.layout.arenas))]
        assert all(x <= most for x, most in zip(held, engine.layout.arena_pages(CTX + 1, 1), strict=True)), held
    assert end.losses[0].startswith("evicted: ") and end.prompt_evicted == engine.retention.gap(49)
    assert seq.length == 139 and seq.kept <= CTX
    seq.close()


@pytest.mark.slow
@GENERATES
def test_a_turn_on_an_evicted_cache_is_a_replay(engine: Engine):
    first, second = engine.new_sequence(), engine.new_sequence()
    answer = run(engine, first, TEXT[:60], replace(GREEDY, max_tokens=70))
    context = TEXT[:60] + answer.ids + TEXT[60:90]
    with pytest.raises(ContextOverflow, match=f"{len(context)} tokens"):
        run(engine, second, context)

    def turn(seq: Sequence) -> End:
        events = list(engine.generate(seq, context, GREEDY, history=True))
        assert isinstance(events[-1], End)
        return events[-1]

    live, replayed = turn(first), turn(second)
    assert live.usage.cache_read_tokens >= 112 and replayed.usage.cache_read_tokens == 0
    assert live.ids == replayed.ids and live.prompt_evicted == replayed.prompt_evicted > 0
    assert same_bits(last_logits(engine, first, [9]), last_logits(engine, second, [9]))
    first.close()
    second.close()


def test_prompts_up_to_the_context_are_taken(engine: Engine):
    seq = engine.new_sequence()
    end = run(engine, seq, TEXT[:CTX])
    assert end.finish_reason == "length" and end.prompt_evicted == engine.retention.gap(CTX - 1)
    with pytest.raises(ContextOverflow, match="81 tokens, 1 more than the context of 80"):
        run(engine, seq, TEXT[: CTX + 1])
    seq.close()


def test_the_whole_prompt_is_kept():
    engine = open_evicting("llama", "native", ("f16", "f16"), EvictOptions("sink", keep=-1))
    terms = engine.terms
    assert terms.keeps_prompt and not engine.notices
    engine = Engine(engine.loaded, terms.keeping(30))
    assert engine.retention == Rolling(30, 32, SIZE) and not engine.terms.keeps_prompt
    seq = engine.new_sequence()
    run(engine, seq, TEXT[:30], replace(GREEDY, max_tokens=200))
    assert [n for n in seq._lists[0].closed.pages if n < 5] == [0, 1] and seq.evicted > 100
    with pytest.raises(UsageError, match="64 for the 60 kept"):
        terms.keeping(60)


@pytest.mark.parametrize("ctx", (1, 15, 16, 40, 63))
def test_a_context_too_short_to_evict_is_refused(ctx: int):
    with pytest.raises(UsageError, match=f"the context of {ctx} tokens is too short"):
        open_tiny("llama", "auto", CacheOptions(ctx, page_size=32, evict=EvictOptions("window")))


# --- chats


class Sink:
    """Keeps answers."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def start(self, *_: Any) -> None: ...
    def prefill(self, *_: Any) -> None: ...
    def token(self, *_: Any) -> None: ...
    def end(self, result: Any) -> None:
        self.results.append(result)


def chat(engine: Engine, system: str | None = None) -> ChatSession:
    conversation = Conversation(engine.tokenizer, FakeTemplate(), system)
    sampling = replace(GREEDY, max_tokens=20, seed=1)
    options = ChatOptions("tiny", sampling, True, True, FORGET_NOTHING, PromptCacheOptions())
    return ChatSession(engine, conversation, options, Sink(), Interrupts(lambda *_: None), Branches(), Told())


@pytest.mark.slow
@GENERATES
def test_a_chat_goes_on_beyond_the_context(engine: Engine, capsys: pytest.CaptureFixture[str]):
    live = chat(engine)
    for line in ("hello", "and then", "more", "even more", "/ctx"):
        handle(live, line)
    err = capsys.readouterr().err
    assert err.count("kv: the context is full: ") == 1 and " until the next eviction) " in err
    assert f"of {CTX} tokens" in err and " evicted, " in err and "what was evicted is forgotten" in err
    assert live.sequence.evicted > 0 and live.sequence.kept <= CTX
    reused = [r.end.usage.cache_read_tokens for r in live.sink.results]
    assert all(b > a for a, b in pairwise(reused))  # no turn read the history again

    with pytest.raises(ContextOverflow, match="the message needs"):
        handle(live, "long " * 90)
    length = live.sequence.length
    handle(live, "last")
    assert live.sink.results[-1].end.usage.cache_read_tokens >= length - SIZE

    # After undone turns all is as in a chat that never had them.
    handle(live, "/undo")
    handle(live, "/undo")
    handle(live, "other")
    other = chat(engine)
    for line in ("hello", "and then", "more", "other"):
        handle(other, line)
    assert live.sink.results[-1].end.ids == other.sink.results[-1].end.ids
    assert live.sequence.tokens == other.sequence.tokens
    handle(live, "/clear")
    assert live.sequence.length == 0
    live.close()
    other.close()
    engine.pool.check([])


def test_a_system_message_longer_than_the_window(capsys: pytest.CaptureFixture[str]):
    """It is read, and what is out of the window is gone, unless it is kept; longer than the context is refused."""
    system = "be " * 7
    engine = open_evicting("llama", "native", ("f16", "f16"), EvictOptions("sink", 16, 4))
    session = chat(engine, system)
    handle(session, "hi")
    assert session.sink.results[0].end.prompt_evicted > 0
    assert "the context is full" in capsys.readouterr().err
    kept = open_evicting("llama", "native", ("f16", "f16"), EvictOptions("sink", keep=-1))
    conversation = Conversation(kept.tokenizer, FakeTemplate(), "be")
    n = conversation.system_tokens()
    assert 0 < n < conversation.alone("hi") and conversation.tokens == []
    assert kept.terms.keeping(n).layout.retention.keep == n
    with pytest.raises(ContextOverflow, match="the message needs"):
        handle(chat(engine, "be " * 100), "hi")
