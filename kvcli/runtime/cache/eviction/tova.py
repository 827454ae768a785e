"""`--evict tova`: rows that the newest query looks at (TOVA, arXiv 2401.06104)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch


class TOVA(Scorer):
    """The mass that the newest query gives each row, averaged over all heads of the layer: these keep the same rows.

    The paper lets go of one row with each token; here it is some at a time.
    """

    watches = 1

    def score(self, rows: Scored) -> torch.Tensor:
        assert rows.mass is not None
        return rows.mass.mean(0, keepdim=True).expand_as(rows.mass)

    def pinned(self, kept: int) -> tuple[int, int]:
        return 0, 1


POLICY = Policy(scorer=TOVA, forgets="rows that the newest query does not look at")
