"""The mean of keys that sealed pages lack: taken before RoPE and turned with it, so it fits at every position."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernelcases import ISAS, backend
from sealedcases import Cache, layout

from kvcli.kernels import Angles, Backend
from kvcli.kernels.reference.pointwise import rope_
from kvcli.kernels.reference.rotation import rotate
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.rope import RopeTable

DIM, SIZE, HEADS, BASE = 64, 64, 2, 10000.0
POSITIONS = (1 << 10, 1 << 13, 1 << 16, 10_000_000)


class FarTable(RopeTable):
    """Angles of a sequence of two pages, of which the second one stands at position `far`."""

    def __init__(self, far: int) -> None:
        super().__init__(RopeConfig(BASE, DIM))
        self.far = far

    def at_some(self, positions: np.ndarray) -> Angles:
        return super().at_some(np.where(positions < SIZE, positions, positions + self.far - SIZE))


def turned(rows: torch.Tensor, position: int) -> torch.Tensor:
    """Rows [T, heads, DIM] at `position` and on, by angles in float64."""
    angles = np.outer(position + np.arange(len(rows), dtype=np.float64), BASE ** (-np.arange(DIM // 2) * 2 / DIM))
    rows = rows.clone()
    rope_(rows, torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float())
    return rows


def score_errors(ops: Backend, far: int, seed: int) -> tuple[float, float, float]:
    """RMS error of int4 scores of a page at `far`: as the cache has it, without a mean, and with one that stays as it
    was in the first page."""
    random = torch.Generator().manual_seed(seed)
    mean = 4 * torch.randn(HEADS, DIM, generator=random)
    k = mean + torch.randn(2 * SIZE, HEADS, DIM, generator=random)
    q = turned(mean + torch.randn(1, HEADS, DIM, generator=random), far + SIZE + 5)[0]
    k = torch.cat((turned(k[:SIZE], 0), turned(k[SIZE:], far)))
    cache = Cache(ops, layout(("int4", "f16"), (DIM, DIM), HEADS, SIZE))
    cache.rope = FarTable(far)
    cache.append(k, torch.zeros(2 * SIZE, HEADS, DIM))
    codec, exact = cache.kv.codecs[0], k[SIZE:].transpose(0, 1).double()

    def error(keys: torch.Tensor) -> float:  # [heads, SIZE, DIM], not in the rotated basis
        return float(torch.einsum("hd,hnd->hn", q.double(), keys - exact).square().mean().sqrt())

    def stored(keys: torch.Tensor) -> torch.Tensor:
        return rotate(codec.decode(*codec.encode(rotate(keys.float())), DIM)).double()

    ours = rotate(cache.rows(1, 2, SIZE)[0])
    fixed = k[4:SIZE].double().mean(0)[:, None]
    return error(ours), error(stored(exact)), error(stored(exact - fixed) + fixed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("reference", ISAS[-1]))
def test_the_score_error_of_int4_keys_does_not_grow_with_the_position(name: str):
    ops = backend(name)
    found = np.array([[score_errors(ops, far, seed) for seed in range(16)] for far in POSITIONS])
    ours, without, fixed = np.sqrt((found**2).mean(1)).T
    assert ours.max() < 1.1 * ours[0], ours
    assert (ours < 0.65 * without).all(), (ours, without)
    assert (ours[1:] < 0.6 * fixed[1:]).all(), (ours, fixed)


@pytest.mark.parametrize("position", POSITIONS)
def test_angles_are_right_at_any_position(position: int):
    table = RopeTable(RopeConfig(BASE, DIM))
    frequencies = [BASE ** (-2 * i / DIM) for i in range(DIM // 2)]
    exact = np.array([position * f for f in frequencies])
    for found, function in zip(table.at(position, 1), (np.cos, np.sin), strict=True):
        assert np.abs(found[0].double().numpy() - function(exact)).max() < 1e-6
