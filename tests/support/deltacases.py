"""Gated delta networks of random numbers."""

from __future__ import annotations

import torch

from kvcli.kernels import DeltaLayer


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def delta_layer(keys: int, values: int, dim_k: int, dim_v: int, kernel: int, tiled: bool) -> DeltaLayer:
    channels = 2 * keys * dim_k + values * dim_v
    decay = -random(values, seed=5).exp()
    return DeltaLayer(
        keys, values, dim_k, dim_v, random(channels, kernel, seed=4), decay, random(values, seed=6),
        1 + 0.2 * random(dim_v, seed=7), 1e-6, tiled,
    )  # fmt: skip


def projections(layer: DeltaLayer, rows: int) -> torch.Tensor:
    return random(rows, layer.channels + layer.value_heads * (layer.dim_v + 2), seed=8)


SHAPES = [(2, 4, 8, 12, 4, True), (2, 4, 8, 12, 2, False), (1, 1, 20, 5, 3, True), (3, 3, 33, 17, 4, False)]
