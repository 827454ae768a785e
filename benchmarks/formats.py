"""Products of one row (a token) and of 512 (a prompt) with every block format, on a CPU or on a GPU.

    python benchmarks/formats.py                      # the tables of docs/benchmarks.md
    python benchmarks/formats.py --device cuda
    python benchmarks/formats.py --types Q4_0,IQ4_NL

Matrices are random, as an engine holds them (interleaved or repacked where it does that), and take turns, so that no
cache holds them. Each product is compared with float64 first. A time is a median: of single calls on a CPU; on a GPU by
events, of graphs of the kernels that a token has, and of calls one behind the other for a prompt. Gigabytes are those
of packed weights; "of memory" is their share of what the same threads, or the card, read in a plain sum. Prints a
table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import gpu_products
import numpy as np
import torch

from kvcli.blockformats import FORMATS, FORMS, WEIGHT_FORMATS
from kvcli.kernels import QuantTensor
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import asked_isa
from kvcli.kernels.gpu import expand
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.matvec import STORE
from kvcli.runtime.host import measuring
from kvcli.runtime.host.cores import physical_cores

PROMPT = 512
CPU_SHAPE, GPU_SHAPE = (2048, 2048), (14336, 4096)
CPU_BYTES = 96 << 20  # of copies: three times the last cache of the measured machine
CLOSE = {1: 1e-4, PROMPT: 1e-3}  # relative, by rows, which are rounded to 16 bits at least
TYPES = ["F32", *(name for name in WEIGHT_FORMATS if FORMS[name].table != "float32")]  # integers are no weights


class OnCpu:
    """Products of one format by the kernels that `kv` has here."""

    def __init__(self, type_: str, ops: NativeBackend) -> None:
        (rows, cols), form = CPU_SHAPE, FORMATS[type_]
        self.bits = 8 * form.bytes / form.elements
        count = max(1, -(-CPU_BYTES // (rows * cols // form.elements * form.bytes)))
        chance = np.random.default_rng(0)
        # any bytes: no format takes another time for other ones, so long as nothing is NaN or subnormal
        size = rows, cols // form.elements * form.bytes
        raws = [torch.from_numpy(chance.integers(32, 56, size, dtype=np.uint8)) for _ in range(count)]
        self.first = QuantTensor(type_, raws[0], cols)
        self.nbytes, self.ops = self.first.nbytes, ops
        self.placed = [ops.place((QuantTensor(type_, raw, cols),)) for raw in raws]
        self.turns = cycle(self.placed)

    def error(self, rows: int) -> float:
        x = _rows(rows, CPU_SHAPE[1])
        exact = x.double() @ self.first.decode().double().T
        return gpu_products.relative(self.ops.matmul(x, self.placed[0]), exact)

    def seconds(self, rows: int, runs: int) -> float:
        x, times = _rows(rows, CPU_SHAPE[1]), []
        for _ in range(runs + 1):
            began = time.perf_counter()
            self.ops.matmul(x, next(self.turns))
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


class OnGpu:
    """Products of one format by the kernels of a token, and by those of a prompt."""

    def __init__(self, type_: str) -> None:
        self.token = gpu_products.Case(type_, *GPU_SHAPE, STORE)
        self.bits = float(self.token.matrices[0].format.bits_per_weight)
        self.nbytes, self.ops = self.token.matrices[0].nbytes, GpuBackend(gpu_products.DEVICE)
        self.ops._room = torch.empty(
            expand.room_for(self.token.matrices[0]), dtype=torch.float16, device=gpu_products.DEVICE
        )

    def error(self, rows: int) -> float:
        if rows == 1:
            return self.token.error()
        first = self.token.matrices[0]
        x = _rows(rows, GPU_SHAPE[1]).to(gpu_products.DEVICE)
        weights = expand.rows(first, torch.empty(*GPU_SHAPE, device=gpu_products.DEVICE))
        exact = torch.cat([x.double() @ part.double().T for part in weights.split(4096)], 1)
        return gpu_products.relative(self.ops.matmul(x, (first,)), exact)

    def seconds(self, rows: int, runs: int) -> float:
        matrices = self.token.matrices
        if rows == 1:
            return gpu_products.graph_us([partial(self.token.launch, m) for m in matrices * 2], runs) / 1e6
        x = _rows(rows, GPU_SHAPE[1]).to(gpu_products.DEVICE).half()
        return events([partial(self.ops.matmul, x, (m,)) for m in matrices], runs)


def events(calls: list[Callable[[], Any]], runs: int) -> float:
    """Median seconds of a call, of rounds of all."""
    times = []
    for _ in range(runs + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in calls:
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000 / len(calls))
    return statistics.median(times[1:])


def _rows(count: int, cols: int) -> torch.Tensor:
    return torch.randn(count, cols, generator=torch.manual_seed(count))


def measured(case: OnCpu | OnGpu, runs: int, memory: float) -> dict[str, float]:
    """Of one format. `memory`: bytes a second that are read in a plain sum."""
    rows, cols = GPU_SHAPE if isinstance(case, OnGpu) else CPU_SHAPE
    for count, close in CLOSE.items():
        if (error := case.error(count)) > close:
            raise SystemExit(f"a product of {count} rows is wrong: relative error {error:.1e}")
    token, prompt = case.seconds(1, runs), case.seconds(PROMPT, max(3, runs // 8))
    found = {"bits": case.bits, "token_us": token * 1e6, "token_gb_s": case.nbytes / token / 1e9}
    found |= {"token_share": case.nbytes / token / memory, "prompt_us": prompt * 1e6}
    return found | {
        "prompt_gb_s": case.nbytes / prompt / 1e9,
        "prompt_g_products_s": PROMPT * rows * cols / prompt / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--threads", type=int, default=physical_cores())
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.device == "cuda":
        memory = measuring.cuda("0")["bandwidth_gb_s"]
        place = torch.cuda.get_device_name()
    else:
        memory, ops = reading(options.threads), NativeBackend(options.threads, asked_isa())
        place = f"{ops.isa}, {options.threads} threads"
    print("| format | bits a weight | a token: us | GB/s | of memory | 512 rows: us | G products/s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    found = {}
    for name in options.types.split(","):
        if options.device == "cuda" and name == "F32":
            continue  # a token's kernels take none
        case = OnGpu(name) if options.device == "cuda" else OnCpu(name, ops)
        one = found[name] = measured(case, options.runs, memory * 1e9)
        print(
            f"| {name} | {one['bits']:.2f} | {one['token_us']:,.1f} | {one['token_gb_s']:,.1f} |"
            f" {one['token_share']:.0%} | {one['prompt_us']:,.0f} |"
            f" {one['prompt_g_products_s']:,.0f} |",
            flush=True,
        )
        del case
    print(json.dumps({"on": place, "memory_gb_s": memory, "formats": found}))


def reading(threads: int) -> float:
    """GB/s at which so many threads read main memory in a plain sum."""
    torch.set_num_threads(threads)
    memory, times = torch.ones(64 << 20), []
    for _ in range(8):
        began = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - began)
    torch.set_num_threads(1)
    return memory.nbytes / min(times) / 1e9


if __name__ == "__main__":
    main()
