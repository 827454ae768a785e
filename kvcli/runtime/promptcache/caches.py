"""`Caches`: what a generation asks of whatever may hold rows of its prompt. `LiveRows`: the sequence itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed


@dataclass(frozen=True)
class Reuse:
    """Rows of a prompt that are there: `tokens` in all, `disk` of them read from disk. `reason`: why not more."""

    tokens: int = 0
    disk: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Written:
    """How many tokens of a prompt and its answer have their rows in files that were written for it, and why there are
    not more."""

    tokens: int = 0
    failures: tuple[str, ...] = ()


class Caches(Protocol):
    """What a generation asks of caches."""

    def restore(self, seq: Sequence, prompt: list[int]) -> Reuse:
        """Make `seq` the longest prefix of `prompt`, less its last token, that is to be had."""

    def find(self, seq: Sequence, tokens: list[int]) -> int:
        """How many of the first rows of a prompt that goes on from `tokens` are to be had. Changes nothing."""

    def follow(self, seq: Sequence) -> None:
        """More rows of the prompt were computed."""

    def prefilled(self, seq: Sequence, seconds: float) -> None:
        """All of the prompt's rows are there, after `seconds`."""

    def pump(self) -> None:
        """A token was generated."""

    def answered(self, seq: Sequence) -> Written:
        """There will be no more of them; `seq` has the answer's rows too."""


class LiveRows:
    """No cache but the sequence itself."""

    def restore(self, seq: Sequence, prompt: list[int]) -> Reuse:
        return Reuse(seq.rewind_to(common_length(seq.tokens, prompt[:-1])))

    def find(self, seq: Sequence, tokens: list[int]) -> int:
        return seq.rewindable(common_length(seq.tokens, tokens))

    def follow(self, seq: Sequence) -> None:
        """Nothing to remember."""

    def prefilled(self, seq: Sequence, seconds: float) -> None:
        """Nothing to write."""

    def pump(self) -> None:
        """Nothing to write."""

    def answered(self, seq: Sequence) -> Written:
        return Written()


def keep_rows(seq: Sequence, n_rows: int) -> None:
    """Where the pool's layout has changed, and with it what is held: keep of the first `n_rows`, which are right under
    both layouts, as many as can be gone on from."""
    held = seq.numbered()
    length = longest(seq.pool.layout, n_rows, dict.fromkeys(held, n_rows))
    seq.adopt(seq.tokens[:length], {key: held[key] for key in needed(seq.pool.layout, length)}, seq.bases)
