"""Operations of layers that keep a state: in C against plain torch, and cut anywhere."""

from __future__ import annotations

import mambacases
import pytest
import torch
from deltacases import SHAPES, delta_layer, projections
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelcases import backend

from kvcli.kernels import Carried
from kvcli.kernels.reference import deltanet, mamba


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(n: int) -> torch.Tensor:
    return torch.full((n,), float("nan"))


@pytest.mark.parametrize("name", ("reference", ""))
@pytest.mark.parametrize(("d", "kernel", "biased"), [(48, 3, False), (70, 4, True), (1, 2, True), (130, 8, False)])
def test_short_convolutions_are_those_of_torch(name: str, d: int, kernel: int, biased: bool):
    """Of two sequences, the second one in the middle of its text and with a checkpoint."""
    x, weight, bias = random(23, 3 * d), random(d, kernel, seed=1), random(d, seed=2) if biased else None
    past, kept, left = random(kernel - 1, d, seed=3), *(poisoned((kernel - 1) * d) for _ in range(2))
    first = poisoned((kernel - 1) * d)
    carried = [Carried(0, 7, None, first), Carried(7, 9, past.flatten(), kept), Carried(9, 23, kept, left)]
    found = backend(name).short_conv(x, weight, bias, carried)
    b, c, z = x.chunk(3, 1)
    for rows, before in ((slice(0, 7), torch.zeros(kernel - 1, d)), (slice(7, 23), past)):
        inputs = torch.cat([before, (b * z)[rows]]).double()
        conv = torch.nn.functional.conv1d(
            inputs.T[None], weight.double()[:, None], None if bias is None else bias.double(), groups=d
        )
        expected = conv[0].T * c[rows].double()
        assert (found[rows] - expected).abs().max() < 1e-5 * expected.abs().max()
        if kernel > 1:
            state = left if rows.start else first
            assert torch.equal(state.view(kernel - 1, d), inputs[-(kernel - 1) :].float())
    assert torch.equal(kept.view(kernel - 1, d), torch.cat([past, (b * z)[7:9]])[-(kernel - 1) :])


@pytest.mark.parametrize("name", ("reference", ""))
@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 29)))
def test_a_short_convolution_can_be_cut_anywhere(name: str, cuts: set[int]):
    """To the bit, with the state in one place."""
    x, weight, ops = random(30, 3 * 50), random(50, 3, seed=1), backend(name)
    whole, state = ops.short_conv(x, weight, None, [Carried(0, 30, None, at_end := poisoned(100))]), poisoned(100)
    found, start = [], 0
    for cut in [*sorted(cuts), 30]:
        rows = x[start:cut].clone()
        found.append(ops.short_conv(rows, weight, None, [Carried(0, cut - start, state if start else None, state)]))
        start = cut
    assert torch.equal(torch.cat(found), whole) and torch.equal(state, at_end)


@pytest.mark.parametrize("shape", SHAPES)
def test_delta_networks_in_c(shape: tuple[int, int, int, int, int, bool]):
    """Two sequences, one with a checkpoint; memory that is not written to is poisoned."""
    layer = delta_layer(*shape)
    size = (shape[4] - 1) * layer.channels + layer.value_heads * layer.dim_k * layer.dim_v
    x, past = projections(layer, 19), random(size, seed=9)
    found = []
    for name in ("reference", ""):
        first, kept, left = (poisoned(size) for _ in range(3))
        carried = [Carried(0, 7, None, first), Carried(7, 9, past, kept), Carried(9, 19, kept, left)]
        found.append((backend(name).delta_net(x, layer, carried), first, kept, left))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("reference", ""))
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 19)))
def test_a_delta_network_can_be_cut_anywhere(name: str, cuts: set[int]):
    """To the bit, with the state in one place."""
    layer, ops = delta_layer(*SHAPES[0]), backend(name)
    size, x = 3 * layer.channels + 4 * 8 * 12, projections(layer, 20)
    whole, state = ops.delta_net(x, layer, [Carried(0, 20, None, at_end := poisoned(size))]), poisoned(size)
    found, start = [], 0
    for cut in [*sorted(cuts), 20]:
        rows = x[start:cut].clone()
        found.append(ops.delta_net(rows, layer, [Carried(0, cut - start, state if start else None, state)]))
        start = cut
    assert torch.equal(torch.cat(found), whole) and torch.equal(state, at_end)


@pytest.mark.parametrize("rows", (1, 63, 64, 150))
def test_chunks_of_the_delta_rule_are_its_rows(rows: int):
    """Outputs and states, in chunks of 64 and of 16, behind a state that is there."""
    q, k = (deltanet._unit(random(rows, 3, 32, seed=i)) for i in (1, 2))
    v, decays, betas = random(rows, 3, 24, seed=3), -random(rows, 3, seed=4).exp(), random(rows, 3, seed=5).sigmoid()
    state = random(3, 32, 24, seed=6)
    expected, found = deltanet.by_row(q, k, v, decays, betas, left := state.clone()), []
    for size in (64, 16):
        found = deltanet.by_chunks(q, k, v, decays, betas, other := state.clone(), size)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (other - left).abs().max() < 1e-5 * left.abs().max()


@pytest.mark.parametrize("shape", mambacases.SHAPES)
def test_mamba_in_c(shape: tuple[int, int, int, int, int, bool]):
    """Two sequences, one with a checkpoint; memory that is not written to is poisoned."""
    layer = mambacases.mamba_layer(*shape)
    size, x = mambacases.state_size(layer), mambacases.projections(layer, 19)
    past, found = random(size, seed=9), []
    for name in ("reference", ""):
        first, kept, left = (poisoned(size) for _ in range(3))
        carried = [Carried(0, 7, None, first), Carried(7, 9, past, kept), Carried(9, 19, kept, left)]
        found.append((backend(name).mamba(x, layer, carried), first, kept, left))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ("reference", ""))
@settings(max_examples=10, deadline=None)
@given(cuts=st.sets(st.integers(1, 19)))
def test_mamba_can_be_cut_anywhere(name: str, cuts: set[int]):
    """To the bit, with the state in one place."""
    layer, ops = mambacases.mamba_layer(*mambacases.SHAPES[0]), backend(name)
    size, x = mambacases.state_size(layer), mambacases.projections(layer, 20)
    whole, state = ops.mamba(x, layer, [Carried(0, 20, None, at_end := poisoned(size))]), poisoned(size)
    found, start = [], 0
    for cut in [*sorted(cuts), 20]:
        rows = x[start:cut].clone()
        found.append(ops.mamba(rows, layer, [Carried(0, cut - start, state if start else None, state)]))
        start = cut
    assert torch.equal(torch.cat(found), whole) and torch.equal(state, at_end)


@pytest.mark.parametrize("rows", (1, 63, 64, 150))
def test_chunks_of_mamba_are_its_rows(rows: int):
    """Outputs and states, in chunks of 64 and of 16, behind a state that is there."""
    q, k = (random(rows, 3, 32, seed=i) for i in (1, 2))
    v, decays, state = random(rows, 3, 24, seed=3), -random(rows, 3, seed=4).exp(), random(3, 32, 24, seed=6)
    expected = mamba.by_row(q, k, v, decays, left := state.clone())
    for size in (64, 16):
        found = mamba.by_chunks(q, k, v, decays, other := state.clone(), size)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        assert (other - left).abs().max() < 1e-5 * left.abs().max()
