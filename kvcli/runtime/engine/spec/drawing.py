"""`DrawnGuesses`: guesses that a model of their own draws (Leviathan et al., "Fast inference from transformers via
speculative decoding", arXiv 2211.17192).

Each token is drawn as the answer's own sampler draws it, with the random number of the same position: so the two agree
where their distributions do, and what is accepted is the token that would have come anyway.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Some
from dataclasses import replace

import torch

from kvcli.errors import DoesNotFit
from kvcli.options import SampleOptions
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.spec import OFF
from kvcli.runtime.engine.spec.guesses import Guesses, Session
from kvcli.runtime.engine.spec.pace import Drafted

REMEDY = "that is the draft model: its file may be damaged; pull it again, or leave `draft` out"


def drawing_as(options: SampleOptions, vocab_size: int) -> Sampler:
    """Draws as these settled options say, but without DRY, which cannot take guesses back. A grammar is for whoever
    knows where the answer stands in it."""
    bias = {token: by for token, by in options.logit_bias.items() if token < vocab_size}
    options = replace(options, logit_bias=bias, dry_multiplier=0.0, grammar="", logprobs=None)
    return Sampler(options, {}, vocab_size, remedy=REMEDY)


class DrawnGuesses(Guesses):
    """How many to draw, and how. Subclasses `_draft`: so many, fewer where rows are missing; DoesNotFit where there is
    no room for rows."""

    def __init__(self, session: Session, vocab_size: int, ends: frozenset[int]) -> None:
        """`ends`: tokens that end a text. No ids are guessed from `vocab_size` on."""
        super().__init__(session, OFF)  # no text guesses
        self.ever = True
        self.vocab_size, self._ends, self._drafted = vocab_size, ends, Drafted(session.pace)
        self._known: list[int] = []  # prompt and answer
        self._n_prompt = 0
        self._pending: tuple[int, int] | None = None  # of the step that is on its way, and how many were right before
        self._full = False  # there is no room for the rows of this answer

    def _draft(self, count: int) -> list[int]:
        raise NotImplementedError

    def follow(self, sampler: Sampler) -> None:
        self._asked_by = sampler
        self._sampler = drawing_as(SampleOptions(**sampler.effective), self.vocab_size)

    def more(self, ids: Some[int]) -> None:
        self._n_prompt = self._n_prompt or len(ids)
        self._known.extend(ids)

    def next(self, length: int, most: int) -> list[int]:
        found, count = list[int](), 0 if self._full else self._drafted.worth(most)
        if count:
            try:
                found = self._draft(count)
            except DoesNotFit:
                self._full = True
                self.close()
        self._asked = time.perf_counter(), length, 1 + len(found)
        self._pending = (len(found), self.accepted) if found else None
        return found

    def stepped(self, length: int) -> None:
        super().stepped(length)
        if self._pending is not None:
            drafted, before = self._pending
            self._drafted.saw(drafted, self.accepted - before)
            self._pending = None

    def over(self, answer: Some[int]) -> None:
        self.close()

    @property
    def _constrained(self) -> bool:
        """Whether a grammar says what may come."""
        return self._asked_by.constrained and self._asked_by.follows

    def _upto_end(self, found: list[int]) -> list[int]:
        """Guesses up to one that ends the text."""
        end = next((i + 1 for i, token in enumerate(found) if token in self._ends), len(found))
        return found[:end]

    def _drawn(self, logits: torch.Tensor, count: int, run: Callable[[int], torch.Tensor]) -> list[int]:
        """The tokens that may follow what is known, by the logits [vocab] behind it, up to one that ends the text.
        `run`: computes a token's row -> its logits, which are there until the next call."""
        text, found, size = self._known, list[int](), self.vocab_size
        sampler, asked = self._sampler, self._asked_by
        there = asked.constraint if self._constrained else None
        sampler.constraint = grammar = there.copy(size) if there else None
        sampler.follows = grammar is not None
        try:
            while True:
                found.append(sampler.sample(logits[:size], text, len(text)))
                text.append(found[-1])
                if grammar is not None:
                    grammar.accept(found[-1])
                if len(found) == count or found[-1] in self._ends:
                    return found
                logits = run(found[-1])
        finally:
            del text[len(text) - len(found) :]
