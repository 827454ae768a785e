"""`kv chat` with an engine that has no weights: scripts, and lines as if they were typed.

A test module that imports the fixtures has them, as `kv` and `talk`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import Caller
from fakes import FakeEngine

from kvcli.cli.commands.chat import lineeditor, slash

ANSWERS = ["one", "two", "three", "four", "five", "six"]


@pytest.fixture(name="kv")
def fixture_kv(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Caller:
    """In a folder of its own, with chats of its own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(ANSWERS)
    return caller


@pytest.fixture(name="talk")
def fixture_talk(kv: Caller, monkeypatch: pytest.MonkeyPatch):
    return typing(kv, monkeypatch)


def chat(kv: Caller, script: str, *args: str):
    return kv("chat", "--script", *args, stdin=script.encode())


def asked(kv: Caller, call: int = -1) -> str:
    return kv.engine.tokenizer.decode(kv.engine.calls[call][0])


def typing(kv: Caller, monkeypatch: pytest.MonkeyPatch):
    """Say lines as if typed. `drafts`: with what text the editor began, line by line."""

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
