"""Guesses that are right but for some, whatever the model is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from batches import Watched, alone

from kvcli.options import SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.spec.guesses import Guesses, Session


class Erring(Guesses):
    """Guesses as many tokens as there is room for: those that come, by `knows`, but for one in `wrong`."""

    def __init__(self, session: Session, knows: Sequence[int], wrong: int, seed: int) -> None:
        super().__init__(session, "suffix")
        self.knows, self.wrong, self.random, self.at = list(knows), wrong, random.Random(seed), 0

    def more(self, ids: Sequence[int]) -> None:
        if len(ids) == 1:  # not the prompt
            self.at += 1

    def next(self, length: int, most: int) -> list[int]:
        super().next(length, 0)
        right = self.knows[self.at : self.at + self.random.randint(0, max(0, min(most, 15)))]
        return [(token + 1) % 300 if self.random.randrange(self.wrong) == 0 else token for token in right]


def guessed(
    engine: Engine, prompt: list[int], options: SampleOptions, wrong: int, seed: int
) -> tuple[Watched, Watched]:
    """The answer without guesses and with them."""
    plain = alone(engine, prompt, replace(options, spec="off"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(engine.session, "guesses", lambda method: Erring(engine.session, plain.ids, wrong, seed))
        return plain, alone(engine, prompt, options)
