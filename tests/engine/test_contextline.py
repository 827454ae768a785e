"""The time of a token as a line over its context."""

from __future__ import annotations

import pytest

from kvcli.runtime.evaluate import benching
from kvcli.runtime.evaluate.benching import Case, Speed
from kvcli.runtime.evaluate.contextline import ContextLine, fit


def test_a_line_is_found_again() -> None:
    line = ContextLine(0.0017, 14.7e-9, 0.0)
    found = fit((n, line.at(n)) for n in (0, 256, 8192, 120_000))
    assert found is not None and found.residual < 1e-9
    assert (found.empty_s, found.each_s) == pytest.approx(line[:2])


def test_relative_distances_count_and_the_largest_is_told() -> None:
    """With plain distances the long times alone would say where the line is."""
    points = [(0, 1.0), (1, 2.2), (100, 101.0), (200, 150.0)]
    found = fit(points)
    assert found is not None
    shares = [abs(found.at(n) - t) / t for n, t in points]
    assert found.residual == max(shares) and shares[0] < 0.15

    def squares(empty: float, each: float) -> float:
        return sum(((empty + each * n - t) / t) ** 2 for n, t in points)

    best = squares(found.empty_s, found.each_s)
    for empty, each in ((1.01, 1.0), (0.99, 1.0), (1.0, 1.01), (1.0, 0.99)):
        assert squares(found.empty_s * empty, found.each_s * each) > best


def test_two_contexts_make_no_line() -> None:
    assert fit([(0, 1.0), (10, 2.0)]) is None and fit([(5, 1.0)] * 4) is None and fit([]) is None


def test_speeds_are_taken_half_way_and_by_length() -> None:
    """Prompts have none; each length of an answer has its own."""
    line = ContextLine(0.01, 1e-5, 0.0)

    def speed(kind: str, tokens: int, depth: int) -> Speed:
        case = Case(kind, tokens, depth)
        return Speed(case, (1 / line.at(depth + 1 + tokens // 2),), (), 0)

    depths = (0, 100, 1000)
    speeds = [speed(kind, n, depth) for kind, n in (("tg", 8), ("tg", 64), ("pp", 8)) for depth in depths]
    found = benching.lines([*speeds, speed("tg", 32, 0), speed("tg", 32, 100)])
    assert list(found) == [8, 64] and found[8][:2] == pytest.approx(line[:2]) == found[64][:2]
