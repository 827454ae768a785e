"""A token's mixture of experts in the graph: router, choice, products with the chosen experts, sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton

from kvcli.kernels import ExpertLayer
from kvcli.kernels.gpu.experts import route
from kvcli.kernels.gpu.expertvec import add_experts, matvec_experts, mix_experts
from kvcli.kernels.gpu.formats import PLAIN, DeviceMatrix
from kvcli.kernels.gpu.matvec import GATED, STORE
from kvcli.kernels.gpu.products import Activations, Norm, Tiles, matvec
from kvcli.kernels.gpu.settle import activate


class TokenExperts:
    """Buffers that all layers with experts share, and what is launched for one of them."""

    def __init__(self, layer: ExpertLayer, keep: bool) -> None:
        """For layers that are like `layer`; `keep`: see `Activations`."""
        routing, down, device = layer.routing, layer.down, layer.down.matrix.codes.device

        def floats(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, device=device)

        self.logits, self.weights = floats(routing.experts), floats(routing.used)
        self.ids = torch.zeros(routing.used, dtype=torch.int32, device=device)
        self.gated = Activations.empty(routing.used * down.matrix.cols, keep, device)
        self.each = floats(routing.used, down.rows)
        width = layer.shared.down[0].cols if layer.shared else 0
        self.shared_gated = Activations.empty(width, keep, device) if width else None
        self.up = floats(0 if layer.gated else routing.used * down.matrix.cols)  # of products without gates
        self.shared_up = floats(0 if layer.gated else width)
        self.shared, self.gate = floats(down.rows), floats(1)

    def products(self, layer: ExpertLayer, x: Activations, norm: Norm | None, pdl: int) -> None:
        """What each chosen expert of the vector gives, and the shared one."""
        router = layer.router[0]
        tiles = Tiles(2, triton.next_power_of_2(router.cols), 2, 4) if router.format.kind == PLAIN else None
        matvec(router, x, STORE, norm=norm, out=self.logits, pdl=pdl, planes=2, chosen=tiles)
        route(self.logits, layer.routing, layer.router_bias, layer.choice_bias, self.ids, self.weights, pdl)
        act = layer.activation
        if layer.gated:
            matvec_experts(layer.gate_up, self.ids, x, norm=norm, into=self.gated, act=act, pdl=pdl)
        else:
            matvec_experts(layer.gate_up, self.ids, x, norm=norm, out=self.up, pdl=pdl)
            activate(self.up, None, act, 0, self.gated, pdl)
        matvec_experts(layer.down, self.ids, self.gated, out=self.each, pdl=pdl)
        if layer.shared is None or self.shared_gated is None:
            return
        if layer.gated:
            matvec(layer.shared.gate_up[0], x, GATED, norm=norm, into=self.shared_gated, act=act, pdl=pdl)
        else:
            matvec(layer.shared.gate_up[0], x, STORE, norm=norm, out=self.shared_up, pdl=pdl)
            activate(self.shared_up, None, act, 0, self.shared_gated, pdl)
        matvec(layer.shared.down[0], self.shared_gated, STORE, out=self.shared, pdl=pdl, planes=2)
        if layer.shared.gate is not None:
            matvec(layer.shared.gate[0], x, STORE, norm=norm, out=self.gate, pdl=pdl, planes=2)

    def add(
        self, layer: ExpertLayer, residual: torch.Tensor, next_norm: torch.Tensor, into: Activations,
        squares: torch.Tensor, pdl: int,
    ) -> None:  # fmt: skip
        """Add their sum to the residual; see `add_experts`."""
        add_experts(self.each, self.weights, residual, next_norm, into, squares, *self._beside(layer), pdl)

    def mix(self, layer: ExpertLayer, out: torch.Tensor, pdl: int) -> None:
        """Their sum into `out`."""
        mix_experts(self.each, self.weights, out, *self._beside(layer), pdl)

    def _beside(self, layer: ExpertLayer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if layer.shared is None:
            return None, None
        return self.shared, None if layer.shared.gate is None else self.gate


def expert_matrices(layer: ExpertLayer) -> Iterator[DeviceMatrix]:
    """All matrices of a mixture of experts."""
    yield from (*layer.router, layer.gate_up.matrix, layer.down.matrix)
    if layer.shared is not None:
        yield from (*layer.shared.gate_up, *layer.shared.down, *(layer.shared.gate or ()))
