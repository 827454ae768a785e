"""Operations of layers that keep a state, on a GPU, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from deltacases import SHAPES, delta_layer, projections
from gpucases import DEVICE

from kvcli.kernels import Carried
from kvcli.kernels.gpu import states
from kvcli.kernels.reference import deltanet as reference
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


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_delta_networks(shape: tuple[int, int, int, int, int, bool]):
    """In place, at the start of a text, and with fewer rows than the convolution reads."""
    layer = delta_layer(*shape)
    size = (shape[4] - 1) * layer.channels + layer.value_heads * layer.dim_k * layer.dim_v
    x, past = projections(layer, 9), random(size, seed=9)
    on_device = replace(
        layer, **{name: getattr(layer, name).to(DEVICE) for name in ("conv", "decay", "time_bias", "norm")}
    )
    found = []
    for each, where, compute in ((layer, "cpu", reference.delta_net), (on_device, DEVICE, states.delta_net)):
        first, kept = (torch.full((size,), float("nan"), device=where) for _ in range(2))
        state = past.clone().to(where)
        carried = [Carried(0, 4, None, first), Carried(4, 5, state, kept), Carried(5, 9, kept, state)]
        found.append((compute(x.to(where), each, carried), first, kept, state))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-4, atol=1e-5)
