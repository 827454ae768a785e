"""Commands of `kv chat` that change how it goes on: files, /set, /ctx, /evict; with an engine that has no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from chatcases import ANSWERS, asked, chat, fixture_kv, fixture_talk, typing  # noqa: F401

from kvcli.runtime.cache import eviction

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
    script += "/set seed=5\n/set stop XY\n/set spec ngram\n/set\nfirst\n/set temp default\n/set temp\n"
    outcome = chat(kv, script, "--top-k", "7")
    assert outcome.code == 0 and outcome.out == "on\n" and "n: 2048\n" in outcome.err
    options = kv.engine.calls[0][1]
    assert (options.temperature, options.max_tokens, options.seed, options.stop) == (0.2, 2, 5, ("XY",))
    assert options.spec == "ngram" and "  spec" in outcome.err
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
        ("/set spec tree", "spec must be suffix, ngram, draft, mtp or off, not tree"),
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


def test_a_context_beyond_the_trained_one_is_told(kv, talk, tmp_path):
    file = tmp_path / "long.txt"
    for characters, told in (
        (4000, "/ctx 4096 makes the context larger\n"),
        (9000, "/ctx 16000 makes the context larger (trained: 4,096)\n"),
    ):
        kv.engine.ctx_size = 2000
        file.write_text("y" * characters)
        assert told in talk(f"/file {file}").err


def test_a_context_without_room_for_any_message_is_refused(kv, talk):
    kv.engine.ctx_size = 200
    least = len(" user: assistant: ") + 1  # as the fake template writes a message of nothing
    outcome = talk(f"/ctx {least}", f"/ctx {least + 9}", "y" * 20, "hi")
    assert f"error: /ctx {least} has no room for a message: what stands around each has {least} tokens" in outcome.err
    assert "the context of 200 stays" in outcome.err and kv.engine.ctx_size == least + 9
    told = f"the message needs {least + 20} tokens with the system message, 11 more than the context of {least + 9}"
    assert f"{told}\n  the conversation is as it was; send less at a time" in outcome.err and outcome.out == "one\n"


def test_a_chat_begins_to_forget_and_stops_it(kv, talk):
    kv.engine.ctx_size = 200
    script = (
        "first",
        "/evict",
        "/evict sink",
        "/evict",
        "/evict none",
        "/evict",
        "/evict lru",
        "/evict sink 9",
        "/evict snapkv",
        "/evict window",
    )
    outcome = talk(*script, args=("--evict", "none"))
    assert [asked.policy for asked in kv.engine.changes] == ["sink", "none", "window"]
    assert "sink: the first 4 and the last 72 of the tokens stay" in outcome.err
    assert outcome.err.count("nothing is forgotten") == 3
    assert "error: /evict takes a policy alone, not 'sink 9'" in outcome.err
    assert "kv chat --evict snapkv --budget 50% begins with one" in " ".join(outcome.err.split())
    assert f"error: /evict must be one of {', '.join(eviction.names())}, not 'lru'" in outcome.err


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
