"""What the last tokens of a text look at: the mass of attention by position."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kvcli.errors import UsageError
from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.cache.eviction.snapkv import WINDOW
from kvcli.runtime.engine.engine import Engine

WATCHING = EvictOptions("snapkv", budget="100%")  # it notes what the last queries look at, and lets go of nothing


@dataclass(frozen=True)
class Looked:
    """`shares` float64 [n]: of each token, the share of all attention that the last `queries` tokens paid to it, over
    the `layers` that see the whole text and their heads; they sum to one where no head has a sink of its own."""

    queries: int
    layers: int
    shares: torch.Tensor

    def stretches(self, most: int, size: int) -> list[tuple[int, int, float]]:
        """(first, end, share) of at most `most` stretches, whole pages of `size` tokens each."""
        n = len(self.shares)
        each = math.ceil(math.ceil(n / size) / most) * size
        return [(at, min(at + each, n), float(self.shares[at : at + each].sum())) for at in range(0, n, each)]


def watching(cache: CacheOptions, tokens: int) -> CacheOptions:
    """The options of an engine for `look` at so many tokens."""
    return replace(cache, ctx_size=tokens + cache.page_size, evict=WATCHING, force_types=True)


def look(engine: Engine, tokens: list[int]) -> Looked:
    """Compute a text from nothing. The engine has been opened for it: see `watching`. Raises UsageError for a text that
    is too short, and DoesNotFit."""
    if len(tokens) <= WINDOW:
        raise UsageError(f"the text has {len(tokens):,} tokens", f"what the last {WINDOW} look at needs more")
    seq = engine.new_sequence()
    assert seq.selector is not None
    seq.selector.expect(len(tokens))
    try:
        for start, end in engine.chunks(0, len(tokens)):
            engine.forward(seq, tokens[start:end])
        mass = seq.selector.mass(len(tokens)).cpu()
    finally:
        seq.close()
    return Looked(WINDOW, len(mass), mass.sum(0) / (WINDOW * len(mass) * engine.config.n_heads))
