"""`Guesses`: what is guessed of one answer, and what became of it. No torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kvcli.errors import UsageError
from kvcli.runtime.engine.spec import DRAFT, MTP, OFF
from kvcli.runtime.engine.spec.pace import ROWS, Judgement, Pace
from kvcli.runtime.engine.spec.texts import Guess, Pool, Texts

if TYPE_CHECKING:
    import torch

    from kvcli.runtime.engine.sampler import Sampler


# What methods need that is loaded with the model.
_NEEDED = {
    DRAFT: ("a model that drafts", "name one with `draft`"),
    MTP: ("the layer of the model's file that predicts further tokens", "load the model with `mtp`"),
}


class Drafts(Protocol):
    """What makes guesses of a model of its own, by a `method`; see `DraftModel` and `Predictions`."""

    method: str

    def guesses(self, session: Session) -> Guesses: ...

    def close(self) -> None: ...


class Session:
    """What the answers of an engine learn from each other: earlier ones, and how long steps take."""

    def __init__(self, costs: Sequence[float], drafts: Drafts | None = None) -> None:
        """`costs`: see `Pace`."""
        self.pool, self.pace, self.drafts = Pool(), Pace(costs), drafts

    def guesses(self, method: str) -> Guesses:
        """For a new answer. Raises UsageError for a method that needs what is not there."""
        if method not in _NEEDED:
            return Guesses(self, method)
        if self.drafts is None or self.drafts.method != method:
            raise UsageError(f"`spec={method}` needs {_NEEDED[method][0]}", _NEEDED[method][1])
        return self.drafts.guesses(self)


class Guesses:
    """`next` guesses before each step of an answer, `stepped` is told how that ended, and `more` of every token.
    `close` lets go of what belongs to the answer; it can be gone on with.

    `steps`: how many there were; `drafted`: tokens that were computed before they were known; `accepted`: those of them
    that were right; `reading_s`: seconds in which a model of its own read the prompt while the answer was written.
    `reads`: `computed` is told of every row; `ever`: there may be guesses.
    """

    reads = False

    def __init__(self, session: Session, method: str) -> None:
        self.session = session
        self.steps = self.drafted = self.accepted = 0
        self.reading_s = 0.0
        self.ever = method != OFF
        self._texts = Texts(method, session.pool.text) if self.ever else None
        self._judgement = Judgement(session.pace)
        self._guess = Guess([], 0)
        self._asked: tuple[float, int, int] | None = None  # when, behind how many tokens, for how many rows

    def follow(self, sampler: Sampler) -> None:
        """Tokens are drawn as this one draws them."""

    def more(self, ids: Sequence[int]) -> None:
        """These tokens have come."""
        for token in ids if self._guess.ids else ():
            (first, *rest), matched = self._guess
            self._judgement.saw(matched, first == token)
            self._guess = Guess(rest if first == token else [], matched + 1)
            if not self._guess.ids:
                break
        if self._texts is not None:
            self._texts.extend(ids)

    def computed(self, tokens: Sequence[int], start: int, features: torch.Tensor) -> None:
        """The rows of `tokens` from `start` on are computed. `features` [n, ...]: see `Predictor.fused`."""

    def next(self, length: int, most: int) -> list[int]:
        """Tokens to compute with the newest one of `length`, at most so many, as many as are worth it."""
        now, found = time.perf_counter(), self._guessed(most) if most > 0 and self._texts is not None else []
        self._asked = now, length, 1 + len(found)
        return found

    def _guessed(self, most: int) -> list[int]:
        assert self._texts is not None
        self._guess = self._texts.guess(ROWS[-1] - 1)
        return self._guess.ids[: self._judgement.worth(self._guess.matched, min(most, len(self._guess.ids)))]

    def stepped(self, length: int) -> None:
        """The step is over, if there was one, and the text has `length` tokens."""
        if self._asked is not None:
            began, before, rows = self._asked
            self._asked, self.steps = None, self.steps + 1
            self.session.pace.took(rows, length - before, time.perf_counter() - began)

    def over(self, answer: Sequence[int]) -> None:
        """The answer is whole."""
        if self._texts is not None:
            self.session.pool.add(answer)

    def close(self) -> None:
        """Texts hold nothing."""
