"""What a cache of keys and values is worth: the same tokens with it, and without, where each is the last row of a whole
prompt. The second arm is what generation costs in programs that keep nothing between tokens."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvcli.options import SampleOptions
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache.prefixpages import common_length

if TYPE_CHECKING:
    from kvcli.runtime.cache.sequence import Sequence
    from kvcli.runtime.engine.engine import Engine

WARM_UP = 2  # tokens


@dataclass(frozen=True)
class Both:
    """`generated` tokens behind `prompt` ones, greedy: seconds from the prompt to the last token, of each repetition.

    `computed`: rows that went through the model. `same`: how many tokens were the same in both arms, from the first.
    """

    prompt: int
    generated: int
    cached_s: tuple[float, ...]
    uncached_s: tuple[float, ...]
    same: int

    @property
    def cached(self) -> float:
        return statistics.median(self.cached_s)

    @property
    def uncached(self) -> float:
        return statistics.median(self.uncached_s)

    @property
    def times(self) -> float:
        """How many times as fast it is with the cache."""
        return self.uncached / self.cached

    @property
    def computed(self) -> tuple[int, int]:
        """With the cache and without."""
        n = self.generated
        return self.prompt + n - 1, n * self.prompt + n * (n - 1) // 2


def run(
    engine: Engine, wanted: list[tuple[int, int]], repetitions: int, warmup: bool, tell: Callable[[str], None]
) -> Iterator[Both]:
    """Measure (tokens of the prompt, tokens generated) one after the other; `tell` hears what begins. The arms take
    turns, so that what else the machine does falls upon both."""
    seq = engine.new_sequence()
    try:
        for prompt, generated in wanted:
            both = Both(prompt, generated, (), (), 0)
            tell(f"{prompt} + {generated} tokens, {both.computed[1]:,} rows without the cache")
            ids = random.Random(0).choices(range(engine.config.vocab_size), k=prompt)
            if warmup:
                for arm in (_cached, _uncached):
                    arm(engine, seq, ids, min(generated, WARM_UP))
            seconds: tuple[list[float], list[float]] = [], []
            for _ in range(repetitions):
                (with_it, tokens), (without, others) = (f(engine, seq, ids, generated) for f in (_cached, _uncached))
                seconds[0].append(with_it)
                seconds[1].append(without)
            yield Both(prompt, generated, tuple(seconds[0]), tuple(seconds[1]), common_length(tokens, others))
    finally:
        seq.close()


def _cached(engine: Engine, seq: Sequence, ids: list[int], count: int) -> tuple[float, list[int]]:
    """Seconds, and the tokens."""
    seq.rewind_to(0)
    began = time.perf_counter()
    options = SampleOptions(temperature=0.0, max_tokens=count, ignore_eos=True, spec="off")
    *_, end = engine.generate(seq, ids, options)
    assert isinstance(end, End)
    return time.perf_counter() - began, end.ids


@torch.inference_mode()
def _uncached(engine: Engine, seq: Sequence, ids: list[int], count: int) -> tuple[float, list[int]]:
    """As above, with all rows computed for every token."""
    banned = sorted(engine.tokenizer.eog_ids)
    ids, began = list(ids), time.perf_counter()
    for _ in range(count):
        seq.rewind_to(0)
        for start, end in engine.chunks(0, len(ids)):
            hidden = engine.forward(seq, ids[start:end])
        logits = engine.logits(hidden[-1:])[0]
        logits[banned] = float("-inf")
        ids.append(int(logits.argmax()))
    return time.perf_counter() - began, ids[-count:]
