"""Products with 2 to 64 rows on a CUDA machine: right against float64 in every run, and how fast.

    python benchmarks/gpu_few.py                  # what is launched, at the shapes of an 8B model
    python benchmarks/gpu_few.py --tiles          # other tiles, too

Each product runs RUNS times between others, which must give the same bits. A time is the median of replays of a CUDA
graph over matrices that no cache holds together. A table, then one JSON line; the exit code is 1 if any run is off.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import astuple
from itertools import product

import torch
import triton
from gpu_products import SHAPES, graph_us, random_matrix, relative

from kvcli.kernels.gpu import expand, few
from kvcli.kernels.gpu.formats import DeviceMatrix
from kvcli.kernels.gpu.matvec import GATED
from kvcli.kernels.gpu.wide import HalfRows, weave

DEVICE = torch.device("cuda")
NAMES = [name for name in SHAPES if name.endswith("8B")]
ROWS, RUNS, LIMIT = (2, 5, 8, 16, 17, 32, 48, 64), 20, 6e-4
TILES = [few.Tile(*each) for each in product((64, 128), (1, 2), (2, 3, 4))]
ROTATE_BYTES = 200 << 20


def exact(x: torch.Tensor, m: DeviceMatrix) -> torch.Tensor:
    """float64 [T, rows]."""
    w = expand.rows(m, torch.empty(m.rows, m.cols, device=DEVICE))
    return torch.cat([x.double() @ part.double().T for part in w.split(16384)], 1)


def check(m: DeviceMatrix, t: int, tile: few.Tile | None, runs: int, parts: int) -> tuple[float, int]:
    """The largest relative error of a run, and how many runs have other bits than most."""
    x = torch.randn(t, m.cols, device=DEVICE).half()
    woven, expected = weave(HalfRows(x), m.cols).values, exact(x, m)
    others = torch.randn(4096, 4096, device=DEVICE).half()
    found = []
    for run in range(runs):
        out = torch.full((parts, t, m.rows), torch.nan, device=DEVICE)
        if run % 2:
            others @ others  # leaves other numbers in shared memory
        few.product(woven, m, out, chosen=tile)
        found.append(out.sum(0))
    usual = torch.stack(found).median(0).values if runs > 2 else found[0]
    return max(relative(y, expected) for y in found), sum(not torch.equal(y, usual) for y in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--shapes", default=",".join(NAMES))
    parser.add_argument("--formats", default="Q4_K,Q6_K")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, object]] = []
    print(f"{'product':12} {'format':6} rows    tile parts {'error':>8}  off {'us':>7} {'GB/s':>6}")
    for name in options.shapes.split(","):
        n, k, role = SHAPES[name]
        for fmt in options.formats.split(","):
            first = random_matrix(fmt, n, k, role if role == GATED else 0)
            copies = min(24, max(1, -(-ROTATE_BYTES // first.nbytes)))
            matrices = [first, *(random_matrix(fmt, n, k, role if role == GATED else 0) for _ in range(copies - 1))]
            for t in map(int, options.rows.split(",")):
                for tile in (None, *TILES) if options.tiles else (None,):
                    parts = few.parts([first], t)
                    error, off = check(first, t, tile, options.runs, parts)
                    x = weave(HalfRows(torch.randn(t, k, device=DEVICE).half()), k).values
                    out = torch.empty(parts, t, n, device=DEVICE)
                    runs = [lambda m=m, x=x, o=out, of=tile: few.product(x, m, o, chosen=of) for m in matrices * 2]
                    us = graph_us(runs)
                    row = {"product": name, "format": fmt, "rows": t, "tile": tile and astuple(tile), "parts": parts,
                           "error": error, "off": off, "us": us, "GB/s": first.nbytes / us / 1e3}  # fmt: skip
                    rows.append(row)
                    told = "/".join(map(str, astuple(tile))) if tile else "usual"
                    errors = f"{parts:5} {error:8.1e} {off:4}"
                    print(f"{name:12} {fmt:6} {t:4} {told:>7} {errors} {us:7.2f} {row['GB/s']:6.0f}", flush=True)
            del matrices, first
    print(json.dumps({"device": torch.cuda.get_device_name(), "triton": triton.__version__, "products": rows}))
    sys.exit(any(float(str(row["error"])) > LIMIT or row["off"] for row in rows))


if __name__ == "__main__":
    main()
