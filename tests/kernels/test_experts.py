"""Experts: the compiled kernels against the plain-torch reference, and that against loops over rows."""

from __future__ import annotations

import pytest
import torch
from expertcases import ROUTINGS, each_by_itself, layer, random, special, stack
from kernelcases import backend, same_bits

from kvcli.kernels.cpu.library import ISAS
from kvcli.kernels.reference.experts import ExpertMatrices, matmul_experts, route
from kvcli.routing import CHOSEN, SIGMOID, SOFTMAX, Routing


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda r: f"{r.gating}-{r.experts}-{r.groups}")
@pytest.mark.parametrize("biased", (False, True))
def test_routes(routing: Routing, biased: bool):
    logits, bias = random(9, routing.experts), random(routing.experts, seed=2) if biased else None
    ids, weights = route(logits, routing, bias)
    scores = {SOFTMAX: logits.double().softmax(1), SIGMOID: logits.double().sigmoid(), CHOSEN: logits.double()}
    for row, score in enumerate(scores[routing.gating]):
        choice = score if bias is None else score + bias
        size = routing.experts // routing.groups
        best = sorted(range(routing.groups), key=lambda g: -choice[g * size : (g + 1) * size].sort()[0][-2:].sum())
        allowed = [e for e in range(routing.experts) if e // size in best[: routing.groups_used]]
        chosen = sorted(allowed, key=lambda e: -choice[e])[: routing.used]
        assert ids[row].tolist() == chosen
        expected = score[chosen].softmax(0) if routing.gating == CHOSEN else score[chosen]
        if routing.normed:
            expected = expected / expected.sum()
        assert torch.allclose(weights[row].double(), expected * routing.scale, rtol=1e-5)
    for isa in ISAS:
        found = backend(isa).route(logits, routing, bias)
        assert torch.equal(found[0], ids) and torch.allclose(found[1], weights, rtol=1e-5)
        alone = backend(isa).route(logits[3:4].clone(), routing, bias)
        assert same_bits(alone[1], found[1][3:4])


@pytest.mark.parametrize("name", ("reference", ""))
def test_the_first_of_equal_experts_is_chosen(name: str):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0], [0.0] * 6])
    assert backend(name).route(logits, Routing(6, 4))[0].tolist() == [[1, 3, 5, 0], [0, 1, 2, 3]]
    grouped = Routing(6, 2, SIGMOID, groups=3, groups_used=1)
    assert backend(name).route(logits, grouped)[0].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("type_", "cols"), [("F32", 35), ("F16", 70), ("Q8_0", 96), ("Q4_K", 256), ("MXFP4", 64)])
def test_products_with_experts(type_: str, cols: int, isa: str):
    """Of one row and of many, with one expert used once, one a few times, one often, and one never."""
    parts = stack(type_, 5, 21, cols), stack(type_, 5, 10, cols, seed=1)
    weights, biased = ExpertMatrices(parts), ExpertMatrices(parts, random(5, 31))
    ops = backend(isa)
    for t in (1, 2, 40):
        ids = torch.cat([torch.full((t, 1), 3), (torch.arange(t) % 5 % 4)[:, None]], 1)
        ids[-1, 1] = 0
        for x in (random(t, cols + 3)[:, :cols], random(2 * t, cols)):
            expected, found = matmul_experts(backend("reference"), x, weights, ids), ops.matmul_experts(x, weights, ids)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
            for p, expert in enumerate(ids.flatten().tolist()):  # each pair as if it were alone
                row = x[p // (2 * t // len(x))][None]
                assert same_bits(found[p : p + 1], ops.matmul(row, [w.of(expert) for w in parts]))
            assert same_bits(ops.matmul_experts(x, biased, ids), found + biased.bias[ids.flatten()])


@pytest.mark.parametrize("shared", (False, True))
@pytest.mark.parametrize("biased", (False, True))
def test_a_mixture_is_that_of_the_reference_and_rows_do_not_depend_on_others(shared: bool, biased: bool):
    x, made = random(33, 64) * 0.1, layer(shared, biased)
    expected, found = (backend(name).experts(x, made) for name in ("reference", ""))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    for name, whole in (("reference", expected), ("", found)):
        parts = [backend(name).experts(x[lo:hi], made) for lo, hi in ((0, 1), (1, 9), (9, 33))]
        assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ("reference", ""))
@pytest.mark.parametrize("which", (0, 1))
def test_routers_with_a_norm_and_weights_of_what_experts_read(name: str, which: int):
    x, residual, made = random(9, 64) * 0.3, random(9, 64, seed=3), special()[which]
    expected = each_by_itself(x, made, residual)
    found = backend(name).experts(x, made, residual)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ("reference", ""))
def test_only_chosen_experts_are_read(name: str):
    """Those that no row chose may be anything: their scales are NaN here."""
    made, x = layer(False, False), random(2, 64) * 0.1
    expected = backend(name).experts(x, made)
    ids, _ = backend("reference").route(backend("reference").matmul(x, made.router), made.routing)
    unread = sorted(set(range(6)) - set(ids.flatten().tolist()))
    assert unread
    for tensor in (*made.gate_up.parts, *made.down.parts):
        tensor.blocks[unread] = 0xFF
    assert same_bits(backend(name).experts(x, made), expected)
