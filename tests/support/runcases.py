"""`kv run` with an engine that has no weights, and what that was asked."""

from __future__ import annotations

from calling import Caller
from chatcases import asked


def question(kv: Caller) -> str:
    """The user's message in it."""
    return asked(kv).removeprefix("user:").removesuffix("assistant:")
