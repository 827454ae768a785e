"""Commands of `kv chat` that keep it: /save, /export, branches; with an engine that has no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from calling import Caller
from chatcases import ANSWERS, chat, fixture_kv, fixture_talk, typing  # noqa: F401

from kvcli.options import EvictOptions
from kvcli.runtime.promptcache import sessions


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


def test_a_saved_chat_is_opened_as_before(kv, monkeypatch):
    kv.engine.answers = ANSWERS * 2

    def opened(*args: str, script: str = "a\n") -> tuple[int, str, str]:
        assert chat(kv, script, *args).code == 0
        options = kv.opened[-1][1]
        return options.ctx_size, options.type_k, options.type_v

    assert opened("--session", "ann", "-c", "4k", "-ct", "Q8_0/int4") == (4096, "q8_0", "int4")
    assert opened("--continue") == opened("--session", "ann") == (4096, "int8", "int4")
    assert opened("--resume", "ann", "-ct", "f16") == (4096, "f16", "f16")
    assert opened("--resume", "ann", "-c", "0", script="/ctx 2k\nb\n")[1] == "f16"
    assert opened("--resume", "ann") == (2048, "f16", "f16")
    monkeypatch.setenv("KV_CTX_SIZE", "1k")
    assert opened("--resume", "ann") == (1024, "f16", "f16")
    assert opened("--resume", "ann", "-m", "other") == (1024, "auto", "auto")  # it may have no room for it


def test_a_saved_chat_forgets_as_before(kv):
    kv.engine.answers = ANSWERS * 3

    def opened(*args: str, script: str = "a\n") -> tuple[EvictOptions, str]:
        outcome = chat(kv, script, *args)
        assert outcome.code == 0
        return kv.opened[-1][1].evict, outcome.err

    sink = EvictOptions("sink", 128, 8)
    assert opened("--session", "ann", "-c", "4k", "--evict", "sink", "--window", "128", "--keep", "8")[0] == sink
    evict, told = opened("--resume", "ann", "-v")
    assert evict == sink and "with -c 4096 --evict sink --window 128 --keep 8" in told
    assert opened("--resume", "ann", "--evict", "window")[0] == EvictOptions("window")
    assert opened("--resume", "ann", script="/evict shift\nb\n")[0] == EvictOptions("window")
    assert opened("--resume", "ann", script="/evict none\n")[0] == EvictOptions("shift")
    assert opened("--resume", "ann")[0] == EvictOptions()


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
    hint = "  /ctx 40 or more holds it, /evict sink keeps the newest text only\n"
    assert (outcome.code, outcome.err) == (2, told + hint)


@pytest.mark.parametrize("ending", [".md", ".json"])
def test_a_chat_that_cannot_be_saved_can_be_exported(
    ending: str, kv: Caller, talk: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, flush: bool = False) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sessions.paths, "replace_file", full)
    outcome = talk("first", f"/export a{ending}", args=("--session", "ann", "-sys", "be kind"))
    assert "cannot save the chat in" in outcome.err and f"wrote 1 turn to a{ending}" in outcome.err
    if ending == ".json":
        whole = json.loads(Path("a.json").read_text())["whole"]
        assert sessions.parsed("ann", whole, 0.0).messages()[-1] == {"role": "assistant", "content": "one"}


def test_a_flag_that_changes_nothing_is_told(kv, tmp_path):
    """The file of a chat has its answers with the flag and without it."""
    said = "--prompt-cache-all changes nothing"
    file = ("--prompt-cache", str(tmp_path / "a"), "-v")
    assert said in chat(kv, "first\n", *file, "--prompt-cache-all").err
    assert said not in chat(kv, "first\n", *file).err
