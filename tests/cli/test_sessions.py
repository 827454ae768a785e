"""Saved chats and their branches, with an engine that has no weights."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from calling import Caller
from chatcases import asked, chat
from fakes import FakeEngine
from jsonchecks import check

from kvcli.errors import UsageError
from kvcli.runtime.promptcache import sessions
from kvcli.words import human_bytes

ANSWERS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def kv(monkeypatch, capfdbinary, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(ANSWERS)
    return caller


def saved(tmp_path: Path, name: str = "ann") -> dict:
    return json.loads((tmp_path / "kv" / "sessions" / f"{name}.json").read_text("utf-8"))


def test_a_chat_goes_on_where_it_was_left(kv, tmp_path):
    assert chat(kv, "first\n", "--session", "ann").out == "one\n"
    for flags in (("--session", "ann"), ("--resume", "ann"), ("--continue",)):
        before = asked(kv)
        outcome = chat(kv, "next\n", *flags)
        assert outcome.code == 0 and "session ann: " in outcome.err
        assert asked(kv).startswith(before + ANSWERS[len(kv.engine.calls) - 2] + "user:next")
    assert [m["role"] for m in saved(tmp_path)["branches"]["main"]["messages"]] == ["user", "assistant"] * 4
    path = tmp_path / "kv" / "sessions" / "ann.json"
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert kv.engine.cache_options.stored_from == 1, "every turn of a saved chat is kept"


def test_the_ids_are_those_that_were_generated(kv, tmp_path):
    """As the cache has them, not as the text would be tokenized."""
    kv.engine.answers = ["abab"]
    chat(kv, "ab\n", "--session", "ann")
    chunks = saved(tmp_path)["branches"]["main"]["chunks"]
    assert [i for c in chunks for i in c["ids"]] == kv.engine.calls[0][0] + [5, 5]
    kv.engine.answers = ["x"]
    chat(kv, "more\n", "--resume", "ann")
    assert kv.engine.calls[1][0][: len(kv.engine.calls[0][0]) + 2] == kv.engine.calls[0][0] + [5, 5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_what_was_answered(kv, tmp_path, number):
    kv.engine.before_token = lambda n: os.kill(os.getpid(), number) if n == 1 else None
    assert chat(kv, "first\nsecond\n", "--session", "ann").code == 128 + number
    assert [m["content"] for m in saved(tmp_path)["branches"]["main"]["messages"]] == ["first", "on"]


def test_an_error_saves_too_and_a_forgotten_message_is_not_there(kv, tmp_path):
    kv.engine.ctx_size = 40
    outcome = chat(kv, f"first\n{'x' * 50}\n", "--session", "ann")
    assert outcome.code == 5
    assert [m["content"] for m in saved(tmp_path)["branches"]["main"]["messages"]] == ["first", "one"]


def test_whatever_ends_an_answer_leaves_whole_turns(kv, tmp_path):
    """Also an exception that nobody expects."""

    def fail(number: int) -> None:
        if len(kv.engine.calls) == 2:
            raise RuntimeError("of the machine")

    kv.engine.before_token = fail
    assert chat(kv, "first\nsecond\n", "--session", "ann").code == 1
    assert [m["content"] for m in saved(tmp_path)["branches"]["main"]["messages"]] == ["first", "one"]


def test_branches_begin_where_they_are_made_and_keep_apart(kv, tmp_path):
    outcome = chat(kv, "a\n/branch b\nb\n/branch main\nc\n/branch b\n/branch\nd\n", "--session", "ann")
    assert outcome.code == 0 and "in the new branch b" in outcome.err
    assert outcome.err.splitlines()[-2:] == ["kv: * b: 2 turns", "kv:   main: 2 turns"]
    texts = [asked(kv, call) for call in range(4)]
    assert texts[2] == texts[0] + "one" + "user:cassistant:"
    assert texts[3] == texts[1] + "two" + "user:dassistant:"
    kv.engine.answers = ["six", "seven"]
    chat(kv, "e\n/branch main\nf\n", "--continue")
    assert asked(kv, 4).startswith(texts[3] + "four") and asked(kv, 5).startswith(texts[2] + "three")
    assert saved(tmp_path)["branch"] == "main"


def test_a_branch_that_cannot_be_gone_to_changes_nothing(kv, tmp_path):
    chat(kv, "a\n/branch b\nb\n/branch main\n", "--session", "ann")
    state = saved(tmp_path)
    state["branches"]["b"]["messages"].pop(0)
    path = tmp_path / "kv" / "sessions" / "ann.json"
    path.write_text(json.dumps(state), encoding="utf-8")
    outcome = chat(kv, "/branch b\n", "--session", "ann")
    assert outcome.code == 2 and "is damaged: " in outcome.err
    assert saved(tmp_path) == state


def test_branches_need_no_session(kv, tmp_path):
    chat(kv, "a\n/branch b\nb\n/branch main\nc\n")
    assert asked(kv) == asked(kv, 0) + "one" + "user:cassistant:"
    assert not (tmp_path / "kv").exists()


def test_with_another_tokenizer_the_text_is_read_again(kv, tmp_path):
    kv.engine.answers = ["abab", "x"]
    chat(kv, "ab\n", "--session", "ann")
    file, state = tmp_path / "kv" / "sessions" / "ann.json", saved(tmp_path)
    state["branches"]["main"]["chunks"][0]["ids"][0] = 1 << 40  # of a larger vocabulary
    file.write_text(json.dumps(state), encoding="utf-8")
    kv.engine.tokenizer_hashes = lambda: {"tokenizer": "another"}
    outcome = chat(kv, "more\n", "--resume", "ann")
    assert "it was last used with smollm2 " in outcome.err
    assert asked(kv) == "user:abassistant:ababuser:moreassistant:"


def test_adapters_that_a_chat_was_held_with_are_told(kv, tmp_path):
    kv.engine.lora_names = ["/adapters/style.gguf:0.5"]
    chat(kv, "ab\n", "--session", "ann")
    assert saved(tmp_path)["lora"] == ["/adapters/style.gguf:0.5"]
    assert "held with" not in chat(kv, "more\n", "--resume", "ann").err
    kv.engine.lora_names = []
    told = "session ann was held with --lora /adapters/style.gguf:0.5; this command line says otherwise"
    assert told in chat(kv, "more\n", "--resume", "ann").err
    kv.engine.lora_names = ["/adapters/style.gguf:0.5"]
    assert "session ann was held with no LoRA adapter" in chat(kv, "more\n", "--resume", "ann").err


def test_with_another_tokenizer_no_branch_keeps_its_old_ids(kv, tmp_path):
    """Saved among the others they would be taken for ids of the new one."""
    kv.engine.answers = ["abab", "x", "y"]
    chat(kv, "ab\n/branch b\nc\n", "--session", "ann")
    state = saved(tmp_path)
    state["branches"]["main"]["chunks"][0]["ids"][0] = 77
    (tmp_path / "kv" / "sessions" / "ann.json").write_text(json.dumps(state), encoding="utf-8")
    kv.engine.tokenizer_hashes = lambda: {"tokenizer": "another"}
    chat(kv, "d\n", "--resume", "ann")
    kv.engine.answers = ["z"]
    outcome = chat(kv, "/branch main\nmore\n", "--resume", "ann")
    assert "another model" not in outcome.err and 77 not in kv.engine.calls[-1][0]
    assert asked(kv) == "user:abassistant:ababuser:moreassistant:"


@pytest.mark.parametrize(
    ("flags", "hint"),
    [
        (("--resume", "bob"), "no saved chat 'bob'"),
        (("--session", "../x"), "is not a name for a chat"),
        (("--session", ".x"), "is not a name for a chat"),
        (("--session", "a", "--continue"), "cannot be used together"),
    ],
)
def test_names_that_make_no_sense(kv, flags, hint):
    chat(kv, "first\n", "--session", "ann")
    outcome = chat(kv, "x\n", *flags)
    assert outcome.code == 2 and hint in outcome.err


def test_there_is_nothing_to_continue(kv):
    outcome = chat(kv, "x\n", "--continue")
    assert outcome.code == 2 and "no saved chat" in outcome.err


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kv_session":1}', '{"kv_session":2}',
    '{"kv_session":1,"branch":"main","branches":{"main":{"system":1,"messages":[],"chunks":[]}},"hashes":{}}',
    '{"kv_session":1,"branch":"main","branches":{"main":[]},"hashes":{}}',
    '{"kv_session":1,"branch":"main","branches":7,"hashes":{}}',
    '{"kv_session":1,"branch":"main","branches":{"main":{"system":null,"messages":[{"role":"x","content":"y"}],'
    '"chunks":[]}},"hashes":{}}'])  # fmt: skip
def test_a_damaged_session_is_one_line_and_stays_as_it_is(kv, tmp_path, content):
    folder = tmp_path / "kv" / "sessions"
    folder.mkdir(parents=True)
    (folder / "ann.json").write_text(content)
    outcome = chat(kv, "x\n", "--session", "ann")
    assert outcome.code == 2 and outcome.err.count("\n") <= 2 and "Traceback" not in outcome.err
    assert (folder / "ann.json").read_text() == content


def test_one_process_at_a_time(kv, tmp_path):
    held = sessions.Session("ann", "m", {})
    outcome = chat(kv, "x\n", "--session", "ann")
    assert outcome.code == 2 and "open in another kv chat" in outcome.err
    held.close()
    assert chat(kv, "x\n", "--session", "ann").code == 0


def test_a_folder_that_cannot_be_used(kv, tmp_path):
    (tmp_path / "kv").write_text("in the way")
    outcome = chat(kv, "x\n", "--session", "ann")
    assert outcome.code == 74 and "cannot use the folder" in outcome.err
    with pytest.raises(UsageError):
        sessions.check_name("a" * 65)


# --- looking after saved chats


@pytest.fixture
def two(kv) -> None:
    chat(kv, "first words\n/branch b\nsecond\n", "--session", "ann", "-sys", "be kind")
    chat(kv, "third\n", "--session", "bob")
    folder = sessions.folder()
    os.utime(folder / "ann.json", (1e9, 1e9))


def test_ls_has_the_last_used_first_and_damaged_ones_too(kv, two):
    (sessions.folder() / "old.json").write_text("{")
    os.utime(sessions.folder() / "old.json", (5, 5))
    head, bob, ann, old = kv("chat", "ls").out.splitlines()
    assert head.split() == ["name", "turns", "branches", "size", "saved", "model", "begins"]
    assert bob.split()[:3] == ["bob", "1", "1"] and bob.endswith(" smollm2  third")
    saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9))
    size = human_bytes(sessions.path_of("ann").stat().st_size)
    assert ann.split() == ["ann", "2", "2", *size.split(), *saved_at.split(), "smollm2", "first", "words"]
    assert old.startswith("old") and "is not valid JSON" in old
    value = json.loads(kv("chat", "ls", "--json").out)
    check("chat ls", value)
    assert value["kv_schema"] == 2 and [s["session"] for s in value["sessions"]] == ["bob", "ann", "old"]
    assert value["sessions"][1] == {
        "session": "ann", "model": "smollm2", "turns": 2, "branch": "b", "branches": ["b", "main"],
        "saved_at": "2001-09-09T01:46:40+00:00", "begins": "first words", "problem": None,
        "name": "ann", "error": None, "text_bytes": sessions.path_of("ann").stat().st_size, "rows_bytes": 0,
    }  # fmt: skip


def test_ls_of_nothing(kv):
    assert kv("chat", "ls").err == "kv: no chat is saved; kv chat --session NAME saves one\n"
    assert json.loads(kv("chat", "ls", "--json").out) == {"kv_schema": 2, "sessions": []}


def test_show_and_export(kv, two, tmp_path):
    assert kv("chat", "show", "ann").out == "system: be kind\n\n> first words\n\none\n\n> second\n\ntwo\n"
    assert kv("chat", "show", "ann", "--branch", "main").out.endswith("> first words\n\none\n")
    assert kv("chat", "show", "ann", "--branch", "c").code == 2
    exported = kv("chat", "export", "ann").out
    assert exported.startswith("# ann\n\n## System\n\nbe kind\n\n## User\n\nfirst words\n")
    value = json.loads(kv("chat", "export", "ann", "--json").out)
    shown = json.loads(kv("chat", "show", "ann", "--json").out)
    assert value == {**shown, "whole": sessions.value_of("ann")}
    check("chat show", shown)
    assert json.loads(kv("chat", "export", "ann", "--json", "--branch", "main").out)["whole"] is None
    assert (value["session"], value["branch"], len(value["messages"])) == ("ann", "b", 5)
    assert value["messages"][0] == {"role": "system", "content": "be kind"}
    assert kv("chat", "export", "ann", "-o", str(tmp_path / "a.md")).out == ""
    assert (tmp_path / "a.md").read_text() == exported
    refused = kv("chat", "export", "bob", "-o", str(tmp_path / "a.md"))
    assert refused.code == 2 and "exists and is left as it is\n  --force replaces it" in refused.err
    assert (tmp_path / "a.md").read_text() == exported
    assert kv("chat", "export", "bob", "-o", str(tmp_path / "a.md"), "--force").code == 0
    assert (tmp_path / "a.md").read_text().startswith("# bob\n")
    file = str(tmp_path / "a.json")
    assert kv("chat", "export", "ann", "-o", file).out == "" and json.loads(Path(file).read_text()) == value
    printed = json.loads(kv("chat", "export", "ann", "-o", file, "--json", "--force").out)
    assert printed == {**value, "path": file} and json.loads(Path(file).read_text()) == value
    check("chat export", printed)
    assert kv("chat", "export", "ann", "-o", file, "--md", "--force").out == "" and Path(file).read_text() == exported
    assert kv("chat", "export", "ann", "--md", "--json").code == 2
    for command in ("show", "export", "rm"):
        outcome = kv("chat", command, "eve")
        assert outcome.code == 2 and "no saved chat 'eve'" in outcome.err


def test_removing_a_chat_that_has_just_gone_leaves_no_lock_file(kv, two):
    before = sorted(sessions.folder().iterdir())
    with pytest.raises(UsageError, match="no saved chat 'eve'"):
        sessions.remove("eve")
    assert sorted(sessions.folder().iterdir()) == before


def test_rm_asks_and_leaves_what_is_open(kv, two):
    outcome = kv("chat", "rm", "ann")
    assert outcome.code == 2 and "add -y" in outcome.err
    assert kv("chat", "rm").code == kv("chat", "rm", "ann", "--all").code == 2
    held = sessions.Session("ann", "m", {})
    outcome = kv("chat", "rm", "ann", "-y")
    assert outcome.code == 2 and "open in another kv chat" in outcome.err
    held.close()
    assert kv("chat", "rm", "ann", "-y").code == 0 and sessions.names() == ["bob"]
    assert sorted(p.name for p in sessions.folder().iterdir()) == [".bob.lock", "bob.json"]
    assert kv("chat", "rm", "--all", "-y").code == 0 and sessions.names() == []
    nothing = kv("-v", "chat", "rm", "--all")
    assert (nothing.code, nothing.err) == (0, "kv: there is nothing to remove\n")


def test_a_lock_that_is_deleted_while_one_waits_for_it_is_made_anew(kv, two, monkeypatch):
    """Else two processes could have one session."""
    taken = []
    lock = sessions.fcntl.flock

    def delete_first(descriptor, how):
        if not taken:
            (sessions.folder() / ".ann.lock").unlink()
        taken.append(descriptor)
        lock(descriptor, how)

    monkeypatch.setattr(sessions.fcntl, "flock", delete_first)
    held = sessions.Session("ann", "m", {})
    assert len(taken) == 2
    with pytest.raises(UsageError, match="open in another"):
        sessions.Session("ann", "m", {})
    held.close()


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("list",), "did you mean kv chat ls?"),
        (("shw", "ann"), "did you mean kv chat show?"),
        (("Hello there",), "kv chat takes no message: 'Hello there'"),
        (("-c", "5", "ls"), "--ctx-size cannot be used with kv chat ls"),
    ],
)
def test_words_that_are_no_command(kv, args, hint):
    outcome = kv("chat", *args)
    assert outcome.code == 2 and hint in outcome.err


def test_global_options_go_before_and_behind(kv, two):
    for args in (("-q", "chat", "rm", "bob", "-y"), ("chat", "-q", "rm", "ann", "-y")):
        assert kv(*args) == type(kv(*args))(0, "", "")
        kv.engine.answers = ["x"]
        chat(kv, "again\n", "--session", "bob")


# --- going on


def test_a_chat_that_goes_on_shows_its_last_turn(kv, two, monkeypatch):
    monkeypatch.setattr("kvcli.cli.commands.chat.flags.ChatFlags.check", lambda self: None)
    monkeypatch.setattr("kvcli.cli.commands.chat.lineeditor.LineEditor.read", lambda self, text: "/exit")
    kv.engine.answers = ["\n".join(f"line {i}" for i in range(9))]
    chat(kv, "y" * 400 + "\n", "--resume", "ann")
    outcome = kv("chat", "--resume", "ann", stdin=None)
    shown = outcome.err.splitlines()
    assert shown[0] == "> " + "y" * 300 + " [...]" and shown[2:6] == ["line 0", "line 1", "line 2", "line 3 [...]"]
    assert shown[7] == "kv: session ann, branch b: 3 turns so far; /history shows them"
    assert kv("chat", "--resume", "ann", "-q", stdin=None).err == ""
    assert "line 0" not in chat(kv, "", "--resume", "ann").err, "a script is no reader"


def test_what_is_not_as_it_was_is_said(kv, two):
    outcome = chat(kv, "/ctx\n", "--resume", "ann", "-sys", "be nice")
    assert "its system message is replaced by the one of this command line" in outcome.err
    assert "replaced" not in chat(kv, "", "--resume", "ann", "-sys", "be nice").err
    kv.engine.ctx_size = 30
    outcome = chat(kv, "", "--resume", "ann")
    assert " tokens are more than the context of 30: /ctx 120 makes the context larger, /evict sink" in outcome.err
    kv.engine.ctx_size = 4096
    kv.engine.tokenizer_hashes = lambda: {"tokenizer": "another"}
    outcome = chat(kv, "", "--resume", "ann", "-m", "other")
    assert "it was last used with smollm2 and continues with other" in outcome.err
    assert "tokens of the conversation are read again with the next message" in outcome.err
