"""`Caches`: what requests ask of whatever may hold rows of their prompts. `Ledger`: what one of them takes and gives.
`LiveRows`: the sequence itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.lookuprecord import Choice
from kvcli.runtime.promptcache.marks import Breakpoint, Mark, MovedChunk
from kvcli.runtime.promptcache.missed import behind_state
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed


@dataclass(frozen=True)
class Reuse:
    """Rows of a prompt that are there: `tokens` in all, `disk` of them read from disk. `reason`: why not more.
    `choice`: what reading stored rows and computing them would take."""

    tokens: int = 0
    disk: int = 0
    reason: str = ""
    choice: Choice | None = None
    how: str = ""  # what was done to rows that were stored otherwise


@dataclass(frozen=True)
class Written:
    """How many tokens of a prompt and its answer have their rows in files that were written for it, and why there are
    not more."""

    tokens: int = 0
    failures: tuple[str, ...] = ()


NOTHING = Reuse()


class Ledger:
    """What one prompt takes from caches and gives to them: nothing but rows that its sequence has already. It belongs
    to the request."""

    def __init__(self, reuse: Reuse = NOTHING) -> None:
        self.reuse = reuse

    def expect(self, seq: Sequence, prompt_tokens: int) -> None:
        """Rows of `seq` are selected when all of the prompt is there; those whose queries are to be noted before are
        computed again."""
        assert seq.selector is not None
        seq.selector.expect(prompt_tokens)
        first = seq.reusable(prompt_tokens)
        if first < seq.length:
            have, reuse = seq.rewind_to(first), self.reuse
            how = reuse.how if have else ""
            self.reuse = replace(reuse, tokens=have, disk=min(reuse.disk, have), how=how)

    def follow(self, seq: Sequence) -> None:
        """More rows of the prompt were computed."""

    def prefilled(self, seq: Sequence, seconds: float) -> None:
        """All of the prompt's rows are there, after `seconds`."""

    def answered(self, seq: Sequence) -> Written:
        """There will be no more of them; `seq` has the answer's rows too."""
        return Written()

    def interrupted(self, seq: Sequence) -> None:
        """There will be no more rows of the prompt, of which some are missing: those that are there are kept."""

    def breakpoints(self) -> tuple[Breakpoint, ...]:
        """The marks of the prompt, and what became of them."""
        return ()

    def chunks(self) -> tuple[MovedChunk, ...]:
        """The documents whose rows were to be had from elsewhere, and what became of them."""
        return ()


class Caches(Protocol):
    """What requests share: rows of earlier prompts, in memory and on disk."""

    def ledger(self, prompt_tokens: int) -> Ledger:
        """An empty one, for a prompt of so many tokens."""

    def restore(self, seq: Sequence, prompt: list[int], marks: Iterable[Mark] = ()) -> Ledger:
        """Make `seq` the longest prefix of `prompt`, less its last token, that is to be had. What later prompts need to
        start from `marks` is kept."""

    def keeps(self, prompt_tokens: int) -> bool:
        """Whether rows of such a prompt are kept beyond the process, however it ends."""

    def find(self, seq: Sequence, tokens: list[int]) -> int:
        """How many of the first rows of a prompt that goes on from `tokens` are to be had. Changes nothing."""

    def pump(self) -> None:
        """A token was generated."""

    def park(self, seq: Sequence) -> None:
        """The pages of `seq` are wanted by others: keep its rows for `resume` as long as nobody needs the room."""

    def resume(self, seq: Sequence, tokens: list[int]) -> None:
        """Make the empty `seq` the longest prefix of `tokens`, less its last one, that is still in memory."""

    def spare(self, arena: int) -> int:
        """Pages of an arena that are held for later prompts alone, and are let go of when the pool is full."""


def live_rows(seq: Sequence, tokens: list[int]) -> int:
    """How many of the first rows of a sequence a prompt can go on from."""
    grain = seq.pool.layout.grain
    return seq.rewindable(common_length(seq.tokens, tokens) // grain * grain)


class LiveRows:
    """No cache but the sequence itself."""

    def ledger(self, prompt_tokens: int) -> Ledger:
        return Ledger()

    def restore(self, seq: Sequence, prompt: list[int], marks: Iterable[Mark] = ()) -> Ledger:
        alike = live_rows(seq, prompt[:-1])
        have = seq.rewind_to(alike)
        return Ledger(Reuse(have, reason=behind_state(alike, have) if seq.states else ""))

    def keeps(self, prompt_tokens: int) -> bool:
        return False

    def find(self, seq: Sequence, tokens: list[int]) -> int:
        return live_rows(seq, tokens)

    def pump(self) -> None:
        """Nothing to write."""

    def park(self, seq: Sequence) -> None:
        """Nowhere to keep rows."""

    def resume(self, seq: Sequence, tokens: list[int]) -> None:
        """Nothing was kept."""

    def spare(self, arena: int) -> int:
        return 0


LIVE_ROWS = LiveRows()


def carry(seq: Sequence, pool: PagePool, n_rows: int) -> Sequence:
    """A sequence in a pool over the same memory as that of `seq`, whose layout keeps other rows: of the first `n_rows`,
    which are right under both, as many as can be gone on from. `seq` is closed."""
    held, carried = seq.numbered(), Sequence(pool)
    length = longest(pool.layout, n_rows, dict.fromkeys(held, n_rows))
    pages = {key: held[key] for key in needed(pool.layout, length)}
    carried.adopt(seq.tokens[:length], pages, seq.bases, seq.foreign, seq.exact)
    seq.close()
    return carried
