"""What a token costs behind a context: seconds as a line over the tokens before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LEAST_POINTS = 3  # two always lie on a line


class ContextLine(NamedTuple):
    """A token behind n tokens of context takes `empty_s` + `each_s` * n seconds. `residual`: the largest distance of a
    measured time from that, as a share of the measured one."""

    empty_s: float
    each_s: float
    residual: float

    def at(self, n: float) -> float:
        """Seconds of a token behind n tokens."""
        return self.empty_s + self.each_s * n


def fit(points: Iterable[tuple[int, float]]) -> ContextLine | None:
    """The line through (tokens of context, seconds of a token) with the least squares of relative distances: times
    vary by shares of themselves, and short ones are to be met as well as long ones. None for fewer than LEAST_POINTS
    contexts."""
    known = [(n, t, t**-2) for n, t in points]
    if len({n for n, _, _ in known}) < LEAST_POINTS:
        return None
    total = sum(w for _, _, w in known)
    middle_n, middle_t = (sum(x[i] * x[2] for x in known) / total for i in (0, 1))
    spread = sum(w * (n - middle_n) ** 2 for n, _, w in known)
    each = sum(w * (n - middle_n) * (t - middle_t) for n, t, w in known) / spread
    line = ContextLine(middle_t - each * middle_n, each, 0.0)
    return line._replace(residual=max(abs(line.at(n) - t) / t for n, t, _ in known))
