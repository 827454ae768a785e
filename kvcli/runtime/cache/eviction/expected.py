"""`--evict expected`: rows that queries to come will probably look at (Expected Attention, arXiv 2510.00636)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.runtime.cache.eviction import Policy
from kvcli.runtime.cache.scoring import Scored, Scorer

if TYPE_CHECKING:
    import torch

FUTURE = 512  # positions whose RoPE is averaged
SINKS = 4
SLICE = 512  # rows of which products are alive at once


class Expected(Scorer):
    """The softmax of log E[exp(q . k)] for queries that are normally distributed, as those of the prompt were before
    RoPE, at the mean of RoPE over the next FUTURE positions; times the length of the value.

    While an answer is written the queries are still those of the prompt.
    """

    queries = True

    def score(self, rows: Scored) -> torch.Tensor:
        import torch

        assert rows.queries is not None and rows.queries.first is not None and rows.queries.second is not None
        keys = rows.keys()  # [kv_heads, n, dim]
        mean = rows.queries.first / rows.queries.count  # [heads, dim]
        spread = rows.queries.second / rows.queries.count - mean[:, :, None] * mean[:, None]
        if rows.angles is not None:
            turn = _mean_turn(rows, keys.shape[-1]).to(mean)
            mean, spread = mean @ turn.T, turn @ spread @ turn.T
        group = len(mean) // len(keys)
        mean, spread = mean.unflatten(0, (-1, group)), spread.unflatten(0, (-1, group))
        expected = []
        for some in keys.split(SLICE, 1):
            each = some[:, None].double()  # [kv_heads, 1, SLICE, dim]
            linear = (each @ mean[..., None])[..., 0]
            square = ((each @ spread) * each).sum(-1)
            expected.append(rows.scale * linear + rows.scale**2 / 2 * square)
        return torch.cat(expected, -1).softmax(-1).mean(1) * rows.values().norm(dim=-1)

    def pinned(self, kept: int) -> tuple[int, int]:
        return SINKS, 0


def _mean_turn(rows: Scored, dim: int) -> torch.Tensor:
    """The mean of the matrices that RoPE multiplies queries by at the positions to come: float64 [dim, dim]."""
    import numpy as np
    import torch

    assert rows.angles is not None
    cos, sin = (x.double().mean(0) for x in rows.angles(rows.length + np.arange(FUTURE, dtype=np.float64)))
    half = len(cos)
    found, i = torch.eye(dim, dtype=torch.float64), torch.arange(half)
    found[i, i] = found[i + half, i + half] = cos
    found[i, i + half], found[i + half, i] = -sin, sin
    return found


POLICY = Policy(scorer=Expected, forgets="rows that later queries will hardly look at")
