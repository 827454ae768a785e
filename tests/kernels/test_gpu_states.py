"""Operations of layers that keep a state, on a GPU, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import mambacases
import pytest
import torch
from deltacases import SHAPES, delta_layer, projections
from gpucases import DEVICE

from kvcli.kernels import Carried
from kvcli.kernels.gpu import mamba, states
from kvcli.kernels.gpu.legs import BoundLegs, Legs, lists
from kvcli.kernels.reference import deltanet as reference
from kvcli.kernels.reference import mamba as mamba_reference
from kvcli.kernels.reference.shortconv import short_conv


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("d", "kernel", "biased"), [(48, 3, False), (600, 4, True)])
def test_short_convolutions(d: int, kernel: int, biased: bool):
    """In place, at the start of a text, and with fewer rows than the state has."""
    x, weight, bias = random(12, 3 * d), random(d, kernel, seed=1), random(d, seed=2) if biased else None
    past = random((kernel - 1) * d, seed=3)

    def carried(state: torch.Tensor, others: torch.Tensor) -> list[Carried]:
        one, two = others
        return [Carried(0, 5, None, one), Carried(5, 7, state, two), Carried(7, 12, two, state)]

    host = past.clone(), torch.full((2, past.numel()), float("nan"))
    there = past.clone().to(DEVICE), torch.full((2, past.numel()), float("nan")).to(DEVICE)
    expected = short_conv(x, weight, bias, carried(*host))
    on_device = (each if each is None else each.to(DEVICE) for each in (x, weight, bias))
    found = states.short_conv(*on_device, carried(*there))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(there, host, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-6)


def both_nets(
    shape: tuple[int, int, int, int, int, bool], rows: int, cuts: tuple[int, int], x: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and states of the reference, and those of the kernels: of a text that begins, and of one that goes on, in
    place and with a checkpoint."""
    layer = delta_layer(*shape)
    size = (shape[4] - 1) * layer.channels + layer.value_heads * layer.dim_k * layer.dim_v
    x, past = projections(layer, rows) if x is None else x, random(size, seed=9)
    on_device = replace(
        layer, **{name: getattr(layer, name).to(DEVICE) for name in ("conv", "decay", "time_bias", "norm")}
    )
    found = []
    for each, where, compute in ((layer, "cpu", reference.delta_net), (on_device, DEVICE, states.delta_net)):
        first, kept = (torch.full((size,), float("nan"), device=where) for _ in range(2))
        state, (one, two) = past.clone().to(where), cuts
        carried = [Carried(0, one, None, first), Carried(one, two, state, kept), Carried(two, rows, kept, state)]
        out = compute(x.to(where), each, carried)
        found.append([each.cpu() for each in (out, first, kept, state)])
    return found[0], found[1]


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_delta_networks(shape: tuple[int, int, int, int, int, bool]):
    """In place, at the start of a text, and with fewer rows than the convolution reads."""
    for a, b in zip(*both_nets(shape, 9, (4, 5)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("shape", "rows", "cuts"), [(SHAPES[0], 150, (70, 72)), (SHAPES[3], 70, (3, 67))])
def test_delta_networks_in_chunks(shape: tuple[int, int, int, int, int, bool], rows: int, cuts: tuple[int, int]):
    """Whole chunks and parts of some, of a text that begins and of one that goes on."""
    for a, b in zip(*both_nets(shape, rows, cuts), strict=True):
        assert (b - a).abs().max() < 1e-5 * a.abs().max()


def test_chunks_of_one_token_over_and_over():
    """Keys that are all the same, hardly decayed and wholly written: sums of powers of L would lose everything."""
    layer = delta_layer(*SHAPES[0])
    x = projections(layer, 1).repeat(64, 1)
    heads = layer.value_heads
    x[:, -2 * heads : -heads], x[:, -heads:] = 20.0, -20.0
    for a, b in zip(*both_nets(SHAPES[0], 64, (20, 21), x), strict=True):
        assert (b - a).abs().max() < 1e-5 * a.abs().max()


@pytest.mark.parametrize(
    ("shape", "rows", "cuts"),
    [
        (mambacases.SHAPES[0], 9, (4, 5)),
        (mambacases.SHAPES[1], 9, (4, 5)),
        (mambacases.SHAPES[1], 70, (3, 67)),
        (mambacases.SHAPES[2], 150, (70, 72)),
    ],
)
def test_mamba(shape: tuple[int, int, int, int, int, bool], rows: int, cuts: tuple[int, int]):
    """Row by row and in chunks, of a text that begins, and of one that goes on, in place and with a checkpoint."""
    layer = mambacases.mamba_layer(*shape)
    x, size, found = mambacases.projections(layer, rows), mambacases.state_size(layer), []
    tensors = {k: v.to(DEVICE) for k, v in vars(layer).items() if isinstance(v, torch.Tensor)}
    there = replace(layer, **tensors)
    for each, where, compute in ((layer, "cpu", mamba_reference.mamba), (there, DEVICE, mamba.mamba)):
        first, kept = (torch.full((size,), float("nan"), device=where) for _ in range(2))
        state, (one, two) = random(size, seed=9).to(where), cuts
        carried = [Carried(0, one, None, first), Carried(one, two, state, kept), Carried(two, rows, kept, state)]
        found.append([y.cpu() for y in (compute(x.to(where), each, carried), first, kept, state)])
    for a, b in zip(*found, strict=True):
        assert (b - a).abs().max() < 2e-5 * a.abs().max()


@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_rows_of_sequences_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch):
    """One begins, one goes on in place, one leaves a checkpoint; a row is nobody's. Heads of Mamba-2 without a norm."""
    monkeypatch.setattr(states, "IN_CHUNKS", 2)
    monkeypatch.setattr(mamba, "IN_CHUNKS", 2)
    if kind == "delta":
        layer, names = delta_layer(*SHAPES[0]), ("conv", "decay", "time_bias", "norm")
        size = (SHAPES[0][4] - 1) * layer.channels + layer.value_heads * layer.dim_k * layer.dim_v
        x, compute, plain = projections(layer, 4), states.delta_net, reference.delta_net
    else:
        layer, names = replace(mambacases.mamba_layer(*mambacases.SHAPES[0]), norm=None), ("conv", "decay")
        names = (*names, "conv_bias", "time_bias", "skip")
        size, x = mambacases.state_size(layer), mambacases.projections(layer, 4)
        compute, plain = mamba.mamba, mamba_reference.mamba
    past, there = random(3, size, seed=9), torch.full((5, size), float("nan"), device=DEVICE)
    there[1:4] = past.to(DEVICE)
    rows = {0: (None, 0), 1: (1, 1), 3: (2, 4)}  # states before and behind
    legs = Legs.empty(4, torch.device(DEVICE), apart=True)
    for row, (source, target) in rows.items():
        addresses = [0 if i is None else there[i].data_ptr() for i in (source, target)]
        legs.table[row] = torch.tensor([row, row + 1, *addresses, row, addresses[0], 0])
    on_device = replace(layer, **{name: getattr(layer, name).to(DEVICE) for name in names})
    found = compute(x.to(DEVICE), on_device, [BoundLegs(legs)]).cpu()
    for row, (source, target) in rows.items():
        left = torch.empty(size)
        expected = plain(x[row : row + 1], layer, [Carried(0, 1, None if source is None else past[source - 1], left)])
        torch.testing.assert_close(found[row : row + 1], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(there[target].cpu(), left, rtol=1e-4, atol=1e-5)
    assert torch.equal(there[2].cpu(), past[1]) and torch.equal(there[3].cpu(), past[2])


def test_lists_of_legs():
    """A leg that goes on from the one before it goes back to where that one began, with as many chunks as it needs."""
    table, chunks = lists([(0, 70, 0, 8), (70, 72, 24, 16), (72, 150, 16, 24)])
    assert table.tolist() == [[0, 70, 0, 8, 0, 0, 0], [70, 72, 24, 16, 70, 24, 2], [72, 150, 16, 24, 70, 24, 3]]
    assert chunks.tolist() == [[0, 64], [64, 70], [70, 72], [72, 136], [136, 150]]
