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
    """A feed-forward part for all rows, beside those that are chosen. `gate`: a matrix of one row, by the sigmoid
    of whose product what it gives is multiplied."""

    gate_up: Placed
    down: Placed
    gate: Placed | None = None


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts (arXiv 1701.06538): feed-forward parts, of which each row has some.

    `router` gives the logits that `routing` chooses by. Of each expert `gate_up` has gates over what they gate, or
    where they are not `gated` a matrix without gates, and `down` what gives its sum. float32 [experts] or None:
    `router_bias` is added to logits, `choice_bias` to the scores that experts are chosen by. `router_norm`, float32
    [D]: weights of an RMS norm of what the router reads, which is then not what experts read; `eps` is added to its
    mean. `scales`, float32 [experts]: what each of them gives is multiplied by it. `weighs_input`: weights multiply
    what experts read, not what they give.
    """

    routing: Routing
    activation: str
    router: Placed
    gate_up: Experts
    down: Experts
    router_bias: torch.Tensor | None = None
    choice_bias: torch.Tensor | None = None
    shared: SharedExpert | None = None
    router_norm: torch.Tensor | None = None
    eps: float = 0.0
    scales: torch.Tensor | None = None
    weighs_input: bool = False
    gated: bool = True


class Operations(Protocol):
    """The operations of the facade that `experts` is written in."""

    def matmul(self, x: torch.Tensor, weights: Sequence[Any], add_to: torch.Tensor | None = None) -> torch.Tensor: ...
    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any: ...
    def matmul_experts(self, x: torch.Tensor, weights: Experts, ids: torch.Tensor) -> torch.Tensor: ...
    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def mix(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor: ...
    def glu(self, x: torch.Tensor, act: str) -> torch.Tensor: ...
    def activate(self, x: torch.Tensor, act: str) -> torch.Tensor: ...
    def activated(self, x: torch.Tensor, weights: Sequence[Any], act: str) -> torch.Tensor: ...
    def gated(self, x: torch.Tensor, weights: Sequence[Any], act: str) -> torch.Tensor: ...


def experts(ops: Operations, x: torch.Tensor, layer: ExpertLayer, residual: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum of what the experts of each row give: x [T, D], normed -> float32 [T, D].

    The sum is in the order in which the experts were chosen, the best one first, and then the shared one. `residual`
    [T, D]: the rows without their norm, for a router with a norm of its own.
    """
    logits = ops.matmul(asked(ops, x, layer, residual), layer.router)
    if layer.router_bias is not None:
        logits += layer.router_bias
    ids, weights = ops.route(logits, layer.routing, layer.choice_bias)
    if layer.scales is not None:
        weights = weights * layer.scales[ids]
    activated = _activated(ops, x, layer, ids, weights)
    if layer.weighs_input:
        weights = torch.ones_like(weights)
    out = ops.mix(ops.matmul_experts(activated, layer.down, ids), weights)
    return out if layer.shared is None else out.add_(_shared(ops, x, layer.shared, layer))


def _activated(
    ops: Operations, x: torch.Tensor, layer: ExpertLayer, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """What goes into the last product: [T * used, F]."""
    products = ops.matmul_experts(x, layer.gate_up, ids)
    if layer.weighs_input:  # the products are linear
        products *= weights.view(-1, 1)
    return (ops.glu if layer.gated else ops.activate)(products, layer.activation)


class _Norms(Protocol):
    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> Any: ...


def asked(ops: _Norms, x: Any, layer: ExpertLayer, residual: torch.Tensor | None) -> Any:
    """What the router reads: what the experts read, x, or `residual` with a norm of its own."""
    if layer.router_norm is None:
        return x
    if residual is None:
        raise ValueError("a router with a norm of its own reads rows that have none")
    return ops.normed(residual, layer.router_norm, layer.eps)


def _shared(ops: Operations, x: torch.Tensor, shared: SharedExpert, layer: ExpertLayer) -> torch.Tensor:
    activated = (ops.gated if layer.gated else ops.activated)(x, shared.gate_up, layer.activation)
    out = ops.matmul(activated, shared.down)
    return out if shared.gate is None else out.mul_(sigmoid(ops.matmul(x, shared.gate)))
