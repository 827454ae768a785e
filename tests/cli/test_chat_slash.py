"""Commands typed between the messages of `kv chat`, with an engine that has no weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from calling import Caller
from fakes import FakeEngine

from kvcli.cli.commands.chat import lineeditor, slash
from kvcli.runtime.promptcache import sessions
from kvcli.runtime.text.conversation import Conversation

ANSWERS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture
def kv(monkeypatch, capfdbinary, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(ANSWERS)
    return caller


def chat(kv: Caller, script: str, *args: str):
    return kv("chat", "--script", *args, stdin=script.encode())


def asked(kv: Caller, call: int = -1) -> str:
    return kv.engine.tokenizer.decode(kv.engine.calls[call][0])


@pytest.fixture
def talk(kv, monkeypatch):
    """Say lines as if typed. `talk.drafts`: with what text the editor began, line by line."""

    def say(*lines: str, args: tuple[str, ...] = ()):
        queue = [*lines]
        say.drafts = []

        class Editor:
            interrupted_text = ""

            def __init__(self, history, completer, ended, early):
                assert set(completer.commands) == set(slash.NAMES)

            def read(self, text):
                say.drafts.append(text)
                if not queue:
                    raise EOFError
                return queue.pop(0)

        monkeypatch.setattr(lineeditor, "LineEditor", Editor)
        monkeypatch.setattr(lineeditor, "open_history", lambda warn, forbidden: None)
        monkeypatch.setattr("kvcli.cli.commands.chat.flags.ChatFlags.check", lambda self: None)
        return kv("chat", *args, stdin=None)

    return say


# --- editing


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


# --- files


def test_files_go_in_front_of_the_next_message(kv, talk, tmp_path):
    Path("a.txt").write_text("Alpha\n")
    Path("b.txt").write_text("Beta")
    outcome = talk("/file a.txt", "/file b.txt", "what?", "more", "/undo", "/undo", "/undo", "again")
    assert "a.txt (5 tokens) goes in front of the next message" in outcome.err
    assert asked(kv, 0) == "user:Alpha\n\nBeta\n\nwhat?assistant:"
    assert asked(kv, 1).endswith("user:moreassistant:")
    assert talk.drafts[5:] == ["more", "what?", "what?", ""]
    assert "b.txt does not go with the next message" in outcome.err and 'removed "what?" and' in outcome.err
    assert asked(kv, 2) == "user:Alpha\n\nagainassistant:"


def test_files_keep_their_names(kv, talk):
    """After the chat was left, too: /undo brings them back as files, and what is shown names them."""
    Path("a.txt").write_text("Alpha\n")
    Path("b.txt").write_text("1\n2\n\n3")
    talk("/file a.txt", "/file b.txt", "what?", args=("--session", "ann"))
    shown = "> [a.txt, 1 line]\n> [b.txt, 4 lines]\n> what?\n\none\n"
    assert kv("chat", "show", "ann").out == shown and kv("chat", "ls").out.splitlines()[1].endswith(" what?")
    assert "Alpha\n\n1\n2\n\n3\n\nwhat?" in kv("chat", "export", "ann").out, "an export has all of it"
    outcome = talk("/history", "/undo", "why?", args=("--session", "ann"))
    assert outcome.err.count(shown) == 2 and "b.txt (6 tokens) goes in front" in outcome.err
    assert talk.drafts == ["", "", "what?", ""] and asked(kv) == "user:Alpha\n\n1\n2\n\n3\n\nwhy?assistant:"


def test_files_that_cannot_be_are_refused_at_once(kv, tmp_path):
    Path("long.txt").write_text("x" * 5000)
    Path("bad.txt").write_bytes(b"\xff")
    for name, code, hint in (("no.txt", 2, "cannot read no.txt"), ("bad.txt", 65, "not UTF-8"),
                             ("long.txt", 5, "long.txt has 5,000 tokens")):  # fmt: skip
        outcome = chat(kv, f"/file {name}\n")
        assert outcome.code == code and hint in outcome.err
    assert "no file goes" in chat(kv, "/file\n").err


@pytest.mark.parametrize("typed", ["'my file.md'", '"my file.md"', "my\\ file.md", "my file.md", "~/my\\ file.md"])
def test_names_of_files_are_taken_as_terminals_paste_them(kv, talk, tmp_path, monkeypatch, typed):
    monkeypatch.setenv("HOME", str(tmp_path))
    talk("first", f"/export {typed}", f"/file {typed}", "second")
    assert Path("my file.md").exists() and "user:# Chat with smollm2" in asked(kv)


def test_a_name_with_quotes_in_it_is_that_name(kv, tmp_path):
    Path("'a'").write_text("Alpha")
    Path("it's").write_text("Beta")
    assert chat(kv, "/file 'a'\n/file it's\nfirst\n").code == 0
    assert asked(kv) == "user:Alpha\n\nBeta\n\nfirstassistant:"


# --- settings


def test_settings_are_shown_and_changed(kv):
    script = "/set temperature 0.2\n/set n 2k\n/set n\n/set n -1\n/set n 2\n"
    script += "/set seed=5\n/set stop XY\n/set\nfirst\n/set temp default\n/set temp\n"
    outcome = chat(kv, script, "--top-k", "7")
    assert outcome.code == 0 and outcome.out == "on\n" and "n: 2048\n" in outcome.err
    options = kv.engine.calls[0][1]
    assert (options.temperature, options.max_tokens, options.seed, options.stop) == (0.2, 2, 5, ("XY",))
    shown = dict(line.split(maxsplit=1) for line in outcome.err.splitlines() if line.startswith("  "))
    assert shown["temperature"] == "0.2" and shown["top_k"] == "7" and shown["top_p"] == "0.95 (default)"
    assert shown["n"] == "2" and shown["seed"] == "5" and shown["stop"] == "'XY'" and shown["ignore_eos"] == "off"
    assert shown["loop_stop"] == "on (default)" and shown["dry_multiplier"] == "0" and "unattended" not in shown
    assert not options.unattended  # a limit was asked for
    assert outcome.err.endswith("kv: temperature: 0.8 (default)\n")


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/set nonsense 1", "there is no setting 'nonsense'"),
        ("/set temperature warm", "temperature must be a number, not 'warm'"),
        ("/set temperature -1", "temperature must be 0 or more, not -1.0"),
        ("/set top_k 1.5", "top_k must be a whole number, not '1.5'"),
        ("/set n -3", "n must be a number of tokens, not '-3'"),
        ("/set ignore_eos maybe", "on or off"),
        ("/set logit_bias 3", "there is no setting"),
        ("/set parameter temperature 0.3", "without that word: /set temperature 0.3"),
        ("/set system Be brief", "/system TEXT"),
        ("/set tempreature 1", "did you mean temperature?"),
        ("/set num_ctx 8192", "/ctx N"),
    ],
)
def test_wrong_settings_change_nothing(kv, talk, line, hint):
    assert hint in talk(line, "first").err
    options = kv.engine.calls[0][1]
    assert (options.temperature, options.top_k, options.max_tokens, options.unattended) == (0.8, 40, 4096, True)


# --- the context


def test_undo_and_ctx_say_what_will_be_found(kv):
    """The conversation counts, whatever of it is in the sequence; rows are said to be gone only where they are."""
    kv.engine.layout.page_size = 8
    outcome = chat(kv, "first\nsecond\n", "--session", "ann")
    n_first, n_all = len(kv.engine.calls[0][0]) + 3, len(kv.engine.calls[1][0]) + 3
    outcome = chat(kv, "/ctx\n/undo\n/ctx\n", "--resume", "ann")
    assert "0 B as f32, 64.0 MiB without pages" in outcome.err
    assert f"context: {n_all} of 4,096" in outcome.err and f"context: {n_first} of 4,096" in outcome.err
    assert f"all {n_all} tokens of the conversation are read again" in outcome.err
    kv.engine.answers = ["one", "two"]
    chat(kv, "first\nsecond\n", "--session", "bob")
    kv.engine.stored = kv.engine.calls[-1][0]
    assert "read again" not in chat(kv, "/undo\n/ctx\n", "--resume", "bob").err
    kv.engine.stored = kv.engine.stored[:10]
    outcome = chat(kv, "/ctx\n", "--resume", "bob")
    assert outcome.err.count(f"{n_first - 10} of {n_first} tokens of the conversation are read again") == 2


def test_a_full_chat_goes_on_in_a_larger_context(kv, talk):
    kv.engine.ctx_size = 25
    outcome = talk("first", "second", "/ctx 64", "second", "/ctx 10", "/ctx many", "/ctx")
    assert outcome.out == "on\ntwo\n"
    n_tokens = len(kv.engine.calls[1][0])
    assert f"would have {n_tokens} tokens with this, {n_tokens - 25} more than the context of 25" in outcome.err
    assert "/ctx 100 makes the context larger, /evict sink" in outcome.err
    assert "context: 26 of 64 tokens (40.6 %), 38 until full" in outcome.err
    assert talk.drafts[2] == "second" and asked(kv).startswith(asked(kv, 0) + "onuser:second")
    assert f"the conversation has {n_tokens + 3} tokens, more than a context of 10 holds" in outcome.err
    assert "/ctx must be a number of tokens, not 'many'" in outcome.err
    assert kv.engine.ctx_size == 64


def test_a_chat_begins_to_forget_and_stops_it(kv, talk):
    kv.engine.ctx_size = 200
    script = ("first", "/evict", "/evict sink", "/evict", "/evict none", "/evict", "/evict lru", "/evict window")
    outcome = talk(*script, args=("--evict", "none"))
    assert [asked.policy for asked in kv.engine.changes] == ["sink", "none", "window"]
    assert "sink: the first 4 and the last 72 of the tokens stay" in outcome.err
    assert outcome.err.count("nothing is forgotten") == 3
    assert "error: /evict must be one of none, sink, window, not 'lru'" in outcome.err


def test_the_policy_of_the_command_line_comes_back_as_it_was(kv):
    chat(kv, "/evict none\n/evict sink\n/evict window\n", "--evict", "sink", "--keep", "9")
    assert [asked.keep for asked in kv.engine.changes] == [None, 9, None]


def test_a_conversation_that_is_too_long_cannot_stop_forgetting(kv, talk):
    kv.engine.ctx_size = 200
    kv.engine.answers = ["x" * 150]
    talk("/evict window", "first", "/evict none")
    assert len(kv.engine.changes) == 2
    kv.engine.answers = ["x" * 500]
    kv.engine.ctx_size = 200
    outcome = talk("/ctx 1000", "first", "/evict window", "/ctx 200", "/evict none")
    assert kv.engine.ctx_size == 200 and kv.engine.retention is not None
    assert "the conversation has 524 tokens, more than a context of 200 holds" in outcome.err
    assert "/ctx 800 makes the context larger" in outcome.err


def test_a_new_system_message_says_what_it_costs(kv):
    kv.engine.layout.page_size = 8
    outcome = chat(kv, "first\n/system be brief\n/system\nsecond\n")
    n_tokens = len(kv.engine.calls[1][0]) - len("user:secondassistant:") - 3
    assert f"{n_tokens - 2} of {n_tokens} tokens of the conversation are read again" in outcome.err
    assert asked(kv) == "system:be briefuser:firstassistant:oneuser:secondassistant:"


def test_a_system_message_that_does_not_fit_or_is_refused_is_not_taken(kv, talk):
    kv.engine.ctx_size = 60
    outcome = talk("first", f"/system {'be kind ' * 5}", "/system", "second")
    assert "more than the context of 60" in outcome.err and "no system message of yours" in outcome.err
    assert asked(kv) == "user:firstassistant:oneuser:secondassistant:"


def test_the_kept_start_follows_the_system_message(kv, talk, monkeypatch):
    """--keep -1 is what precedes the first message."""
    kv.engine.ctx_size = 400
    talk("/evict sink", "/system be kind", "/system be kind", args=("--evict", "none"))
    assert len(kv.engine.changes) == 1
    kv.engine.changes = []
    talk("/evict none", "/evict sink", "/system be kind", "/system be kind", args=("--evict", "sink", "--keep", "-1"))
    keeps = [asked.keep for asked in kv.engine.changes]
    assert keeps[0] is None and keeps[1] > 0 and keeps[2] == keeps[1] + len("system:be kind") + 2 and len(keeps) == 3


# --- keeping it


def test_a_chat_is_saved_from_now_on(kv, tmp_path):
    outcome = chat(kv, "first\n/branch b\n/save ann\nsecond\n/save\n")
    assert outcome.code == 0 and "saved as ann after every turn" in outcome.err
    assert kv.engine.cache_options.stored_from == 1
    found = sessions.read("ann")
    assert found.branch == "b" and sorted(found.states) == ["b", "main"]
    assert [m["content"] for m in found.messages()] == ["first", "one", "second", "two"]
    assert [m["content"] for m in found.messages("main")] == ["first", "one"]
    outcome = chat(kv, "third\n/save bob\nfourth\n", "--resume", "ann")
    assert len(sessions.read("ann").messages()) == 6 and len(sessions.read("bob").messages()) == 8
    assert chat(kv, "x\n", "--resume", "ann").code == 0, "its lock is free"


def test_what_cannot_be_saved_is_said(kv, talk):
    chat(kv, "first\n", "--session", "ann")
    held = sessions.Session("eve", "m", {})
    outcome = talk("/save", "/save ann", "/save a/b", "/save eve", "second")
    for part in (
        "/save needs a NAME",
        "a saved chat 'ann' already",
        "is not a name for a chat",
        "open in another kv chat",
    ):
        assert part in outcome.err
    held.close()
    assert len(sessions.read("ann").messages()) == 2 and outcome.out == "two\n"


def test_export_writes_new_files_only(kv, talk, tmp_path):
    Path("there.md").write_text("mine")
    outcome = talk("/export a.md", "first", "/export a.md", "/export a.json", "/export there.md", "/export a.txt",
                   "/export no/a.md", "/export", args=("-sys", "be kind"))  # fmt: skip
    assert Path("a.md").read_text() == (
        "# Chat with smollm2\n\n## System\n\nbe kind\n\n## User\n\nfirst\n\n## Assistant\n\none\n"
    )
    value = json.loads(Path("a.json").read_text())
    assert value["kv_schema"] == 2 and value["model"] == "smollm2" and value["session"] is None
    assert [m["role"] for m in value["messages"]] == ["system", "user", "assistant"]
    assert Path("there.md").read_text() == "mine"
    for part in (
        "nothing to export yet",
        "wrote 1 turn to a.md",
        "there.md exists",
        "neither in .md nor",
        "cannot write",
    ):
        assert part in outcome.err
    assert "/export needs FILE" in outcome.err


def test_what_a_shorter_context_is_refused_with(kv):
    """The message of the script is named, and the context that holds the conversation."""
    kv.engine.ctx_size = 200
    outcome = chat(kv, "first\n/ctx 10\n")
    told = "kv: error: line 2: the conversation has 27 tokens, more than a context of 10 holds\n"
    hint = "  /ctx 27 or more holds it, /evict sink keeps the newest text only\n"
    assert (outcome.code, outcome.err) == (2, told + hint)
