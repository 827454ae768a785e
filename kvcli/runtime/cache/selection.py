"""`Selection`: how many rows stay where they are selected by score, and when. No torch."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from kvcli.errors import UsageError
from kvcli.runtime.cache.scoring import Scorer


@dataclass(frozen=True)
class Budget:
    """So many rows, or, where `rows` is 0, a share of the tokens so far."""

    rows: int = 0
    share: float = 0.0

    @classmethod
    def of(cls, text: str) -> Budget:
        """Raises UsageError.

        >>> Budget.of("512"), Budget.of("25%")
        (Budget(rows=512, share=0.0), Budget(rows=0, share=0.25))
        """
        found = re.fullmatch(r"(\d+)(k?)|(\d+(?:\.\d+)?) ?%", text.strip())
        if found is None:
            raise UsageError(
                f"`budget` must be a number of tokens or a share of them, not '{text}'", "such as 1k or 25%"
            )
        if found[3] is None:
            if not int(found[1]):
                raise UsageError("`budget` must be more than 0 tokens", "such as 1k or 25%")
            return cls(rows=int(found[1]) * (1024 if found[2] else 1))
        if not 0 < float(found[3]) <= 100:
            raise UsageError(f"`budget` must be more than 0 % and at most 100 %, not '{text}'")
        return cls(share=float(found[3]) / 100)

    def __str__(self) -> str:
        return f"{self.rows:,} tokens" if self.rows else f"{100 * self.share:g} % of the tokens"


@dataclass(frozen=True)
class Selection:
    """Rows are selected when a prompt is there, and again while an answer is written, in layers that see the whole
    context. The page that is being filled stays as it is.

    `policy`: the value of --evict. `room`: rows that the context has room for.
    """

    policy: str
    scorer: Scorer
    budget: Budget
    page_size: int
    room: int

    @property
    def least(self) -> int:
        """The fewest rows that can stay: a page that is being filled, and what the scorer needs."""
        return self.page_size + self.scorer.least

    def stays(self, length: int) -> int:
        """How many rows stay of a sequence of that length, which may be more than there are."""
        return max(self.least, self.budget.rows or math.ceil(self.budget.share * length))

    def most(self, length: int) -> int:
        """How many rows a query of an answer sees at most, at the end of `length` tokens."""
        if self.scorer.repeats:  # rows are selected once
            return length
        stays = self.stays(length)
        return min(length, stays + self.pause(stays))

    def pause(self, kept: int) -> int:
        """How many tokens come between a selection that keeps so many rows and the next one: an eighth as many, at
        least two pages, and no more than there is room for."""
        return max(1, min(max(2, kept // 8 // self.page_size) * self.page_size, self.room - kept))

    @property
    def identity(self) -> str:
        """What selected rows depend on beside the tokens, in words that promptcache/sameness.py reads."""
        return f"select {self.policy} {self.budget.rows or f'{100 * self.budget.share:g}%'}"

    def notice(self) -> str:
        """What is forgotten, for people; "" = nothing."""
        if self.budget.share == 1:
            return ""
        return f"rows are forgotten when the prompt is read: {self} stay, those that {self.policy} scores highest"

    def __str__(self) -> str:
        return str(self.budget)
