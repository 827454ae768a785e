"""Whether a conversation has room in a context, and which one has. No torch."""

from __future__ import annotations

from kvcli.errors import ContextOverflow, UsageError


def roomy(size: int, n_tokens: int) -> int:
    """`size`, or the double of it and so on, with a quarter of it behind `n_tokens`."""
    while size * 3 < n_tokens * 4:
        size *= 2
    return size


def larger(size: int, n_tokens: int, trained: int) -> str:
    """A command for a context that has room for `n_tokens`, where it has `size` now; of no more than the model is
    `trained` on (0 = not known), where these have room."""
    wanted = roomy(size, n_tokens)
    if n_tokens < trained < wanted:
        wanted = trained
    told = f" (trained: {trained:,})" if 0 < trained < wanted else ""
    return f"/ctx {wanted} makes the context larger{told}"


def check_message(size: int, needed: int, trained: int) -> None:
    """Raises ContextOverflow where a message needs more tokens, with the system message, than a context of `size`."""
    if needed > size:
        raise ContextOverflow(
            f"the message needs {needed:,} tokens with the system message, {needed - size:,} more than the context of"
            f" {size:,}",
            f"the conversation is as it was; send less at a time, or {larger(size, needed, trained)}",
        )


def check_size(size: int, least: int, n_tokens: int, now: int, evicts: bool, trained: int) -> None:
    """Raises UsageError for a context of `size` without room for a conversation of `n_tokens`, which is forgotten where
    it `evicts`, or for a message: `least`, of which every one needs more. `now`: the size it has."""
    if n_tokens > size + 1 and not evicts:  # the token that fills it up has no row
        holds = (
            f"/ctx {min(now, roomy(size, n_tokens))} or more holds it" if size < now else larger(now, n_tokens, trained)
        )
        raise UsageError(
            f"the conversation has {n_tokens:,} tokens, more than a context of {size:,} holds",
            f"{holds}, /evict sink keeps the newest text only",
        )
    if least >= size:
        raise UsageError(
            f"/ctx {size} has no room for a message: what stands around each has {least:,} tokens",
            f"the context of {now:,} stays" if now > least else f"/ctx {roomy(64, least)} has room",
        )
