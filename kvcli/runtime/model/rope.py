"""Rotary embedding tables (arXiv 2104.09864)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from kvcli.kernels import Angles, PagedKV
from kvcli.kernels.attend import Spans
from kvcli.runtime.config import ModelConfig, RopeConfig

CENTRES = 1 << 15  # angles that are kept for page lists that have much in common


class RopeTable:
    """Cosines and sines of one RoPE configuration; angles in float64, so large positions stay right."""

    def __init__(self, rope: RopeConfig, factors: torch.Tensor | None = None, dims: int = 0) -> None:
        """`factors` float32 [dim / 2] also divide the frequencies (see `RopeConfig.scaling`). `dims`: only so many are
        turned, those of the first pairs; 0 = all."""
        self._made, self._first = (rope, factors), dict[int, RopeTable]()
        self._last: tuple[Spans, Angles]
        self._on_device: dict[torch.device, torch.Tensor] = {}
        self.frequencies = _frequencies(rope)
        if factors is not None:
            self.frequencies /= factors.double().numpy()
        self.frequencies = self.frequencies[: dims // 2 or None]
        self._last = ((0, 1),), self.at_positions(np.zeros(1))
        self._inside: tuple[Spans, np.ndarray, Angles] = ((0, 1),), np.zeros(1, dtype=np.int64), self._last[1]
        self._centres: tuple[np.ndarray, Angles] = np.zeros(1), self._last[1]

    def first(self, dims: int) -> RopeTable:
        """The table that turns only the first `dims` / 2 pairs of dims; one for all that ask."""
        if dims not in self._first:
            self._first[dims] = RopeTable(*self._made, dims)
        return self._first[dims]

    def frequencies_on(self, device: torch.device) -> torch.Tensor:
        """The frequencies, float64 [dim / 2], on a device; copied once."""
        if device not in self._on_device:
            self._on_device[device] = torch.from_numpy(self.frequencies).to(device)
        return self._on_device[device]

    def at(self, start: int, n: int) -> Angles:
        """cos, sin float32 [n, dim / 2] for positions start .. start + n - 1."""
        return self.of(((start, n),))

    def of(self, spans: Spans) -> Angles:
        """cos, sin of the positions of several (start, n), one after the other; kept for the other layers of a step."""
        if self._last[0] != spans:
            self._last = spans, self.at_positions(_positions(spans))
        return self._last[1]

    def handed_over(self) -> tuple[Spans, Angles]:
        """What `of` gave last, and for which rows; the tensors are the caller's from now on."""
        last, self._last = self._last, (((0, 1),), self.at_positions(np.zeros(1)))
        return last

    def inside(self, spans: Spans, shift: np.ndarray) -> Angles:
        """cos, sin of such rows where they stand earlier inside the cache by `shift`, int64 [sum of n]; kept, too."""
        if self._inside[0] != spans or not np.array_equal(self._inside[1], shift):
            self._inside = spans, shift, self.at_positions(_positions(spans) - shift)
        return self._inside[2]

    def centres(self, kv: PagedKV) -> Angles:
        """cos, sin of `PagedKV.centres`; made once for all layers that share a list of entries."""
        made = kv.entries.made
        if self not in made:
            made[self] = self.at_some(kv.centres)
        found: Angles = made[self]  # type: ignore[assignment]
        return found

    def at_some(self, positions: np.ndarray) -> Angles:
        """cos, sin of positions, float64 [n], most of which were asked for before: others are kept with them."""
        known, angles = self._centres
        if len(new := np.setdiff1d(positions, known)):
            if len(known) > max(CENTRES, len(positions)):  # keep no more than this list's
                known, angles, new = known[:0], (angles[0][:0], angles[1][:0]), np.unique(positions)
            both = np.concatenate([known, new])
            order = np.argsort(both)
            cos, sin = (torch.cat(x)[order] for x in zip(angles, self.at_positions(new), strict=True))
            self._centres = known, angles = both[order], (cos, sin)
        at = torch.from_numpy(np.searchsorted(known, positions))
        return angles[0][at], angles[1][at]

    def at_positions(self, positions: np.ndarray) -> Angles:
        """cos, sin float32 [n, dim / 2] of any positions, float64 [n]."""
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

    def __iter__(self) -> Iterator[RopeTable]:
        return iter(self._tables.values())

    def table(self, rope: RopeConfig | None) -> RopeTable | None:
        return None if rope is None else self._tables[rope]

    def named(self, config: ModelConfig) -> dict[tuple[int, int], RopeTable]:
        """All tables of a model and those `first` of them, by the number of a layer that has one and dims, 0 = all."""
        tables = {(i, 0): self._tables[x.rope] for i, x in enumerate(config.layers) if x.rope is not None}
        return tables | {(i, dims): part for (i, _), x in tables.items() for dims, part in x._first.items()}
