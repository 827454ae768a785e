"""`kv run` with an engine that has no weights, and what that was asked."""

from __future__ import annotations

from calling import Caller


def asked(kv: Caller) -> str:
    """The text of the prompt that the engine got."""
    return kv.engine.tokenizer.decode(kv.engine.calls[-1][0])


def question(kv: Caller) -> str:
    """The user's message in it."""
    return asked(kv).removeprefix("user:").removesuffix("assistant:")
