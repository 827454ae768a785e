"""Random mixtures of experts, as files have their matrices."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernelcases import packed

from kvcli.kernels import ExpertLayer, ExpertMatrices, ExpertTensor, QuantTensor, SharedExpert
from kvcli.kernels.reference.ggml import decode
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


def special(type_: str = "Q8_0", experts: int = 6, d: int = 64, f: int = 32) -> tuple[ExpertLayer, ExpertLayer]:
    """One whose router has a norm of its own, and that multiplies what each expert gives, as Gemma 4's; and one that
    weighs what experts read, as Llama 4's."""
    scales = {"router_norm": random(d, seed=8), "eps": 1e-6, "scales": random(experts, seed=9)}
    gelu = replace(layer(False, False, type_, experts, d, f), activation="gelu", **scales)
    return gelu, replace(layer(True, False, type_, experts, d, f), weighs_input=True)


def each_by_itself(x: torch.Tensor, made: ExpertLayer, residual: torch.Tensor) -> torch.Tensor:
    """`experts` of such layers, row by row in float64."""
    act = {"gelu": lambda y: torch.nn.functional.gelu(y, approximate="tanh"), "silu": torch.nn.functional.silu}

    def matrix(w: ExpertTensor | QuantTensor, expert: int = -1) -> torch.Tensor:
        return decode(w.type, w.blocks if expert < 0 else w.blocks[expert]).double()

    def gated(row: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        return down @ (act[made.activation](gate @ row) * (up @ row))

    out = []
    for row, before in zip(x.double(), residual.double(), strict=True):
        if made.router_norm is not None:
            before = before / (before.square().mean() + made.eps).sqrt() * made.router_norm.double()
        scores = (matrix(made.router[0]) @ (row if made.router_norm is None else before)).sigmoid()
        weights, ids = scores.topk(made.routing.used)
        weights = weights / weights.sum() * made.routing.scale
        total = torch.zeros_like(row)
        for weight, e in zip(weights, ids.tolist(), strict=True):
            parts = [matrix(w, e) for w in (*made.gate_up.parts, *made.down.parts)]
            inside, outside = (weight, 1.0) if made.weighs_input else (1.0, weight)
            given = gated(row * inside, *parts) * outside
            total += given if made.scales is None else given * made.scales[e].double()
        if (beside := made.shared) is not None:
            given = gated(row, *(matrix(w) for w in (*beside.gate_up, *beside.down)))
            total += given if beside.gate is None else given * (matrix(beside.gate[0]) @ row).sigmoid()
        out.append(total)
    return torch.stack(out).float()
