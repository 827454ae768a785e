"""`--evict h2o`: rows that all queries so far have looked at most, and the recent ones (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import ALL, Scored, Scorer

if TYPE_CHECKING:
    import torch


class H2O(Scorer):
    """The mass that all queries gave each row, of the prompt and of the answer so far. Half of what stays is recent.

    The paper lets go of one row with each token; here it is some at a time.
    """

    watches = ALL

    def score(self, rows: Scored) -> torch.Tensor:
        assert rows.mass is not None
        return rows.mass

    def pinned(self, kept: int) -> tuple[int, int]:
        return 0, kept // 2


POLICY = Policy(scorer=H2O, forgets="rows that few queries have looked at")
