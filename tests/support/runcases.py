"""`kv run` with an engine that has no weights, and what that was asked.

A test module that imports `fixture_kv` has it as `kv`.
"""

from __future__ import annotations

import pytest
from calling import Caller
from chatcases import asked
from fakes import FakeEngine


@pytest.fixture(name="kv")
def fixture_kv(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Caller:
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(["an answer"])
    return caller


def question(kv: Caller) -> str:
    """The user's message in it."""
    return asked(kv).removeprefix("user:").removesuffix("assistant:")
