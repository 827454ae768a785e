"""Chats on tiny models: what is said of rows is what is found, and another context or policy changes nothing else."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, open_tiny
from fakes import FakeTemplate
from reusecases import Told

from kvcli.cli import cachefiles
from kvcli.cli.commands.chat import savedchats
from kvcli.cli.commands.chat.chatoptions import ChatOptions
from kvcli.cli.commands.chat.session import ChatSession
from kvcli.cli.commands.chat.slash import handle
from kvcli.cli.interrupt import Interrupts
from kvcli.errors import DoesNotFit, UsageError
from kvcli.options import FORGET_NOTHING, CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache.sessions import Branches, Session
from kvcli.runtime.text.conversation import Conversation

CTX, SIZE = 192, 16


class Sink:
    """Keeps results."""

    def __init__(self) -> None:
        self.results: list[Any] = []

    def start(self, *_: Any) -> None: ...
    def prefill(self, *_: Any) -> None: ...
    def token(self, *_: Any) -> None: ...
    def end(self, result: Any) -> None:
        self.results.append(result)


class Chat:
    """A chat on a tiny model, and what it says."""

    def __init__(self, capsys: pytest.CaptureFixture[str], root: Path, evict: EvictOptions = FORGET_NOTHING,
                 name: str = "", types: tuple[str, str] = ("f16", "f16")) -> None:  # fmt: skip
        engine = open_tiny("llama", "native", CacheOptions(CTX, *types, page_size=SIZE, evict=evict))
        sampling = replace(GREEDY, max_tokens=12, seed=1, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0)
        kept = PromptCacheOptions(store=root / "prompts")
        options, self.sink, self.capsys = ChatOptions("tiny", sampling, False, True, evict, kept), Sink(), capsys
        branches = Session(name, "tiny", engine.loaded.tokenizer_hashes()) if name else Branches()
        conversation = Conversation(engine.tokenizer, FakeTemplate())
        branches.restore(conversation)
        interrupts = Interrupts(lambda *_: None)
        self.session = ChatSession(engine, conversation, options, self.sink, interrupts, branches, Told())

    def __call__(self, *lines: str) -> str:
        self.capsys.readouterr()
        for line in lines:
            handle(self.session, line)
        return self.capsys.readouterr().err

    @property
    def engine(self) -> Engine:
        return self.session.engine

    @property
    def reused(self) -> int:
        return self.sink.results[-1].end.usage.cache_read_tokens

    @property
    def prefilled(self) -> int:
        usage = self.sink.results[-1].end.usage
        return usage.prompt_tokens - usage.cache_read_tokens

    @property
    def n_tokens(self) -> int:
        return len(self.session.conversation.tokens)

    def close(self) -> None:
        self.session.close()
        self.engine.pool.check([])


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def unread(told: str) -> int:
    """How many tokens were said to be read again."""
    found = re.search(r"(all|(\d+) of) (\d+) tokens of the conversation are read again", told)
    return 0 if found is None else int(found[2] or found[3])


@pytest.mark.slow
@pytest.mark.parametrize("evict", [FORGET_NOTHING, EvictOptions("sink")], ids=["all", "sink"])
@pytest.mark.parametrize("resumed", [False, True])
def test_undo_speaks_of_rows_that_are_gone_only(capsys, tmp_path: Path, evict: EvictOptions, resumed: bool):
    lines = ("hello", "and") if evict is FORGET_NOTHING else ("hello", "and then", "more", "even more")
    chat = Chat(capsys, tmp_path, evict, "ann")
    chat(*lines)
    assert (chat.session.sequence.evicted > 0) == (evict is not FORGET_NOTHING)
    if resumed:
        chat.close()
        chat = Chat(capsys, tmp_path, evict, "ann")
        assert chat.session.sequence.length == 0
    told = chat("/undo")
    n_tokens, said = chat.n_tokens, unread(told)
    told = chat("/ctx")
    facts = chat.session.facts()
    assert facts.tokens + facts.evicted == n_tokens and f"context: {facts.tokens} of {CTX} tokens" in told
    assert unread(told) == said
    chat("other")
    assert said == 0 and chat.reused > n_tokens - SIZE, "all was in the pool or in the store"
    chat.close()


def test_undo_tells_what_is_read_again(capsys, tmp_path: Path):
    """Without a store, and with a pool that let go."""
    chat = Chat(capsys, tmp_path, EvictOptions("window", 32))
    chat("hello", "and then", "more", "even more")
    chat.session.caches.tree.clear()
    told = chat("/undo")
    assert unread(told) == chat.n_tokens
    chat("other")
    assert chat.reused == 0
    chat.close()


@pytest.mark.slow
@pytest.mark.parametrize("types", [("f16", "f16"), ("int8", "int4")], ids=["f16", "int8"])
@pytest.mark.parametrize("command", ["/evict sink", "/evict window", "/ctx 320"])
def test_a_full_chat_goes_on_as_if_it_had_always_been_so(capsys, tmp_path: Path, types, command: str):
    chat = Chat(capsys, tmp_path, types=types)
    chat("hello", "tell me more", "and")
    before = chat.n_tokens
    told = chat(command)
    said = unread(told)
    assert said < before and ("context: " in told or "old tokens are forgotten: " in told)
    chat("go on")
    assert abs(chat.reused - (before - said)) < SIZE
    evict = EvictOptions(command.split()[1]) if "evict" in command else FORGET_NOTHING
    other = Chat(capsys, tmp_path / "other", evict, types=types)
    other.session.change(chat.engine.ctx_size, evict)
    other.session.conversation.set_state(chat.session.conversation.state())
    other.session.conversation.undo()
    other("go on")
    assert other.sink.results[-1].end.ids == chat.sink.results[-1].end.ids and other.reused == 0
    assert other.session.sequence.tokens == chat.session.sequence.tokens
    other.close()
    chat.close()


def test_what_cannot_be_leaves_the_chat_as_it_was(capsys, tmp_path: Path):
    chat = Chat(capsys, tmp_path)
    chat("hello")
    for line, error in (("/ctx 2000000000", DoesNotFit), ("/ctx 16", UsageError), ("/evict lru", UsageError)):
        with pytest.raises(error):
            chat(line)
    n_tokens = chat.n_tokens
    chat("again")
    assert chat.reused >= n_tokens - 2 and chat.engine.ctx_size == CTX and chat.engine.retention is None
    chat.close()


def test_a_system_message_costs_what_is_said(capsys, tmp_path: Path):
    chat = Chat(capsys, tmp_path)
    chat("hello", "more")
    said = unread(chat("/system be brief"))
    assert said > SIZE
    n_tokens = chat.n_tokens
    chat("so")
    assert chat.reused == n_tokens - said
    chat.close()


def test_saved_from_now_on_all_rows_are_in_the_store(capsys, tmp_path: Path):
    chat = Chat(capsys, tmp_path)
    chat("hello", "/save ann", "more")
    n_tokens = chat.n_tokens
    chat.close()
    again = Chat(capsys, tmp_path, name="ann")
    assert unread(again("/ctx")) == 0
    again("so")
    assert again.reused >= n_tokens - 1
    again.close()


def test_another_cache_type_is_the_reason_that_is_told(capsys, tmp_path: Path):
    chat = Chat(capsys, tmp_path, name="ann")
    chat("hello", "more")
    chat.close()
    again = Chat(capsys, tmp_path, name="ann", types=("int8", "int8"))
    told = again("/ctx")
    assert unread(told) == again.n_tokens
    assert "with the next message: a stored prompt shares" in told and "cache type f16, this run has int8" in told
    again.close()
    told = (sink := Chat(capsys, tmp_path, EvictOptions("sink"), "ann"))("/ctx")
    assert unread(told) == 0, "nothing is evicted yet, so the policy decides no row"
    sink.close()


def test_a_deleted_chat_leaves_no_rows_of_its_own(capsys, tmp_path: Path):
    for name in ("ann", "bob"):
        chat = Chat(capsys, tmp_path, name=name)
        chat(f"I am {name}", "more")
        chat.close()
    root = tmp_path / "prompts"
    before = len(cachefiles.stored(root))
    assert savedchats._remove_rows(["ann"], root) > 0
    assert 0 < len(cachefiles.stored(root)) < before
    again = Chat(capsys, tmp_path, name="bob")
    assert unread(again("/ctx")) == 0 < unread(Chat(capsys, tmp_path, name="ann")("/ctx"))
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("stored", [True, False])
def test_a_resumed_chat_whose_rows_were_selected_tells_its_tokens(capsys, tmp_path: Path, stored: bool):
    """And what is read again where the store has nothing of it."""
    snapkv = EvictOptions("snapkv", budget="50%")
    chat = Chat(capsys, tmp_path, snapkv, "ann")
    chat("hello there", "and then")
    chat.close()
    if not stored:
        shutil.rmtree(tmp_path / "prompts")
    chat = Chat(capsys, tmp_path, snapkv, "ann")
    told = chat("/ctx")
    assert f"context: {chat.n_tokens} of {CTX} tokens" in told
    assert unread(told) == (0 if stored else chat.n_tokens)
    chat.close()
