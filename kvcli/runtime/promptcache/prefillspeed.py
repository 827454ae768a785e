"""`PrefillSpeed`: how long this machine takes to compute rows, learned from prompts that it computed. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

DECAY = 0.9  # of what was learned before, at every new prompt
LEAST_ROWS = 64  # of a prompt that something is learned from: shorter ones tell of overheads


@dataclass
class PrefillSpeed:
    """The seconds of rows [start, end) as a * rows + b * (rows before each of them, summed): products take the same
    time for every row, attention takes longer the more rows it looks back on.

    a and b are fitted by least squares of the relative errors, of which these are the sums; neither may be negative.
    """

    rows2: float = 0.0
    mixed: float = 0.0
    depth2: float = 0.0
    rows: float = 0.0
    depth: float = 0.0

    def learn(self, start: int, end: int, seconds: float) -> None:
        """Rows [start, end) took so long."""
        if end - start < LEAST_ROWS or seconds <= 0:
            return
        n, d = (value / seconds for value in _amounts(start, end))
        new = {"rows2": n * n, "mixed": n * d, "depth2": d * d, "rows": n, "depth": d}
        for name, value in new.items():
            setattr(self, name, getattr(self, name) * DECAY + value)

    def seconds(self, start: int, end: int) -> float | None:
        """What rows [start, end) would take; None = nothing was learned yet."""
        if self.rows2 <= 0:
            return None
        n, d = _amounts(start, end)
        a, b = self._fitted()
        return a * n + b * d

    def _fitted(self) -> tuple[float, float]:
        by_rows = self.rows / self.rows2, 0.0
        determinant = self.rows2 * self.depth2 - self.mixed * self.mixed
        if determinant <= 1e-9 * self.rows2 * self.depth2:  # all prompts were of one length
            return by_rows
        a = (self.rows * self.depth2 - self.depth * self.mixed) / determinant
        b = (self.depth * self.rows2 - self.rows * self.mixed) / determinant
        if b < 0:
            return by_rows
        return (a, b) if a >= 0 else (0.0, self.depth / self.depth2)

    def as_object(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> PrefillSpeed:
        """What `as_object` gave. Raises ValueError, TypeError."""
        found = cls(**{name: float(value) for name, value in values.items()})
        if not all(0 <= value < float("inf") for value in found.as_object().values()):
            raise ValueError("not a speed")
        return found


def _amounts(start: int, end: int) -> tuple[float, float]:
    """Rows, and the rows before each of them, summed."""
    return float(end - start), (end * (end - 1) - start * (start - 1)) / 2
