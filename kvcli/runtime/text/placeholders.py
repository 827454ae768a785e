"""Texts in a vocabulary that are no tokens. No numpy."""

from __future__ import annotations

from collections.abc import Sequence


def count_tokens(tokens: Sequence[str]) -> int:
    """How many tokens there are, less those at the end that converters put there for rows of the embedding that belong
    to none: [PAD377] at 377. None of these may be drawn."""
    count = len(tokens)
    while count and tokens[count - 1] == f"[PAD{count - 1}]":
        count -= 1
    return count
