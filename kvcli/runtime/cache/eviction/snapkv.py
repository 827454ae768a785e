"""`--evict snapkv`: rows that the last queries of the prompt look at, with their neighbours (arXiv 2404.14469)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch

WINDOW = 64  # queries that are watched, and rows that stay: as in the authors' code
KERNEL = 5  # neighbours in the text whose mass is averaged


class SnapKV(Scorer):
    """The mass that the last WINDOW queries give each row, averaged over KERNEL neighbours.

    While an answer is written the same is done with its last WINDOW queries; the paper selects once.
    """

    watches = WINDOW

    def score(self, rows: Scored) -> torch.Tensor:
        import torch.nn.functional as F

        assert rows.mass is not None
        order = rows.positions.argsort(1)
        in_order = rows.mass.gather(1, order)
        pooled = F.avg_pool1d(in_order[:, None], KERNEL, 1, KERNEL // 2)[:, 0]
        return pooled.scatter(1, order, pooled)

    def pinned(self, kept: int) -> tuple[int, int]:
        return 0, WINDOW


POLICY = Policy(scorer=SnapKV, forgets="rows that the last queries do not look at")
