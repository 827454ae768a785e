"""`--plot`: the results of `kv eval` as a picture. Needs matplotlib, which nothing else does."""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from kvcli.errors import OutputError, UsageError

if TYPE_CHECKING:
    from kvcli.cli.commands.eval.results import Cell

FORMATS = (".svg", ".png")


def check(path: str) -> None:
    """Raises UsageError for a picture that could not be drawn, before anything is measured."""
    if os.path.splitext(path)[1].lower() not in FORMATS:
        raise UsageError(f"--plot must end in {' or '.join(FORMATS)}, not '{path}'")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise UsageError(f"--plot {path}: there is no folder {os.path.dirname(path)}")
    there = path if os.path.exists(path) else os.path.dirname(path) or "."
    if os.path.isdir(path) or not os.access(there, os.W_OK):
        raise UsageError(f"--plot {path}: it cannot be written", "name another file")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib, which is not installed", "pip install matplotlib")


Points = dict[str, list[tuple[int, float]]]  # lines by their names


def draw_rates(path: str, by_count: Points, by_length: Points) -> None:
    """Tokens a second against the number of sequences, and against the length of their contexts. Raises OutputError."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    names = "sequences at a time", "tokens of each context"
    for axis, lines, name in zip(axes, (by_count, by_length), names, strict=True):
        for label, points in lines.items():
            axis.plot(*zip(*sorted(points), strict=True), marker="o", ms=3.5, lw=1.2, label=label)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.set_xlabel(name)
        axis.set_ylabel("tokens a second, of all")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    _save(figure, path)


def draw(path: str, cells: list[Cell]) -> None:
    """Settings from left to right; above the likelihood of the answers, below their divergence from the full cache. A
    line for each task and length. Raises OutputError."""
    pyplot = _pyplot()
    settings = list(dict.fromkeys(cell.compared.name for cell in cells))
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(max(5, 1.5 + 1.1 * len(settings)), 6.5))
    _lines(above, cells, settings, "nll")
    _lines(below, cells, settings, "kld")
    above.set_ylabel("negative log likelihood\nof the answer, nats a token")
    below.set_ylabel("divergence from the full cache,\nnats a token")
    below.set_yscale("symlog", linthresh=1e-4)
    below.set_ylim(bottom=0)
    below.set_xticks(range(len(settings)), settings, rotation=30, ha="right", fontsize=8)
    above.legend(fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # Letters stay letters, and the same results are the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kv"})
    return pyplot


def _save(figure: Any, path: str) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, metadata={"Date": None} if path.lower().endswith(".svg") else None)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        _pyplot().close(figure)


def _lines(axes: Any, cells: list[Cell], settings: list[str], figure: str) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    several = len({cell.tokens for cell in cells}) > 1
    for cell in cells:
        name = f"{cell.name}, {cell.tokens:,} tokens" if several else cell.name
        lines.setdefault(name, []).append((settings.index(cell.compared.name), getattr(cell, figure)))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", ms=3.5, lw=1.2, label=name)
    axes.grid(alpha=0.3)
