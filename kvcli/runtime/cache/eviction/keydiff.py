"""`--evict keydiff`: rows whose keys are unlike the others (KeyDiff, arXiv 2504.15364)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch


class KeyDiff(Scorer):
    """How far the direction of a key is from the mean of all directions; no query is looked at."""

    def score(self, rows: Scored) -> torch.Tensor:
        import torch.nn.functional as F

        keys = F.normalize(rows.keys(), dim=-1)
        anchor = F.normalize(keys.mean(1, keepdim=True), dim=-1)
        return -(keys * anchor).sum(-1)


POLICY = Policy(scorer=KeyDiff, forgets="rows whose keys are alike")
