"""Experts: which of them a row has, products with their matrices, and their weighted sum. The plain-torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvcli.kernels.reference.matmul import QuantTensor
from kvcli.kernels.reference.sums import exp, total
from kvcli.routing import CHOSEN, SIGMOID, Routing

LEAST_SUM = 1e-20  # that weights are divided by


@dataclass(frozen=True)
class ExpertTensor:
    """A matrix of each expert as its file stores it: `blocks` uint8 [experts, rows, row bytes] of GGML type `type`, or
    [rows, row bytes] of each expert where they lie apart."""

    type: str
    blocks: torch.Tensor | tuple[torch.Tensor, ...]
    cols: int

    @property
    def experts(self) -> int:
        return len(self.blocks)

    @property
    def rows(self) -> int:
        """Of one expert."""
        return self.blocks[0].shape[0]

    @property
    def nbytes(self) -> int:
        return self.experts * self.blocks[0].numel()

    @property
    def stacked(self) -> torch.Tensor:
        """All experts one behind the other, [experts * rows, row bytes]: a copy where they lie apart."""
        return torch.cat(self.blocks) if isinstance(self.blocks, tuple) else self.blocks.flatten(0, 1)

    def part(self, start: int, end: int) -> ExpertTensor:
        """Rows [start, end) of each expert."""
        if isinstance(self.blocks, tuple):
            return replace(self, blocks=tuple(x[start:end] for x in self.blocks))
        return replace(self, blocks=self.blocks[:, start:end])

    def of(self, expert: int) -> QuantTensor:
        return QuantTensor(self.type, self.blocks[expert], self.cols)


@dataclass(frozen=True)
class ExpertMatrices:
    """Matrices whose rows are stacked expert by expert, and what is added to their product, `bias` float32 [experts,
    sum of rows]."""

    parts: tuple[ExpertTensor, ...]
    bias: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.parts[0].experts


def place_experts(weights: ExpertMatrices, paired: bool = False) -> ExpertMatrices:
    """As `place`, of matrices of experts: on a CPU where the file is mapped."""
    return weights


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of rows from their router's logits [T, experts]: ids int64 and weights float32, [T, used] each, the
    best one first. `bias` [experts] is added to the scores by which they are chosen, not to their weights."""
    scores = _scores(logits, routing.gating)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        choice = choice.masked_fill(~_in_best_groups(choice, routing), -torch.inf)
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.used].contiguous()
    weights = scores.gather(1, ids)
    if routing.gating == CHOSEN:
        weights = exp(weights - weights.amax(1, keepdim=True))
    if routing.normed or routing.gating == CHOSEN:
        weights = weights / total(weights)[:, None].clamp(min=LEAST_SUM)
    return ids, weights * routing.scale


def _scores(logits: torch.Tensor, gating: str) -> torch.Tensor:
    if gating == CHOSEN:
        return logits
    if gating == SIGMOID:
        return sigmoid(logits)
    powers = exp(logits - logits.amax(1, keepdim=True))
    return powers / total(powers)[:, None]


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1.0 / (exp(-x) + 1.0)


def _in_best_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """bool [T, experts]."""
    grouped = choice.unflatten(1, (routing.groups, -1))
    sums = grouped.topk(min(routing.best, grouped.shape[2]), dim=2).values.sum(2)
    best = sums.sort(dim=1, descending=True, stable=True).indices[:, : routing.groups_used]
    inside = torch.zeros(sums.shape, dtype=torch.bool).scatter_(1, best, True)
    return inside.repeat_interleave(grouped.shape[2], dim=1)


class Products(Protocol):
    """The operation of the facade that `matmul_experts` is written in."""

    def matmul(self, x: torch.Tensor, weights: Sequence[QuantTensor]) -> torch.Tensor: ...


def matmul_experts(ops: Products, x: torch.Tensor, weights: ExpertMatrices, ids: torch.Tensor) -> torch.Tensor:
    """Rows times the matrices of their experts, with the bias: ids int64 [T, used] -> float32 [T * used, sum of rows].

    x is [T, cols], rows that all experts of theirs read, or [T * used, cols], one for each. Only matrices of experts
    that are named are read, each once.
    """
    flat = ids.flatten()
    out = torch.empty(flat.numel(), sum(w.rows for w in weights.parts))
    for expert in flat.unique().tolist():
        pairs = (flat == expert).nonzero()[:, 0]
        out[pairs] = ops.matmul(x[pairs // (flat.numel() // x.shape[0])], [w.of(expert) for w in weights.parts])
    return out if weights.bias is None else out.add_(weights.bias[flat])


class ExpertProducts(Protocol):
    """The operation of the facade that `by_head` is written in."""

    def matmul_experts(self, x: torch.Tensor, weights: ExpertMatrices, ids: torch.Tensor) -> torch.Tensor: ...


def by_head(ops: ExpertProducts, x: torch.Tensor, weights: ExpertMatrices) -> torch.Tensor:
    """Heads' parts of rows, each times the matrix of its head: x [T, heads, cols] -> float32 [T, heads, rows]."""
    t, heads, cols = x.shape
    ids = torch.arange(heads).repeat(t, 1)
    return ops.matmul_experts(x.reshape(t * heads, cols), weights, ids).view(t, heads, -1)


def mix(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums, in order: y [T * n, D], weights [T, n] -> [T, D]."""
    each = y.unflatten(0, weights.shape) * weights[..., None]
    out = each[:, 0].clone()
    for i in range(1, weights.shape[1]):
        out += each[:, i]
    return out
