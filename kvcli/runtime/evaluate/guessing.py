"""What guessed tokens are worth: answers that copy a text, and answers in words of their own, with guesses and without.

The answers are greedy, so that both have the same tokens, and take turns.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.spec import OFF
from kvcli.runtime.evaluate.rates import WARMUP_TOKENS, Rates
from kvcli.runtime.evaluate.tasks import filler
from kvcli.runtime.promptcache.prefixpages import common_length

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine

COPYING, PROSE = "copying", "prose"
ARMS = (COPYING, PROSE)
_ASKED = {COPYING: "\n\nOnce more, word by word:\n\n", PROSE: "\n\nWhat I think of this is"}


@dataclass(frozen=True)
class Guessed(Rates):
    """Answers of one arm behind prompts of `prompt` tokens: tokens a second behind the first one, of each repetition,
    with guesses and without. `same`: tokens that both have in common, of all."""

    arm: str
    prompt: int
    tokens: int
    rates: tuple[float, ...]
    plain_rates: tuple[float, ...]
    drafted: int
    accepted: int
    steps: int
    same: int

    @property
    def plain(self) -> float:
        return statistics.median(self.plain_rates)

    @property
    def times(self) -> float:
        """How many times as fast it is with guesses."""
        return self.median / self.plain

    @property
    def tokens_per_step(self) -> float:
        """Tokens behind the first ones that a step gave."""
        return (self.steps + self.accepted) / self.steps if self.steps else 0.0


def run(
    engine: Engine, method: str, lengths: list[int], counts: list[int], repetitions: int, warmup: bool,
    tell: Callable[[str], None],
) -> Iterator[Guessed]:  # fmt: skip
    """Measure both arms with texts of each length and so many tokens of an answer. `tell` hears what begins."""
    for length in lengths:
        for tokens in counts:
            for arm in ARMS:
                tell(f"{arm}, {length} + {tokens} tokens")
                yield _measured(engine, method, arm, length, tokens, repetitions, warmup)


def rows(length: int, tokens: int) -> int:
    """Of the context."""
    return length + length // 4 + 64 + tokens + 2


def _measured(
    engine: Engine, method: str, arm: str, length: int, tokens: int, repetitions: int, warmup: bool
) -> Guessed:
    guessed, plain, prompt = list[End](), list[End](), list[int]()
    for number in range(-int(warmup), repetitions):
        prompt = _prompt(engine, arm, length, number)
        most = tokens if number >= 0 else min(tokens, WARMUP_TOKENS)
        both = [_answer(engine, prompt, each, most) for each in (method, OFF)[:: 1 if number % 2 else -1]]
        if number >= 0:
            first, second = both if number % 2 else reversed(both)
            guessed.append(first)
            plain.append(second)
    usages = [end.usage for end in guessed]
    return Guessed(
        arm, len(prompt), sum(len(end.ids) for end in guessed), tuple(end.timings.decode_tps for end in guessed),
        tuple(end.timings.decode_tps for end in plain), sum(u.drafted_tokens for u in usages),
        sum(u.accepted_tokens for u in usages), sum(u.decode_steps for u in usages),
        sum(common_length(a.ids, b.ids) for a, b in zip(guessed, plain, strict=True)),
    )  # fmt: skip


def _prompt(engine: Engine, arm: str, length: int, number: int) -> list[int]:
    """Of `length` tokens of text, and what is asked of it; where it is to be copied, with the beginning of that."""
    words, first = engine.tokenizer, int(engine.tokenizer.add_bos)
    tokens = words.encode(filler(random.Random(f"{arm} {number}"), length // 4 + 1))[:length]
    again = tokens[first : length // 4] if arm == COPYING else []
    return [*tokens, *words.encode(_ASKED[arm])[first:], *again]


def _answer(engine: Engine, prompt: list[int], method: str, tokens: int) -> End:
    options = SampleOptions(temperature=0.0, max_tokens=1 + tokens, ignore_eos=True, spec=method, loop_stop=False)
    with closing(engine.new_sequence()) as seq:
        *_, end = engine.generate(seq, prompt, options)
    assert isinstance(end, End)
    return end
