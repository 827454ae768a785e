"""One token between two products that no norm is folded into, on a GPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from gpucases import DEVICE, expect_activations

from kvcli.kernels.gpu.formats import GROUP
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.settle import (
    LAYER_NORM,
    NO_NORM,
    RMS_NORM,
    UNCHANGED,
    NextNorm,
    activate,
    norm_heads_together,
    settle,
)
from kvcli.kernels.reference import pointwise


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_device(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.to(DEVICE) for x in tensors]


@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("kind", [NO_NORM, RMS_NORM, LAYER_NORM, UNCHANGED])
@pytest.mark.parametrize("full", [False, True])
def test_settle(full, kind, width):
    """A bias, a norm of the sum, a scale and a bias of the next norm, or nothing of these."""
    y, h, bias, post, weight, next_bias = (2 * random(width, seed=i) + (1 if i == 4 else 0) for i in range(6))
    bias, post, next_bias = (x if full else None for x in (bias, post, next_bias))
    residual, into = h.clone().to(DEVICE), Activations.empty(width, True, torch.device(DEVICE))
    before = [x.clone() for x in into.arrays]
    dev_y, dev_bias, dev_post, dev_weight, dev_next = on_device(y, bias, post, weight, next_bias)
    normed = kind in (RMS_NORM, LAYER_NORM)
    following = NextNorm(kind, dev_weight if normed else None, dev_next if kind == LAYER_NORM else None)
    settle(dev_y, residual, following, into, 1e-5, bias=dev_bias, post=dev_post, scale=0.3 if full else 1.0)
    added = y if bias is None else y + bias
    if post is not None:
        added = pointwise.rms_norm(added, post, 1e-5) * 0.3
    expected = h + added
    torch.testing.assert_close(residual.cpu(), expected)
    if kind == UNCHANGED:
        assert all(torch.equal(a, b) for a, b in zip(before, into.arrays, strict=True))
        return
    if kind == RMS_NORM:
        expected = pointwise.rms_norm(expected, weight, 1e-5)
    if kind == LAYER_NORM:
        expected = pointwise.layer_norm(expected, weight, next_bias, 1e-5)
    torch.testing.assert_close(into.values.cpu(), expected, rtol=1e-5, atol=1e-5)
    expect_activations(into.values, into)


@pytest.mark.parametrize("act", ["silu", "gelu", "relu2"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_activate(biased, gated, act):
    n = 3 * GROUP
    y, bias = 3 * random(n * (1 + gated)), random(n * (1 + gated), seed=1)
    expected = y + bias if biased else y
    expected = pointwise.glu(expected[None], act)[0] if gated else pointwise.activate(expected, act)
    if gated:
        y = y.unflatten(0, (2, -1, GROUP)).transpose(0, 1).flatten().contiguous()
    into = Activations.empty(n, True, torch.device(DEVICE))
    activate(y.to(DEVICE), bias.to(DEVICE) if biased else None, act, GROUP if gated else 0, into)
    torch.testing.assert_close(into.values.cpu(), expected, rtol=1e-5, atol=1e-5)
    expect_activations(into.values, into)


def test_norms_over_all_heads():
    qkv, q_norm, k_norm = random(3, 48 + 24 + 16), random(48, seed=1), random(24, seed=2)
    found = qkv.clone().to(DEVICE)
    norm_heads_together(found, q_norm.to(DEVICE), k_norm.to(DEVICE), 1e-6)
    parts = qkv.split((48, 24, 16), 1)
    normed = pointwise.rms_norm(parts[0], q_norm, 1e-6), pointwise.rms_norm(parts[1], k_norm, 1e-6), parts[2]
    torch.testing.assert_close(found.cpu(), torch.cat(normed, 1))
