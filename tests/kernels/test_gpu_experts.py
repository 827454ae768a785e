"""Experts on a GPU: routing, products of many rows and of one token, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from expertcases import ROUTINGS, each_by_itself, layer, random, special, stack
from gpucases import DEVICE, OPS, error, expect_activations, planes, watched  # noqa: F401
from kernelcases import one_thread
from test_gpu_products import few_programs

from kvcli.errors import ModelError
from kvcli.kernels import ExpertLayer, SharedExpert
from kvcli.kernels.gpu import experts
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.expertvec import add_experts, matvec_experts, mix_experts
from kvcli.kernels.gpu.matvec import GATED, STORE
from kvcli.kernels.gpu.products import Activations, Norm, advance
from kvcli.kernels.gpu.wide import HalfRows
from kvcli.kernels.reference.experts import ExpertMatrices, route
from kvcli.kernels.reference.pointwise import glu
from kvcli.routing import CHOSEN, Routing

GPU = GpuBackend(torch.device(DEVICE))


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def on_device(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(DEVICE)


def placed(made: ExpertLayer) -> ExpertLayer:
    shared = made.shared
    if shared is not None:
        assert shared.gate is not None
        shared = SharedExpert(GPU.place(shared.gate_up, paired=True), GPU.place(shared.down), GPU.place(shared.gate))
    return replace(
        made, router=GPU.place(made.router), gate_up=GPU.place_experts(made.gate_up, paired=True),
        down=GPU.place_experts(made.down), router_bias=on_device(made.router_bias),
        choice_bias=on_device(made.choice_bias), shared=shared, router_norm=on_device(made.router_norm),
        scales=on_device(made.scales),
    )  # fmt: skip


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.gating}-{r.experts}-{r.groups}")
@pytest.mark.parametrize("biased", (False, True))
def test_routes(routing: Routing, biased: bool):
    logits, add, choice = random(5, routing.experts), random(routing.experts, seed=2), random(routing.experts, seed=3)
    logits[3] = 0.5  # all equal
    if not biased:
        add, choice = torch.zeros_like(add), torch.zeros_like(choice)
    expected = route(logits + add, routing, choice)
    ids = torch.full((6, routing.used), -1, dtype=torch.int32, device=DEVICE)
    weights = torch.full((6, routing.used), torch.nan, device=DEVICE)
    given = [on_device(x) if biased else None for x in (add, choice)]
    experts.route(logits.to(DEVICE), routing, *given, ids[:5], weights[:5])
    assert torch.equal(ids[:5].cpu().long(), expected[0]) and (ids[5] == -1).all() and weights[5].isnan().all()
    assert torch.allclose(weights[:5].cpu(), expected[1], rtol=1e-5)


@pytest.mark.parametrize("t", (1, 3, 50))
def test_rows_are_grouped_by_expert(t: int):
    ids = torch.randint(0, 7, (t, 2), generator=torch.manual_seed(t), dtype=torch.int32)
    found = experts.Grouping.of(ids.to(DEVICE), 9)
    order, starts, ends = (x.cpu() for x in (found.order, found.starts, found.ends))
    assert (ids.flatten()[order.long()].diff() >= 0).all()
    counts = ids.flatten().long().bincount(minlength=9)
    assert torch.equal(starts.diff(), counts.int())
    assert torch.equal(ends, (-(-counts // found.tile)).cumsum(0).int()) and int(ends[-1]) <= found.most


@pytest.mark.parametrize(("type_", "cols", "rows"), [
    ("Q4_K", 256, 70), ("Q8_0", 96, 64), ("Q6_K", 256, 64), ("MXFP4", 160, 130), ("F16", 80, 64), ("F32", 35, 9),
])  # fmt: skip
@pytest.mark.parametrize("t", (1, 40))
def test_products_of_rows_with_their_experts(type_: str, cols: int, rows: int, t: int):
    """One expert has many rows, one has none."""
    weights = ExpertMatrices((stack(type_, 5, rows, cols),), random(5, rows, seed=4))
    ids = torch.stack([torch.full((t,), 3), torch.arange(t) % 5 % 4], 1)
    ids[0, 1] = 2
    there, grouping = GPU.place_experts(weights), experts.Grouping.of(ids.int().to(DEVICE), 5)
    for n in (t, 2 * t):
        x, scales = random(n, cols).half(), random(n, seed=2).abs()
        found = experts.grouped_product(HalfRows(x.to(DEVICE), scales.to(DEVICE)), there, grouping).cpu()
        for pair, expert in enumerate(ids.flatten().tolist()):
            w, row = weights.parts[0].of(expert).decode().half().double(), pair // (2 * t // n)
            expected = scales[row] * (w @ x[row].double()) + weights.bias[expert]
            assert error(found[pair], expected) < (1e-3 if cols == 256 else 1e-5)  # scales of 256 are rounded


def test_the_largest_of_many_experts_and_tiles():
    ids = torch.zeros(300, 1, dtype=torch.int32)
    ids[::3] = 1
    weights = ExpertMatrices((stack("Q8_0", 2, 32, 32),))
    grouping = experts.Grouping.of(ids.to(DEVICE), 2)
    assert grouping.tile == 128 and int(grouping.ends[-1]) == 3
    x = random(300, 32).half()
    found = experts.grouped_product(HalfRows(x.to(DEVICE)), GPU.place_experts(weights), grouping).cpu()
    each = torch.stack([x.double() @ weights.parts[0].of(e).decode().half().double().T for e in range(2)])
    assert error(found, each[ids[:, 0].long(), torch.arange(300)]) < 1e-5


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(("shared", "biased"), ((False, False), (True, True)))
@pytest.mark.parametrize("f", (32, 40))
def test_a_mixture_is_that_of_the_reference(shared: bool, biased: bool, f: int):
    type_ = "Q8_0" if f == 32 else "F16"
    made, x = layer(shared, biased, type_, f=f), (random(21, 64) * 0.3).half()
    expected = OPS.experts(x.float(), made)
    assert error(GPU.experts(x.to(DEVICE), placed(made)), expected) < 2e-3


@pytest.mark.parametrize("which", (0, 1))
def test_routers_with_a_norm_and_weights_of_what_experts_read(which: int):
    x, residual, made = (random(9, 64) * 0.3).half(), random(9, 64, seed=3), special()[which]
    expected = each_by_itself(x.float(), made, residual)
    found = GPU.experts(x.to(DEVICE), placed(made), residual.to(DEVICE))
    assert error(found, expected) < 3e-3


def test_gates_that_are_stored_otherwise_are_refused():
    parts = stack("Q8_0", 2, 32, 64), stack("F16", 2, 32, 64)
    with pytest.raises(ModelError, match="stored as"):
        GPU.place_experts(ExpertMatrices(parts), paired=True)


class Vector:
    """A vector [n] and the one of the next product, with its norm."""

    def __init__(self, n: int) -> None:
        self.x, squares = random(n, seed=3), torch.zeros(n // 32, device=DEVICE)
        self.codes = Activations.empty(n, True, torch.device(DEVICE))
        advance(self.x.to(DEVICE), torch.zeros(n, device=DEVICE), torch.ones(n, device=DEVICE), self.codes, squares)
        self.norm = Norm(squares, 1e-5)
        self.normed = self.x.double() * (self.x.double().square().mean() + 1e-5).rsqrt()


@pytest.mark.parametrize(("type_", "cols"), [("Q4_K", 256), ("Q8_0", 96), ("F16", 96)])
@pytest.mark.parametrize("biased", (False, True))
def test_products_of_one_token(type_: str, cols: int, biased: bool):
    """Gates and what they gate with three of five experts, then the sums of each with a vector of its own."""
    bias, act = (random(5, 128, seed=6), "clamped") if biased else (None, "silu")
    gate_up = ExpertMatrices((stack(type_, 5, 64, cols), stack(type_, 5, 64, cols, seed=1)), bias)
    down_type = "F16" if type_ == "F16" else "Q8_0"
    down = ExpertMatrices((stack(down_type, 5, 96, 64, seed=2),), random(5, 96, seed=7) if biased else None)
    ids, vector = torch.tensor([4, 0, 2], dtype=torch.int32), Vector(cols)
    into = Activations.empty(3 * 64, True, torch.device(DEVICE))
    there = GPU.place_experts(gate_up, True)
    matvec_experts(
        there, ids.to(DEVICE), vector.codes, norm=vector.norm, into=into, act=act,
        chosen=few_programs(there.matrix, GATED), planes=1,
    )  # fmt: skip
    coarse = vector.normed if type_ == "F16" else planes(vector.codes)[0] * (vector.normed / vector.x.double())[0]
    expected = []
    for expert in ids.tolist():
        g, u = (w.of(expert).decode().double() @ coarse for w in gate_up.parts)
        if bias is not None:
            g, u = g + bias[expert, :64], u + bias[expert, 64:]
        expected.append(glu(torch.cat((g, u))[None], act)[0])
    assert error(into.values, torch.cat(expected)) < 1e-5
    expect_activations(into.values, into)
    out = torch.full((4, 96), torch.nan, device=DEVICE)
    there = GPU.place_experts(down)
    matvec_experts(there, ids.to(DEVICE), into, out=out[:3], chosen=few_programs(there.matrix, STORE))
    read = into.values.cpu().double() if type_ == "F16" else planes(into)[1]
    for slot, expert in enumerate(ids.tolist()):
        y = down.parts[0].of(expert).decode().double() @ read.view(3, 64)[slot]
        assert error(out[slot], y if down.bias is None else y + down.bias[expert]) < 1e-5
    assert out[3].isnan().all()


@pytest.mark.parametrize("beside", (0, 1, 2))
def test_the_weighted_sum_is_added_and_goes_on(beside: int):
    y, weights = random(4, 64), random(4)
    h, following, shared = (random(64, seed=i) for i in (2, 3, 4))
    gate, residual = torch.tensor([0.3]), h.clone().to(DEVICE)
    into, squares = Activations.empty(64, True, torch.device(DEVICE)), torch.zeros(2, device=DEVICE)
    add_experts(
        y.to(DEVICE), weights.to(DEVICE), residual, following.to(DEVICE), into, squares,
        *(given := (shared.to(DEVICE) if beside else None, gate.to(DEVICE) if beside == 2 else None)),
    )  # fmt: skip
    added = weights.double() @ y.double() + (shared.double() * (gate.sigmoid() if beside == 2 else 1) if beside else 0)
    expected = h.double() + added
    assert error(residual, expected) < 1e-6 and error(squares.sum()[None], expected.square().sum()[None]) < 1e-6
    expect_activations(residual.cpu() * following, into)
    mix_experts(y.to(DEVICE), weights.to(DEVICE), residual, *given)
    assert error(residual, added) < 1e-6


def test_softmax_of_the_chosen_is_that_of_all_divided_by_their_sum():
    logits = random(4, 16)
    chosen, normed = (route(logits, Routing(16, 3, *how)) for how in ((CHOSEN,), ("softmax", True)))
    assert torch.equal(chosen[0], normed[0]) and torch.allclose(chosen[1], normed[1], rtol=1e-5)
