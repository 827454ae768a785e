"""`Rates`: tokens a second of several repetitions, as all measurements of speed have them."""

from __future__ import annotations

import statistics

WARMUP_TOKENS = 8  # of a generation: kernels, pages and graphs are there afterwards


class Rates:
    """`rates`: tokens a second of each repetition."""

    rates: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rates)

    @property
    def deviation(self) -> float | None:
        """Standard deviation of the rates; a single one has none."""
        return statistics.stdev(self.rates) if len(self.rates) > 1 else None
