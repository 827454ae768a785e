"""A prompt that is longer than the context: it is refused, or its text is cut, and the cut is told. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import ContextOverflow
from kvcli.runtime.engine.terms import advised

if TYPE_CHECKING:
    from kvcli.runtime.cache.eviction import Retention

ERROR, START, MIDDLE = "error", "truncate-start", "truncate-middle"
POLICIES = (ERROR, START, MIDDLE)
ANSWER_SHARE = 4  # a cut prompt leaves this part of the context to an answer of no given length; never less than half


@dataclass(frozen=True)
class Cut:
    """Tokens [start, end) of a prompt of `prompt_tokens` were left out."""

    policy: str
    prompt_tokens: int
    context: int
    start: int
    end: int

    def __str__(self) -> str:
        return (
            f"the prompt of {self.prompt_tokens:,} tokens is longer than the context of {self.context:,}: its tokens"
            f" {self.start:,} to {self.end - 1:,} ({self.end - self.start:,}) were cut (--on-overflow {self.policy})"
        )


def answer_leaves(ctx_size: int, max_tokens: int, retention: Retention | None) -> int:
    """Tokens that a cut prompt may have: an answer of `max_tokens` (-1 = of any length) finds room behind it, but no
    more than half the context; where old tokens are evicted anyhow, the last of them sees all others."""
    if retention is not None:
        return min(ctx_size, retention.whole)
    answer = ctx_size // ANSWER_SHARE if max_tokens < 0 else min(max_tokens, ctx_size // 2)
    return ctx_size - answer


def cut_text(
    ids: list[int],
    text: tuple[int, int],
    policy: str,
    ctx_size: int,
    room: int,
    could_hold: Callable[[int], bool],
    answer: int = -1,
) -> tuple[list[int], Cut]:
    """`room` of the ids, and what is missing: the start or the middle of the user's text, the ids [start, end).

    Raises ContextOverflow where more would have to go than that; `could_hold`: whether a context of so many tokens
    fits into memory, so that it can be advised; `answer`: see `advised`.
    """
    (start, end), gone = text, len(ids) - room
    left = end - start - gone
    if left < 1:
        size = advised(len(ids), answer, could_hold)
        raise ContextOverflow(
            f"the prompt has {len(ids):,} tokens, {gone:,} more than the {room:,} that fit beside an answer, and only"
            f" {end - start:,} of them are text that may be cut",
            "shorten the system message" + (f", or use --ctx-size {size} or more" if size else ""),
        )
    first = start if policy == START else start + -(-left // 2)
    return ids[:first] + ids[first + gone :], Cut(policy, len(ids), ctx_size, first, first + gone)
