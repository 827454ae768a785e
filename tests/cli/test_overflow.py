"""Prompts that are longer than the context, and the flags for what happens where it is full: nothing is lost unsaid."""

from __future__ import annotations

import json

import pytest
import tiny
from calling import Caller
from conftest import KvHere
from fakes import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from kvcli.cli.overflow import Cut, answer_leaves, cut_text
from kvcli.errors import ContextOverflow
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.engine.terms import advised
from kvcli.runtime.text.tokenizer import Tokenizer


@given(st.integers(1, 300), st.integers(0, 50), st.integers(0, 50), st.integers(1, 300), st.booleans())
def test_a_cut_takes_a_range_of_the_text_and_nothing_else(text: int, before: int, behind: int, room: int, middle: bool):
    ids, span = list(range(before + text + behind)), (before, before + text)
    if len(ids) <= room:
        return
    policy = "truncate-middle" if middle else "truncate-start"
    if room <= before + behind:
        with pytest.raises(ContextOverflow, match=f"the prompt has {len(ids)} tokens, {len(ids) - room} more than"):
            cut_text(ids, span, policy, room, room, lambda tokens: True)
        return
    left, cut = cut_text(ids, span, policy, room, room, lambda tokens: True)
    assert len(left) == room and left == ids[: cut.start] + ids[cut.end :]
    assert before <= cut.start < cut.end <= before + text
    head, tail = cut.start - before, before + text - cut.end
    assert head - tail in (0, 1) if middle else head == 0


def test_a_larger_context_is_advised_only_where_it_fits():
    for fits in (True, False):
        with pytest.raises(ContextOverflow) as raised:
            cut_text(
                list(range(90)), (10, 15), "truncate-start", 60, 50, lambda tokens, fits=fits: fits and tokens == 90
            )
        assert raised.value.hint == "shorten the system message" + (", or use --ctx-size 90 or more" if fits else "")


def test_the_context_that_is_advised_has_room_for_the_answer():
    def fits(tokens: int) -> bool:
        return tokens <= 6000

    cases = [(90, -1), (90, 0), (900, 100), (900, 124), (4000, 200), (5000, -1), (5900, -1), (7000, -1)]
    assert [advised(*case, fits) for case in cases] == [768, 256, 1024, 1024, 5120, 5000, 5900, 0]
    assert advised(900, 500, fits, 1100) == 1100 and advised(1200, 500, fits, 1100) == 1792


def test_room_for_the_answer():
    assert [answer_leaves(1000, n, None) for n in (-1, 0, 10, 500, 800)] == [750, 1000, 990, 500, 500]
    assert answer_leaves(1024, 500, Rolling(4, 896, 64)) == 959  # the last of them sees all others
    assert answer_leaves(1024, -1, Rolling(4, 100, 64)) == 163


# --- kv run


@pytest.fixture
def kv(monkeypatch, capfdbinary):
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(["yes"], ctx_size=60)
    return caller


TEXT = "".join(chr(ord("A") + i % 26) for i in range(70))


def asked(kv: Caller) -> str:
    return kv.engine.tokenizer.decode(kv.engine.calls[-1][0])


def test_a_long_prompt_is_refused_with_both_numbers(kv):
    outcome = kv("run", TEXT)
    assert (outcome.code, outcome.out, kv.engine.calls) == (5, "", [])
    assert "tokens, the context 60" in outcome.err


@pytest.mark.parametrize(
    ("policy", "left", "first"),
    [("truncate-start", TEXT[39:], 7), ("truncate-middle", TEXT[:16] + TEXT[55:], 23)],
)
def test_a_cut_leaves_the_template_and_says_what_went(kv, policy, left, first):
    outcome = kv("run", TEXT, "--on-overflow", policy, "-n", "10", "--json")
    assert outcome.code == 0
    assert asked(kv) == f"user:{left}assistant:" and len(kv.engine.calls[-1][0]) == 50
    said = f"the prompt of 89 tokens is longer than the context of 60: its tokens {first} to {first + 38} (39) were cut"
    assert said in outcome.err and policy in outcome.err
    cut = {"policy": policy, "prompt_tokens": 89, "ctx_size": 60, "first_token": first}
    cut["end_token"] = first + 39
    assert json.loads(outcome.out)["prompt_cut"].items() >= cut.items()


def test_a_prompt_that_fits_is_not_touched(kv):
    outcome = kv("run", TEXT[:40], "--on-overflow", "truncate-start", "--json")
    assert asked(kv) == f"user:{TEXT[:40]}assistant:"
    value = json.loads(outcome.out)
    assert value["prompt_cut"] is None and value["kv"]["evicted_tokens"] == 0 and value["kv"]["lossless"]


def test_the_start_of_raw_text_is_behind_the_bos(kv):
    outcome = kv("run", TEXT, "--raw", "--on-overflow", "truncate-start", "-n", "30")
    assert outcome.code == 0 and asked(kv) == TEXT[41:] and kv.engine.calls[-1][0][0] == kv.engine.tokenizer.bos_id


def test_a_system_message_is_never_cut(kv):
    outcome = kv("run", "short", "--system", TEXT, "--on-overflow", "truncate-start")
    assert outcome.code == 5 and kv.engine.calls == []
    assert "only 5 of them are text that may be cut" in outcome.err and "or use --ctx-size" in outcome.err
    kv.engine.memory_tokens = 60
    assert "--ctx-size" not in kv("run", "short", "--system", TEXT, "--on-overflow", "truncate-start").err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--on-overflow", "middle"), "--on-overflow must "),
        (("--evict", "lru"), "--evict must "),
        (("--window", "100"), "--window needs --evict"),
        (("--keep", "4"), "--keep needs --evict shift or --evict sink"),
        (("--evict", "window", "--keep", "4"), "--keep needs --evict shift or --evict sink, not window"),
        (("--evict", "sink", "--window", "63"), "less than a page of 64 tokens"),
        (("--evict", "sink", "--window", "0"), "--window is 0"),
        (("--evict", "sink", "--window", "x"), "--window must "),
        (("--evict", "sink", "--keep", "-2"), "--keep must "),
    ],
)
def test_flags_that_cannot_be_are_refused_before_a_model_is_opened(kv, args, message):
    outcome = kv("run", "hello", *args)
    assert (outcome.code, outcome.out, kv.opened) == (2, "", [])
    assert message in outcome.err and outcome.err.count("\n") <= 2


def test_flags_reach_the_options(kv):
    kv("run", "hello", "--evict", "sink", "--window", "1k", "--keep", "-1")
    evict = kv.opened[0][1].evict
    assert (evict.policy, evict.window, evict.keep) == ("sink", 1024, -1)
    kv("chat", "--script", "--evict", "window")
    assert kv.opened[1][1].evict.policy == "window"


# --- with a model


def run(kv_here: KvHere, *args: str) -> tuple[int, dict, str]:
    model = str(tiny.make("llama").path)
    flags = (
        "-m",
        model,
        "--raw",
        "-t",
        "1",
        "--temp",
        "0",
        "--ignore-eos",
        "--page-size",
        "16",
        "--no-stdin",
        "--json",
    )
    code, out, err = kv_here("run", *flags, *args)
    return code, json.loads(out), err


@pytest.mark.slow
def test_a_run_beyond_the_context(kv_here: KvHere):
    code, value, err = run(kv_here, "abc", "-c", "64", "--evict", "sink", "-n", "120", "-ct", "int8", "--stats")
    assert (code, value["finish_reason"], value["usage"]["completion_tokens"]) == (0, "length", 120)
    kv = value["kv"]
    assert (kv["keep"], kv["window"], kv["ctx_size"]) == (4, 32, 64)
    assert kv["tokens"] <= 64 and kv["tokens"] + kv["evicted_tokens"] == value["usage"]["prompt_tokens"] + 119
    assert not kv["lossless"] and kv["losses"][0].startswith("evicted: ") and kv["losses"][1].startswith("quantized: ")
    assert any("old tokens are forgotten: the first 4 and the last 32" in x for x in value["warnings"])
    assert f"tok ({kv['evicted_tokens']} evicted, " in err and "until the next eviction)" in err
    total = value["usage"]["prompt_tokens"] + 119
    gone = f"evicted during the answer: tokens 4 to {3 + kv['evicted_tokens']} of {total}"
    assert f"kv: warning: {gone}\n" in err and value["warnings"][-1] == gone


def test_a_prompt_that_is_evicted_in_part_is_told(kv_here: KvHere):
    prompt = "a b c d e f g h i j k l m n o p q r s t u v w x y z" * 2
    code, value, err = run(kv_here, prompt[:60], "-c", "128", "--evict", "sink", "--window", "16", "-n", "1")
    assert code == 0 and value["prompt_evicted_tokens"] > 0
    first = f"evicted before the answer began: tokens 4 to {3 + value['prompt_evicted_tokens']} of"
    assert first in err and any(first in warning for warning in value["warnings"]) and "during" not in err
    code, value, err = run(kv_here, prompt, "-c", "40", "--evict", "window", "-n", "1")
    assert code == 5 and "more than the context of 40" in value["error"]["message"]


def test_a_text_that_no_tokens_make_short_enough_is_not_tokenized(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch):
    cut = run(kv_here, "abc " * 9000, "-c", "64", "-n", "1", "--on-overflow", "truncate-start")
    assert cut[0] == 0 and "the prompt of 27,001 tokens is longer" in cut[2]
    monkeypatch.setattr(Tokenizer, "encode_segments", None)
    code, value, _ = run(kv_here, "abc " * 9000, "-c", "64", "-n", "1")
    assert code == 5
    assert "has 36,000 characters: more tokens than the context of 64 has room for" in value["error"]["message"]


@pytest.mark.parametrize(("keep", "code"), [("-1", 0), ("20", 0), ("33", 2)])
def test_kept_prompts(kv_here: KvHere, keep: str, code: int):
    found, value, _ = run(kv_here, "abc", "-c", "64", "--evict", "sink", "--keep", keep, "-n", "80")
    assert found == code
    if code == 0:
        kept = value["usage"]["prompt_tokens"] if keep == "-1" else 20
        assert value["kv"]["keep"] == kept and value["usage"]["completion_tokens"] == 80
        assert [warning.startswith("old tokens are forgotten") for warning in value["warnings"]] == [True, False]
    else:
        assert (
            "48 for the 33 kept in whole pages + at least 16 of window + 16 more before old ones go"
            in value["error"]["message"]
        )


def test_a_cut_is_a_sentence():
    said = str(Cut("truncate-start", 5000, 4096, 12, 1500))
    assert "5,000 tokens" in said and "4,096" in said and "12 to 1,499 (1,488)" in said
