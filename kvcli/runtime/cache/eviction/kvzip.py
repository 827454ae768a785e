"""`--evict kvzip`: rows that the model looks at while it repeats the prompt, whatever is asked later (KVzip, arXiv
2505.23416)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch


class KVzip(Scorer):
    """The largest probability that any query gives a row while the prompt is repeated (engine/replaying.py).

    Rows are selected once, and those that come later stay. The paper takes the softmax over one piece of the prompt and
    its repetition, and has a budget for each head; here it is over all rows, and all heads keep as many.
    """

    repeats = True

    def score(self, rows: Scored) -> torch.Tensor:
        assert rows.mass is not None
        return rows.mass


POLICY = Policy(scorer=KVzip, forgets="rows that repeating the prompt does not need")
