"""Rotary embedding tables (arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from kvcli.kernels import CENTRE_ROWS, Angles
from kvcli.kernels.attend import Spans
from kvcli.runtime.config import ModelConfig, RopeConfig

TABLES = 8  # of centres that are kept: several layer groups and sequences share one configuration


class RopeTable:
    """Cosines and sines of one RoPE configuration; angles in float64, so large positions stay right."""

    def __init__(self, rope: RopeConfig, factors: torch.Tensor | None = None) -> None:
        """`factors` float32 [dim / 2] also divide the frequencies (see `RopeConfig.scaling`)."""
        self._last: tuple[Spans, Angles]
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self.frequencies = _frequencies(rope)
        if factors is not None:
            self.frequencies /= factors.double().numpy()
        self._last = ((0, 1),), self.at_positions(np.zeros(1))
        self._inside: tuple[Spans, np.ndarray, Angles] = ((0, 1),), np.zeros(1, dtype=np.int64), self._last[1]
        self._centres: dict[tuple[int, int], Angles] = {}

    def frequencies_on(self, device: torch.device) -> torch.Tensor:
        """The frequencies, float64 [dim / 2], on a device; copied once."""
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self.frequencies).to(device)
        return self._on_device[device]

    def at(self, start: int, n: int) -> Angles:
        """cos, sin float32 [n, dim / 2] for positions start .. start + n - 1."""
        return self.of(((start, n),))

    def of(self, spans: Spans) -> Angles:
        """The same for several (start, n), one after the other; kept for the other layers of a step."""
        if self._last[0] != spans:
            self._last = spans, self.at_positions(_positions(spans))
        return self._last[1]

    def inside(self, spans: Spans, gaps: np.ndarray) -> Angles:
        """The same for rows whose positions inside the cache are less by `gaps`, int64 [sum of n]; kept likewise."""
        if self._inside[0] != spans or not np.array_equal(self._inside[1], gaps):
            self._inside = spans, gaps, self.at_positions(_positions(spans) - gaps)
        return self._inside[2]

    def centres(self, end: int, first: int = 0, front: int = 0) -> Angles:
        """The same for the middle of each CENTRE_ROWS rows of [0, front) and, behind them, of [first, end) and more.

        These are the rows of a page list, so tables stay small wherever in a long sequence the pages stand.
        """
        found = self._centres.get((front, first))
        if found is None or found[0].shape[0] * CENTRE_ROWS - front < end - first:
            if len(self._centres) == TABLES:
                self._centres.clear()
            rows = np.arange(front), np.arange(first, first + 2 * (end - first))  # few are made as a sequence grows
            found = self._centres[front, first] = self.at_centres(np.concatenate([x[::CENTRE_ROWS] for x in rows]))
        return found

    def at_centres(self, firsts: np.ndarray) -> Angles:
        """The same for any: each CENTRE_ROWS rows begin at `firsts`, int64 [n]."""
        return self.at_positions(firsts + (CENTRE_ROWS - 1) / 2)

    def at_positions(self, positions: np.ndarray) -> Angles:
        """The same for any positions, float64 [n]."""
        angles = positions[:, None] * self.frequencies
        return torch.from_numpy(np.cos(angles).astype(np.float32)), torch.from_numpy(np.sin(angles).astype(np.float32))


def _frequencies(rope: RopeConfig) -> np.ndarray:
    """Angles of position 1 without factors of the file, float64 [dim / 2]."""
    base, i = rope.base, np.arange(rope.dim // 2, dtype=np.float64)
    if rope.scaling == "dynamic":
        stretched = rope.factor * rope.length / rope.original - (rope.factor - 1)
        base *= stretched ** (rope.dim / (rope.dim - 2))
    plain = base ** (-i * 2 / rope.dim)
    if rope.scaling == "yarn":
        first, last = rope.ramp
        part = ((i - first) / (last - first)).clip(0, 1)
        return plain * (1 - part) + plain / rope.factor * part
    return plain if rope.scaling == "dynamic" else plain / rope.factor


def _positions(spans: Spans) -> np.ndarray:
    """float64 [sum of n]."""
    return np.concatenate([np.arange(start, start + n, dtype=np.float64) for start, n in spans])


class RopeTables:
    """One table per distinct RoPE configuration of a model."""

    def __init__(self, config: ModelConfig, factors: Mapping[str, torch.Tensor] | None = None) -> None:
        """`factors`: those of the file, by `RopeConfig.scaling`."""
        ropes = {x.rope for x in config.layers if x.rope is not None}
        self._tables = {rope: RopeTable(rope, (factors or {}).get(rope.scaling)) for rope in ropes}

    def table(self, rope: RopeConfig | None) -> RopeTable | None:
        return None if rope is None else self._tables[rope]
