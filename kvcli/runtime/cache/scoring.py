"""What a policy that selects rows by score is asked for, and told: `Scorer` and `Scored`. No torch is imported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import numpy as np
    import torch

    from kvcli.kernels import Angles, Moments

ALL = -1  # `Scorer.watches`: every query


@dataclass(frozen=True)
class Scored:
    """The n rows of one layer that the last of `length` tokens sees, in the order in which they stand in pages: those
    that were selected before, then the others by their positions.

    `positions`: in the text, int64 [kv_heads, n]. `mass`: the probabilities that the queries a scorer watches gave each
    row, summed over them and the query heads of its KV head, float64 [kv_heads, n]; None where it watches none.
    `queries`: sums over queries before RoPE, where it asks for those. `keys`, `values`: make float32 [kv_heads, n,
    dim], keys after RoPE. `scale`: of scores. `angles`: of RoPE at any positions, float64 [m]; None = the layer has
    none. `seed`: differs between layers and from selection to selection, and not between runs.
    """

    length: int
    positions: torch.Tensor
    mass: torch.Tensor | None
    queries: Moments | None
    keys: Callable[[], torch.Tensor]
    values: Callable[[], torch.Tensor]
    scale: float
    angles: Callable[[np.ndarray], Angles] | None
    seed: int


class Scorer(ABC):
    """Says how much each row of a layer is worth; those that are worth most stay, as many in each KV head.

    `watches`: how many queries before a selection it wants to know the mass of; ALL = every one. `queries`: whether it
    wants the sums of a prompt's queries. `repeats`: whether it wants in place of the mass the most that any query gave
    a row while the model repeated the prompt; then rows are selected once, and what comes later stays.
    """

    watches: ClassVar[int] = 0
    queries: ClassVar[bool] = False
    repeats: ClassVar[bool] = False

    @abstractmethod
    def score(self, rows: Scored) -> torch.Tensor:
        """Float [kv_heads, n]: the higher, the more a row is worth. Of equal ones the first stay."""

    def pinned(self, kept: int) -> tuple[int, int]:
        """How many of the first and of the last rows stay whatever their scores, where `kept` stay in all."""
        return 0, 0

    @property
    def remembers(self) -> bool:
        """Whether a selection depends on queries before the one that precedes it."""
        return self.watches == ALL or self.queries

    @property
    def least(self) -> int:
        """The fewest rows with which it makes sense."""
        return sum(self.pinned(0)) + 1
