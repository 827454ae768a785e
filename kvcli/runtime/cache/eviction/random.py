"""`--evict random`: any rows, the first few and the recent ones apart: what every score has to beat (compare "Random
Attention", arXiv 2609.03430)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch

SINKS, RECENT = 4, 32


class Random(Scorer):
    """Numbers that are drawn anew for each layer, head and selection, the same in every run."""

    def score(self, rows: Scored) -> torch.Tensor:
        import numpy as np
        import torch

        drawn = np.random.default_rng(rows.seed).random(tuple(rows.positions.shape))
        return torch.from_numpy(drawn).to(rows.positions.device)

    def pinned(self, kept: int) -> tuple[int, int]:
        return SINKS, RECENT


POLICY = Policy(scorer=Random, forgets="rows by chance")
