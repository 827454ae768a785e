"""Mamba-2 of random numbers."""

from __future__ import annotations

import torch
from deltacases import random

from kvcli.kernels import MambaLayer


def mamba_layer(heads: int, dim: int, groups: int, state: int, kernel: int, biased: bool) -> MambaLayer:
    channels = heads * dim + 2 * groups * state
    return MambaLayer(
        heads, dim, groups, state, random(channels, kernel, seed=4), random(channels, seed=3) if biased else None,
        -random(heads, seed=5).exp(), random(heads, seed=6), random(heads, seed=7),
        1 + 0.2 * random(heads * dim, seed=2), 1e-6,
    )  # fmt: skip


def projections(layer: MambaLayer, rows: int) -> torch.Tensor:
    return random(rows, layer.inner + layer.channels + layer.heads, seed=8)


def state_size(layer: MambaLayer) -> int:
    return (layer.conv.shape[1] - 1) * layer.channels + layer.inner * layer.state


SHAPES = [(4, 12, 2, 8, 4, True), (3, 70, 1, 33, 2, False), (6, 16, 3, 20, 3, True)]
