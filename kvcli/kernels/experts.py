"""`experts` on a CPU, and `ExpertLayer`, which says what one layer's experts are on every backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kvcli.kernels.reference.experts import sigmoid
from kvcli.routing import Routing

Placed = tuple[Any, ...]  # what a backend's `place` made of matrices
Experts = Any  # what its `place_experts` made of ExpertMatrices


@dataclass(frozen=True)
class SharedExpert:
    """A gated feed-forward part for all rows, beside those that are chosen. `gate`: a matrix of one row, by the sigmoid
    of whose product what it gives is multiplied."""

    gate_up: Placed
    down: Placed
    gate: Placed | None = None


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts (arXiv 1701.06538): gated feed-forward parts, of which each row has some.

    `router` gives the logits that `routing` chooses by. Of each expert `gate_up` has gates over what they gate, and
    `down` what gives its sum. float32 [experts] or None: `router_bias` is added to logits, `choice_bias` to the scores
    that experts are chosen by.
    """

    routing: Routing
    activation: str
    router: Placed
    gate_up: Experts
    down: Experts
    router_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    shared: SharedExpert | None = None


class Operations(Protocol):
    """The operations of the facade that `experts` is written in."""

    def matmul(self, x: torch.Tensor, weights: Sequence[Any], add_to: torch.Tensor | None = None) -> torch.Tensor: ...
    def matmul_experts(self, x: torch.Tensor, weights: Experts, ids: torch.Tensor) -> torch.Tensor: ...
    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def mix(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
    def glu(self, x: torch.Tensor, act: str) -> torch.Tensor: ...
    def gated(self, x: torch.Tensor, weights: Sequence[Any], act: str) -> torch.Tensor: ...


def experts(ops: Operations, x: torch.Tensor, layer: ExpertLayer) -> torch.Tensor:
    """The weighted sum of what the experts of each row give: x [T, D], normed -> float32 [T, D].

    The sum is in the order in which the experts were chosen, the best one first, and then the shared one.
    """
    logits = ops.matmul(x, layer.router)
    if layer.router_bias is not None:
        logits += layer.router_bias
    ids, weights = ops.route(logits, layer.routing, layer.choice_bias)
    activated = ops.glu(ops.matmul_experts(x, layer.gate_up, ids), layer.activation)
    out = ops.mix(ops.matmul_experts(activated, layer.down, ids), weights)
    return out if layer.shared is None else out.add_(_shared(ops, x, layer.shared, layer.activation))


def _shared(ops: Operations, x: torch.Tensor, shared: SharedExpert, activation: str) -> torch.Tensor:
    out = ops.matmul(ops.gated(x, shared.gate_up, activation), shared.down)
    return out if shared.gate is None else out.mul_(sigmoid(ops.matmul(x, shared.gate)))
