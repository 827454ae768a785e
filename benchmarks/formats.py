"""Products of one row, of a few and of many with every block format on a CPU, beside each other.

    python benchmarks/formats.py                      # the table of docs/benchmarks.md
    python benchmarks/formats.py --types Q4_0,IQ4_NL

Weights are random, 2048 x 2048; each time is the best of several short runs, which take turns. Gigabytes are packed
ones; a few rows are 8, many are 64.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
import torch

from kvcli.blockformats import FORMATS, WEIGHT_FORMATS
from kvcli.kernels import QuantTensor
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import asked_isa
from kvcli.runtime.host.cores import physical_cores

SIZE = 2048
ROWS = {"one row": 1, "a few": 8, "many": 64}


def matrix(type_: str) -> QuantTensor:
    """Random bytes: no format takes another time for other ones, so long as nothing is NaN or subnormal."""
    form = FORMATS[type_]
    raw = np.random.default_rng(0).integers(32, 56, (SIZE, SIZE // form.elements * form.bytes), dtype=np.uint8)
    return QuantTensor(type_, torch.from_numpy(raw), SIZE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(WEIGHT_FORMATS))
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    ops = NativeBackend(options.threads, asked_isa())
    matrices = {name: matrix(name) for name in options.types.split(",")}
    best = dict.fromkeys(((name, what) for name in matrices for what in ROWS), float("inf"))
    for _ in range(options.runs):
        for what, rows in ROWS.items():
            x = torch.randn(rows, SIZE, generator=torch.manual_seed(rows))
            for name, w in matrices.items():
                began = time.perf_counter()
                ops.matmul(x, (w,))
                best[name, what] = min(best[name, what], time.perf_counter() - began)
    print(f"| format | bits a weight | one row, GB/s | {' | '.join(f'{what}, G products/s' for what in ROWS)} |")
    print("|---|---:|---:|" + "---:|" * len(ROWS))
    rows = []
    for name, w in matrices.items():
        speeds = [rows * SIZE * SIZE / best[name, what] / 1e9 for what, rows in ROWS.items()]
        bits, rate = 8 * w.nbytes / SIZE**2, w.nbytes / best[name, "one row"] / 1e9
        print(f"| {name} | {bits:.2f} | {rate:.1f} | " + " | ".join(f"{speed:.1f}" for speed in speeds) + " |")
        rows.append({"format": name, "bits": bits, "GB/s": rate, **dict(zip(ROWS, speeds, strict=True))})
    print(json.dumps({"isa": ops.isa, "threads": options.threads, "formats": rows}))


if __name__ == "__main__":
    main()
