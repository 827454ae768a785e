"""Random mixtures of experts, as files have their matrices."""

from __future__ import annotations

import torch
from kernelcases import packed

from kvcli.kernels import ExpertLayer, ExpertMatrices, ExpertTensor, SharedExpert
from kvcli.routing import CHOSEN, SIGMOID, SOFTMAX, Routing

ROUTINGS = (
    Routing(8, 2, SOFTMAX, normed=True), Routing(60, 4, SOFTMAX), Routing(37, 5, SIGMOID, True, 2.5),
    Routing(32, 4, CHOSEN), Routing(24, 6, SIGMOID, True, 1.5, groups=6, groups_used=3), Routing(3, 1, SIGMOID),
)  # fmt: skip


def stack(type_: str, experts: int, rows: int, cols: int, seed: int = 0) -> ExpertTensor:
    matrix = packed(type_, experts * rows, cols, seed)
    return ExpertTensor(type_, matrix.blocks.unflatten(0, (experts, rows)), cols)


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(shared: bool, biased: bool, type_: str = "Q8_0", experts: int = 6, d: int = 64, f: int = 32) -> ExpertLayer:
    def bias(*shape: int) -> torch.Tensor | None:
        return random(*shape, seed=5) if biased else None

    def gate_up(seed: int) -> tuple[ExpertTensor, ...]:
        return tuple(stack(type_, experts, f, d, seed + i) for i in range(2))

    beside = SharedExpert(
        (packed(type_, f, d, 7), packed(type_, f, d, 8)), (packed(type_, d, f, 9),), (packed("F32", 1, d, 10),)
    )
    return ExpertLayer(
        Routing(experts, 3, SIGMOID, True, 1.7), "silu", (packed("F32", experts, d, 3),),
        ExpertMatrices(gate_up(20), bias(experts, 2 * f)),
        ExpertMatrices((stack(type_, experts, d, f, 30),), bias(experts, d)), bias(experts), bias(experts),
        beside if shared else None,
    )  # fmt: skip
