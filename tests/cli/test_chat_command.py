"""`kv chat` with an engine that has no weights, as a script and typed; the real model: test_run_real.py."""

from __future__ import annotations

import json
import os
import signal

import pytest
from calling import Caller
from chatcases import asked, chat
from fakes import FakeEngine, FakeTemplate
from jsonchecks import check

from kvcli.cli.commands.chat import lineeditor
from kvcli.cli.sinks import TextSink
from kvcli.errors import OutputError
from kvcli.runtime.promptcache import sessions


@pytest.fixture
def kv(monkeypatch, capfdbinary):
    caller = Caller(monkeypatch, capfdbinary)
    caller.drafts = []  # what the editor began with, message by message
    caller.engine = FakeEngine(["one", "two", "three", "four", "five"])
    return caller


# --- scripts


def test_a_script_answers_line_by_line_and_ends_with_0(kv):
    outcome = chat(kv, "first\n\nsecond\r\nthird")
    assert (outcome.code, outcome.out, outcome.err) == (0, "one\ntwo\nthree\n", "")
    assert asked(kv) == "user:firstassistant:oneuser:secondassistant:twouser:thirdassistant:"


def test_an_empty_script_ends_with_0(kv):
    assert chat(kv, "") == type(chat(kv, ""))(0, "", "")


def test_messages_may_end_with_nul(kv):
    outcome = chat(kv, "two\nlines\0second\r", "-0")
    assert outcome.out == "one\ntwo\n"
    assert asked(kv, 0) == "user:two\nlinesassistant:"
    assert asked(kv, 1).endswith("user:second\rassistant:")


def test_messages_may_have_several_lines(kv):
    script = 'one\\\nmore\n"""a\nb"""\nlast'
    assert chat(kv, script).out == "one\ntwo\nthree\n"
    assert asked(kv) == "user:one\nmoreassistant:oneuser:a\nbassistant:twouser:lastassistant:"
    assert asked(kv, 0) == "user:one\nmoreassistant:"
    kv.engine.answers = ["four"]
    chat(kv, 'a\\\n"""', "-0")
    assert asked(kv) == 'user:a\\\n"""assistant:', "each is whole"


def test_a_script_has_an_object_for_each_answer(kv):
    outcome = chat(kv, "first\n/stats\nsecond\n/regen\n", "--json")
    values = [json.loads(line) for line in outcome.out.splitlines()]
    assert [value["text"] for value in values] == ["one", "two", "three"] and outcome.code == 0
    for value in values:
        check("chat", value)
    outcome = chat(kv, "third\n/nonsense\n", "--json")
    answer, error = map(json.loads, outcome.out.splitlines())
    assert answer["text"] == "four" and error["error"]["code"] == 2 == outcome.code and "text" not in error
    check("failure", error)
    kv.engine.answers = ["five"]
    kv.engine.before_token = lambda n: os.kill(os.getpid(), signal.SIGTERM) if n == 1 else None
    outcome = chat(kv, "third\n", "--json")
    answer, error = map(json.loads, outcome.out.splitlines())
    assert answer["finish_reason"] == "interrupted" and answer["text"] == "fi"
    assert error["error"]["code"] == 143 == outcome.code


def test_turns_reuse_the_cache_and_the_stats_say_so(kv):
    outcome = chat(kv, "first\nsecond\n", "--stats")
    first, second = outcome.err.splitlines()
    n_first = len(kv.engine.calls[0][0])
    n_second = len(kv.engine.calls[1][0])
    assert f"reused 0 of {n_first} prompt tokens, prefilled {n_first} " in first
    reused = n_first + len("one")
    assert f"reused {reused} of {n_second} prompt tokens (memory), prefilled {n_second - reused} " in second
    assert "load" in first and "load" not in second


def test_chat_takes_a_system_message(kv):
    chat(kv, "first\n", "-sys", "be kind")
    assert asked(kv) == "system:be kinduser:firstassistant:"


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        ((), "--script"),
        (("-0",), "-0 needs --script"),
        (("--script", "-c", "-1"), "--ctx-size"),
    ],
)
def test_without_a_terminal_or_a_script_it_is_an_error(kv, args, hint):
    outcome = kv("chat", *args, stdin=b"hi\n")
    assert (outcome.code, outcome.out) == (2, "")
    assert hint in outcome.err
    assert kv.opened == []


def test_json_needs_a_script(kv):
    outcome = kv("chat", "--json", stdin=None)
    assert outcome.code == 2 and json.loads(outcome.out)["error"]["message"] == "--json needs --script"


def test_output_must_be_a_terminal_too(kv):
    outcome = kv("chat", stdin=None)
    assert outcome.code == 2
    assert "terminal" in outcome.err


def test_bytes_that_are_not_utf8_end_the_script(kv):
    outcome = kv("chat", "--script", stdin=b"good\nb\xffd\n")
    assert (outcome.code, outcome.out) == (65, "one\n")
    assert "line 2 is not UTF-8: byte 0xff at offset 1" in outcome.err
    assert "message 2 is not UTF-8" in kv("chat", "--script", "-0", stdin=b"good\0b\xffd").err


def test_a_byte_order_mark_is_no_part_of_the_first_message(kv):
    kv("chat", "--script", stdin="\ufefffirst\n\ufeffsecond\n".encode())
    assert asked(kv) == "user:firstassistant:oneuser:\ufeffsecondassistant:"


def test_a_script_in_another_encoding_is_refused(kv):
    outcome = kv("chat", "--script", stdin="first\nsecond\n".encode("utf-16"))
    assert (outcome.code, outcome.out) == (65, "") and "line 1 is UTF-16" in outcome.err and "iconv" in outcome.err


def test_a_model_without_a_template_is_an_error(kv):
    kv.engine.template = None
    outcome = chat(kv, "hi\n")
    assert outcome.code == 3 and "this model cannot chat" in outcome.err
    assert "kv run continues text with it, kv chat -m smollm2 chats\n" in outcome.err
    kv.engine.spare_template = FakeTemplate()
    assert "--no-raw chats with it in fake's format" in chat(kv, "hi\n").err
    outcome = chat(kv, "hi\n", "--no-raw")
    assert (outcome.code, asked(kv)) == (0, "user:hiassistant:")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_script(kv, number):
    kv.engine.before_token = lambda n: os.kill(os.getpid(), number) if n == 1 else None
    outcome = chat(kv, "first\nsecond\n")
    assert (outcome.code, outcome.out) == (128 + number, "on\n")


# --- slash commands


def test_slash_commands_are_not_sent_and_say_what_they_did_on_stderr(kv):
    outcome = chat(kv, "/help\n/?\n/ctx\n/stats\n/system\nfirst\n/ctx\n/stats\n/exit\nnever\n")
    assert (outcome.code, outcome.out) == (0, "one\n")
    assert len(kv.engine.calls) == 1
    for part in (
        "/regen",
        "/undo",
        "//TEXT",
        "context: 0 of 4,096",
        "context: 27 of 4,096 tokens (0.7 %), 4,069 until full",
    ):
        assert part in outcome.err
    assert "session: 1 answer, reused 0 of 24 prompt tokens (0.0 %), prefilled 24, generated 3" in outcome.err


@pytest.mark.parametrize("line", ["/nonsense", "/undo now", "/Exit", "/", "/undo", "/regen"])
def test_a_wrong_slash_command_is_an_error_and_never_a_message(kv, line):
    outcome = chat(kv, f"{line}\nfirst\n")
    assert (outcome.code, outcome.out) == (2, "")
    assert kv.engine.calls == []


@pytest.mark.parametrize("name", ["/exit", "/quit", "/bye"])
def test_ways_to_leave(kv, name):
    outcome = chat(kv, f"{name}\nfirst\n")
    assert (outcome.code, outcome.out) == (0, "")


def test_two_slashes_send_one(kv):
    chat(kv, "//help me\n")
    assert asked(kv) == "user:/help meassistant:"


def test_regen_asks_the_same_again_with_another_seed(kv):
    outcome = chat(kv, "first\nsecond\n/regen\n/retry\nthird\n", "-s", "7")
    assert outcome.out == "one\ntwo\nthree\nfour\nfive\n"
    ids = [call[0] for call in kv.engine.calls]
    assert ids[1] == ids[2] == ids[3]
    assert [call[1].seed for call in kv.engine.calls] == [7, 7, 8, 9, 7]


def test_undo_takes_a_turn_back(kv):
    outcome = chat(kv, "first\nsecond\n/undo\nsecond\n")
    assert outcome.out == "one\ntwo\nthree\n"
    assert kv.engine.calls[1][0] == kv.engine.calls[2][0]
    assert outcome.err == 'kv: removed "second" and its answer\n'


def test_clear_keeps_the_system_message_and_empties_the_cache(kv):
    chat(kv, "/system be kind\nfirst\n/clear\nfirst\n/ctx\n")
    assert kv.engine.calls[0][0] == kv.engine.calls[1][0]
    assert asked(kv).startswith("system:be kind")


def test_system_is_set_and_shown(kv):
    outcome = chat(kv, "/system\nfirst\n/system be brief\nsecond\n/system\n")
    assert "no system message" in outcome.err
    assert outcome.err.count("system: be brief") == 2
    assert asked(kv) == "system:be briefuser:firstassistant:oneuser:secondassistant:"


# --- a full context


def test_a_full_context_ends_the_answer_and_leaves_the_session_usable(kv):
    kv.engine.ctx_size = 25
    outcome = chat(kv, "first\n/ctx\n/undo\nhi\n")
    assert (outcome.code, outcome.out) == (0, "on\ntwo\n")
    told = next(line for line in outcome.err.splitlines() if line.startswith("kv: stop: context full (25/25); "))
    assert [w for w in told.split() if w[0] == "/"] == ["/ctx", "/evict", "/undo", "/save", "/export", "/clear"]
    assert "kv: context: 25 of 25 tokens (100.0 %), 0 until full" in outcome.err


def test_an_answer_that_repeats_itself_is_stopped_and_said(kv):
    kv.engine.answers, kv.engine.ctx_size = ["no!" * 1000, "fine"], 10_000
    outcome = kv("chat", "--script", stdin=b"one\ntwo\n")
    assert outcome.code == 0 and outcome.out == ("no!" * 171)[:512] + "\nfine\n"
    assert outcome.err.count("stop: the answer repeats itself (512 tokens, 170 times the same 3)") == 1


def test_a_script_has_a_limit_for_each_answer(kv):
    text = " ".join(map(str, range(2000)))
    kv.engine.answers, kv.engine.ctx_size = [text, "fine"], 20_000
    outcome = kv("chat", "--script", stdin=b"one\ntwo\n")
    assert outcome.out == text[:4096] + "\nfine\n" and outcome.err.count("stop: 4,096 tokens, the limit") == 1


def test_a_message_that_does_not_fit_is_forgotten(kv, talk):
    kv.engine.ctx_size = 40
    session = talk("first", "a message that is much too long for this context", "/undo", "hi")
    assert session.out == "one\ntwo\n"
    assert "error" in session.err
    assert asked(kv) == "user:hiassistant:"


# --- at a terminal


@pytest.fixture
def talk(kv, monkeypatch):
    """Say lines as if typed; an exception instead of a line is raised by the editor."""

    def say(*lines: str | BaseException, args: tuple[str, ...] = ()):
        queue = [*lines, EOFError()]

        class Editor:
            interrupted_text = ""

            def __init__(self, history, completer, ended, early):
                assert "/help" in completer.commands

            def read(self, text):
                kv.drafts.append(text)
                item = queue.pop(0)
                if isinstance(item, BaseException):
                    raise item
                return item

        monkeypatch.setattr(lineeditor, "LineEditor", Editor)
        monkeypatch.setattr(lineeditor, "open_history", lambda warn, forbidden: None)
        monkeypatch.setattr("kvcli.cli.commands.chat.flags.ChatFlags.check", lambda self: None)
        return kv("chat", *args, stdin=None)

    return say


def test_errors_do_not_end_a_session(kv, talk):
    session = talk("/nonsense", "first", "/undo", "/undo", "second")
    assert (session.code, session.out) == (0, "one\ntwo\n")
    assert "unknown command /nonsense" in session.err
    assert "no turn to undo" in session.err
    assert asked(kv) == "user:secondassistant:"


def test_ctrl_c_stops_the_answer_and_keeps_it_as_a_turn(kv, talk):
    kv.engine.before_token = lambda n: (
        os.kill(os.getpid(), signal.SIGINT) if len(kv.engine.calls) == 1 and n == 1 else None
    )
    session = talk("first", "second")
    assert (session.code, session.out) == (0, "on\ntwo\n")
    assert asked(kv) == "user:firstassistant:onuser:secondassistant:"


def test_ctrl_c_before_the_first_token_takes_the_message_back(kv, talk):
    kv.engine.before_prefill = lambda: os.kill(os.getpid(), signal.SIGINT) if len(kv.engine.calls) == 1 else None
    session = talk("first", "second")
    assert session.code == 0
    assert "stopped before the answer began" in session.err
    assert asked(kv) == "user:secondassistant:"


def test_ctrl_c_while_regenerating_keeps_the_old_answer(kv, talk):
    kv.engine.before_prefill = lambda: os.kill(os.getpid(), signal.SIGINT) if len(kv.engine.calls) == 2 else None
    talk("first", "/regen", "second")
    assert asked(kv) == "user:firstassistant:oneuser:secondassistant:"


def test_ctrl_c_at_the_prompt_says_how_to_leave(kv, talk):
    session = talk(KeyboardInterrupt(), KeyboardInterrupt(), "first")
    assert (session.code, session.out) == (0, "one\n")
    assert session.err.count("Ctrl-D to exit") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_during_an_answer_end_the_session(kv, talk, number):
    kv.engine.before_token = lambda n: os.kill(os.getpid(), number) if n == 1 else None
    session = talk("first", "second")
    assert (session.code, session.out) == (128 + number, "on\n")


def test_a_terminal_that_is_gone_is_no_error_of_the_output_and_the_answer_is_kept(kv, talk, monkeypatch, tmp_path):
    """SIGHUP comes, and nothing can be written any more."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    written = TextSink.token

    def fail(self, event):
        if len(kv.engine.calls) == 2 and event.text == "w":
            os.kill(os.getpid(), signal.SIGHUP)
            raise OutputError("cannot write to stdout: Input/output error")
        written(self, event)

    monkeypatch.setattr(TextSink, "token", fail)
    monkeypatch.setattr(TextSink, "end", lambda self, result: None)
    assert talk("first", "second", "third", args=("--session", "ann")).code == 129
    assert [m["content"] for m in sessions.read("ann").messages()] == ["first", "one", "second", "tw"]


def test_nobody_is_told_why_nothing_was_found(kv, talk):
    """Who began a chat asked for nothing."""
    caches = kv.engine.prompt_caches

    def tell_at_once(options, tell, elsewhere):
        tell.notice("no stored prompt begins like this one")
        return caches(options, tell)

    kv.engine.prompt_caches = tell_at_once
    assert "no stored prompt" not in talk("first").err
    assert "no stored prompt" in talk("first", args=("-v",)).err
