"""Commands typed between the messages of `kv chat` that change what was said, with an engine that has no weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from chatcases import ANSWERS, asked, chat, fixture_kv, fixture_talk, typing  # noqa: F401

from kvcli.cli.commands.chat import slash
from kvcli.runtime.promptcache import sessions
from kvcli.runtime.text.conversation import Conversation


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/load ann", "kv chat --resume NAME"),
        ("/model x", "kv chat -m MODEL"),
        ("/new", "/clear begins a new conversation"),
        ("/Reset", "/clear begins a new conversation"),
        ("/show info", "/set shows the settings"),
        ("/temperature 0.3", "/set temperature VALUE changes it"),
        ("/temp 0.3", "/set temp VALUE changes it"),
        ("/top-k 3", "/set top_k VALUE changes it"),
        ("/udno", "did you mean /undo?"),
        ("/usr/bin is a folder", "a line that begins with // is sent"),
        ("/quit now", "/quit takes no argument"),
        ("/undo 2", "/undo takes no argument"),
    ],
)
def test_what_there_is_instead_is_said(kv, talk, line, hint):
    outcome = talk(line, "first")
    assert hint in outcome.err and outcome.out == "one\n"


def test_what_may_come_behind_a_command(kv):
    session = SimpleNamespace(branches=sessions.Branches())
    assert "temperature" in slash.values(session, "/set") and "n" in slash.values(session, "/set")
    assert slash.values(session, "/file") is slash.values(session, "/export") is None
    assert list(slash.values(session, "/branch")) == ["main"] and "sink" in slash.values(session, "/evict")
    assert list(slash.values(session, "/undo")) == list(slash.values(session, "/nonsense")) == []


def test_help_names_every_command_and_how_to_write_several_lines(kv, talk):
    told = talk("/help").err
    assert all(name in told for name in slash.NAMES)
    assert '"""' in told and "\\" in told and "Alt-Enter" in told and "Ctrl-J" in told
    assert max(map(len, told.splitlines())) <= 80 and "kv: " not in told.replace("kv: smollm2", "")


def test_undo_and_what_was_not_answered_are_put_back_to_be_changed(kv, talk):
    kv.engine.ctx_size = 60
    talk("first", "/undo", "other", "a message that is much too long for such a context", "/undo")
    too_long = "a message that is much too long for such a context"
    assert talk.drafts == ["", "", "first", "", too_long, "other"]


def test_a_message_stopped_before_its_answer_is_put_back(kv, talk):
    kv.engine.before_prefill = lambda: os.kill(os.getpid(), signal.SIGINT)
    assert "stopped before the answer began" in talk("first").err
    assert talk.drafts == ["", "first"]


def test_a_command_does_not_cost_what_was_put_back(kv, talk):
    """It waits until it is sent, or another message is; the keys are told once."""
    kv.engine.ctx_size = 60
    too_long = "a message that is much too long for such a context"
    outcome = talk("first", too_long, "/stats", "/nonsense", "second", "/undo", "//x", args=("-v",))
    assert talk.drafts == ["", "", too_long, too_long, too_long, "", "second", ""]
    assert outcome.err.count("Enter sends it, typing replaces it") == 1
    kv.engine.answers, kv.engine.ctx_size = ["x"], 5
    talk("//slash")
    assert talk.drafts == ["", "//slash"], "as it is to be typed"


def test_a_ctrl_c_between_answers_ends_nothing(kv, talk, monkeypatch):
    """It was meant for the answer that has just ended; other signals are obeyed."""
    save = sessions.Session.save

    def interrupted(self, conversation):
        os.kill(os.getpid(), number)
        save(self, conversation)

    monkeypatch.setattr(sessions.Session, "save", interrupted)
    number = signal.SIGINT
    assert talk("first", "second", args=("--session", "ann")).code == 0
    assert [m["content"] for m in sessions.read("ann").messages()] == ["first", "one", "second", "two"]
    number = signal.SIGTERM
    assert talk("third", "fourth", args=("--session", "ann")).code == 143
    assert [m["content"] for m in sessions.read("ann").messages()][4:] == ["third", "three"]


def test_a_ctrl_c_ends_a_file_that_does_not_end(kv, talk, monkeypatch):
    """A pipe into which nobody writes; the chat goes on."""

    def read(name: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("it went on")

    monkeypatch.setattr("kvcli.cli.commands.chat.session.read_file", read)
    outcome = talk("/file pipe", "first")
    assert outcome.code == 0 and "pipe was not read to its end" in outcome.err and outcome.out == "one\n"
    assert chat(kv, "/file pipe\nsecond\n").code == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_just_after_an_answer_does_not_cost_the_turn(kv, number, monkeypatch):
    """In a script, which it ends."""
    record = Conversation.record_answer

    def interrupted(self, *answer):
        os.kill(os.getpid(), number)
        record(self, *answer)

    monkeypatch.setattr(Conversation, "record_answer", interrupted)
    assert chat(kv, "first\nsecond\n", "--session", "ann").code == 128 + number
    assert said("ann") == ["first", "one"]


def said(name: str, branch: str = "") -> list[str]:
    """What a saved chat has."""
    return [m["content"] for m in sessions.read(name).messages(branch)]


def test_a_saved_chat_that_is_cleared_stays_until_something_is_said_and_then_as_a_branch(kv):
    told = "a new conversation; /undo brings the old one back, which is branch cleared now"
    assert told in chat(kv, "first\n/clear\n/clear\n", "--session", "ann").err
    assert said("ann") == ["first", "one"] and list(sessions.read("ann").states) == ["main"]
    chat(kv, "/clear\nother\n/clear\nthird\n/branch b\n", "--session", "ann")
    assert (said("ann", "main"), said("ann", "cleared"), said("ann", "cleared-2")) == (
        ["third", "three"], ["first", "one"], ["other", "two"],
    )  # fmt: skip
    outcome = chat(kv, "/undo\n/undo\n", "--session", "ann")
    assert outcome.code == 2 and "no turn to undo" in outcome.err, "in this branch nothing was cleared"
    outcome = chat(kv, "/branch main\n/undo\n/undo\n/undo\n/undo\n", "--session", "ann")
    assert outcome.code == 0 and outcome.err.count("the conversation of 1 turn is back") == 2
    assert said("ann") == ["first", "one"] and sorted(sessions.read("ann").states) == ["b", "main"]


def test_a_branch_that_was_cleared_and_went_on_is_a_branch_like_others(kv):
    chat(kv, "first\n/clear\nother\n/branch cleared\nmore\n/branch main\n/undo\n", "--session", "ann")
    assert chat(kv, "/undo\n", "--session", "ann").code == 2
    assert said("ann", "cleared") == ["first", "one", "more", "three"]


def test_a_chat_in_which_nothing_was_said_leaves_nothing(kv, talk):
    talk("/help", "/exit", args=("--session", "ann", "-sys", "be kind"))
    talk(args=("--session", "bob"))
    assert list(sessions.folder().iterdir()) == []
    talk("/system be brief", args=("--session", "ann"))
    assert sessions.read("ann").messages() == [{"role": "system", "content": "be brief"}]


def test_a_message_that_is_being_read_as_the_terminal_closes_is_asked_again(kv, talk):
    Path("a.txt").write_text("Alpha\nBeta\n")
    kv.engine.before_prefill = lambda: os.kill(os.getpid(), signal.SIGHUP) if len(kv.engine.calls) == 2 else None
    assert talk("first", "/file a.txt", "what?", args=("--session", "ann")).code == 129
    assert said("ann") == ["first", "one", "Alpha\nBeta\n\nwhat?"]
    assert kv("chat", "show", "ann").out == "> first\n\none\n\n> [a.txt, 2 lines]\n> what?\n"
    outcome = talk("what now?", args=("--session", "ann"))
    assert "got no answer; it is on the line again and a.txt goes with it" in outcome.err
    assert talk.drafts[0] == "what?" and asked(kv).endswith("assistant:oneuser:Alpha\nBeta\n\nwhat now?assistant:")
    kv.engine.before_prefill = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert talk("/undo", "first", args=("--session", "ann")).code == 143
    kv.engine.before_prefill = lambda: None
    outcome = chat(kv, "again\n", "--session", "ann")
    assert "got no answer; it is left out" in outcome.err and asked(kv).endswith("assistant:oneuser:againassistant:")


def test_clear_can_be_undone(kv, tmp_path):
    outcome = chat(kv, "first\n/clear\n/undo\nsecond\n/clear\nthird\n/undo\n/undo\n")
    assert outcome.code == 0 and "the conversation of 2 turns is back" in outcome.err
    assert "/undo brings the old one back" in outcome.err and "the conversation of 1 turn is back" in outcome.err
    assert asked(kv, 1).startswith(asked(kv, 0) + "one") and asked(kv, 2) == "user:thirdassistant:"


@pytest.mark.parametrize("word", ["exit", "quit", " Exit "])
def test_a_word_alone_leaves_at_a_terminal_and_is_a_message_in_a_script(kv, talk, word):
    assert talk(word, "first").out == ""
    assert chat(kv, f"{word}\n").out == "one\n"


def test_history_shows_the_conversation_and_no_control_characters(kv):
    kv.engine.answers = ["a\x1b[2Jb", "two", "three"]
    outcome = chat(kv, "/history\nfirst\nsecond\n/history\n/history 1\n/history x\n", "-sys", "be kind")
    assert outcome.code == 2 and "not 'x'" in outcome.err
    both = "> first\n\na^[[2Jb\n\n> second\n\ntwo\n"
    assert outcome.err.startswith(f"kv: nothing was said yet\n{both}> second\n\ntwo\n")


def test_regen_says_why_nothing_changes(kv):
    kv.engine.answers = ["one", "one", "one", "two"]
    same = "at temperature 0"
    assert same in chat(kv, "first\n/regen\n", "--temp", "0").err
    assert same not in chat(kv, "first\n/regen\n", "--temp", "0").err, "it did change"
    kv.engine.answers = ["one", "one"]
    assert same not in chat(kv, "first\n/regen\n").err


def test_hints_of_a_chat_can_be_typed_there(kv):
    hint = "  use a context of 192 or more (/ctx 192), or a smaller kv chat --page-size\n"
    assert chat(kv, "/evict sink\n/ctx 100\n").err.endswith(hint)
