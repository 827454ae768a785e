"""docs/depth.svg: tokens a second against the depth of the context, drawn from the figures in docs/depth.csv.

    python benchmarks/depth_plot.py [--check]

`--check` changes nothing and exits with 1 if the picture is not what the figures give.
"""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
FIGURES, PICTURE = DOCS / "depth.csv", DOCS / "depth.svg"
WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 610, 24, 350  # edges of the field
COLORS = {"kv": {"f16": "#1b5e9e", "int8": "#2f8f5b", "int4": "#c0562b"}, "llama.cpp": {}}
GREY = "#7a7a7a"
DASHES = {"f16": "7 3", "q8_0": "2 3", "q4_0": "1 5"}
MOST = 500  # tokens a second at the top

Line = list[tuple[int, float]]


def read() -> dict[tuple[str, str], Line]:
    """(program, cache type) -> its points, in the order of the file."""
    rows = csv.DictReader(line for line in FIGURES.read_text("utf-8").splitlines() if not line.startswith("#"))
    lines: dict[tuple[str, str], Line] = {}
    for row in rows:
        lines.setdefault((row["program"], row["cache"]), []).append((int(row["depth"]), float(row["tokens_per_s"])))
    return lines


def x(depth: int) -> float:
    """Square roots: the first ten thousand tokens get as much room as the next thirty."""
    return LEFT + (RIGHT - LEFT) * math.sqrt(depth / 120_000)


def y(rate: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * rate / MOST


def text(at: float, height: float, words: str, anchor: str = "start", color: str = "#333") -> str:
    return f'<text x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def draw(lines: dict[tuple[str, str], Line]) -> str:
    """The picture."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="13">',
        "<title>Tokens a second against the depth of the context</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for rate in range(0, MOST + 1, 100):
        parts.append(f'<path d="M{LEFT} {y(rate):.1f}H{RIGHT}" stroke="#e2e2e2"/>')
        parts.append(text(LEFT - 8, y(rate) + 4, str(rate), "end"))
    for depth in (0, 8192, 32768, 65536, 120_000):
        parts.append(f'<path d="M{x(depth):.1f} {BOTTOM}v5" stroke="#333"/>')
        parts.append(text(x(depth), BOTTOM + 20, f"{depth:,}", "middle"))
    parts.append(text((LEFT + RIGHT) / 2, BOTTOM + 40, "tokens in the context", "middle"))
    parts.append(text(LEFT, TOP - 8, "tokens a second"))
    names = []
    for (program, cache), points in lines.items():
        color = COLORS[program].get(cache, GREY)
        dash = "" if program == "kv" else f' stroke-dasharray="{DASHES[cache]}"'
        path = "M" + "L".join(f"{x(depth):.1f} {y(rate):.1f}" for depth, rate in points)
        parts.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2.5"{dash}/>')
        parts += [f'<circle cx="{x(d):.1f}" cy="{y(r):.1f}" r="3" fill="{color}"/>' for d, r in points]
        names.append((y(points[-1][1]), f"{program} {cache}", color))
    lowest = math.inf
    for height, name, color in sorted(names, reverse=True):  # from below, so that names do not cover each other
        lowest = min(height + 4, lowest - 15)
        parts.append(text(RIGHT + 12, lowest, name, color=color))
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    picture = draw(read())
    if "--check" in sys.argv:
        sys.exit(PICTURE.read_text("utf-8") != picture)
    PICTURE.write_text(picture, "utf-8")


if __name__ == "__main__":
    main()
