"""Where the time of a step of several rows goes on a CUDA machine, kernel by kernel.

    python benchmarks/gpu_steps.py MODEL                           # answers side by side, and rows of one sequence
    python benchmarks/gpu_steps.py MODEL --cases int4:4k:16x1      # 16 answers, a row of each, behind 4,096 int4 rows
    python benchmarks/gpu_steps.py MODEL --cases f16:8k:1x8        # eight rows of one sequence
    python benchmarks/gpu_steps.py MODEL --layer                   # also the kernels of one layer, in order

A kernel's share is from the end of the one before it to its own end, as the profiler (CUPTI) sees them in a replay of
the step's graph, the median of REPLAYS. Below, what a replay takes without the profiler. Tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvcli import environment

environment.prepare()  # before torch is imported

import torch  # noqa: E402
from gpu_token import REPLAYS, timed, tokens_of, traced  # noqa: E402

from kvcli.options import CacheOptions, LoadOptions  # noqa: E402
from kvcli.runtime.cache.sequence import Sequence  # noqa: E402
from kvcli.runtime.engine.engine import Engine  # noqa: E402
from kvcli.runtime.engine.graph.batchgraph import BatchGraph  # noqa: E402
from kvcli.runtime.engine.graph.stepgraph import StepGraph  # noqa: E402

CASES = "int4:4k:1x8,int4:4k:8x1,int4:4k:16x1,f16:4k:16x1"


def filled(engine: Engine, depth: int) -> Sequence:
    """A sequence of so many rows."""
    seq, generator = engine.new_sequence(), torch.Generator().manual_seed(depth)
    for start, end in engine.chunks(0, max(depth, 1)):
        engine.forward(seq, torch.randint(0, 1000, (end - start,), generator=generator).tolist())
    return seq


def step_of(engine: Engine, depth: int, count: int, rows: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of a step that was computed, and what has its buffers: a step of `count` answers with a row each, or of
    one sequence with `rows`."""
    seqs = [filled(engine, depth) for _ in range(count)]
    if count > 1:
        batch = BatchGraph(engine.model, engine.layout, engine.ctx_size, count)
        for row, seq in enumerate(seqs):
            batch.seat(row, seq)
        for i in range(3):
            batch.run(dict.fromkeys(range(count), 7 + i))
        return next(iter(batch._graphs.values())), batch
    assert isinstance(engine.steps, StepGraph)
    for _ in range(2):
        engine.forward(seqs[0], list(range(rows)))
    return list(engine.steps._rows[rows, 1].graphs.values())[-1], engine.steps


def profile(graph: torch.cuda.CUDAGraph, layer: bool) -> dict[str, Any]:
    plain = timed(graph.replay)
    shares: dict[str, list[list[float]]] = defaultdict(list)  # of a name, for each time it comes: of each replay
    lengths: dict[str, list[float]] = defaultdict(list)
    for _ in range(REPLAYS):
        kernels = traced(graph)
        last, seen = kernels[0][1], defaultdict[str, int](int)
        for n, (name, start, end) in enumerate(kernels):
            if name == "_few" and n > 0:  # which one it is shows in what comes before it
                name = f"_few behind {kernels[n - 1][0]}"
            at, seen[name] = seen[name], seen[name] + 1
            if len(shares[name]) <= at:
                shares[name].append([])
            shares[name][at].append(max(0.0, end - last))
            lengths[name].append(end - start)
            last = max(last, end)
    rows = [
        {"kernel": name, "times": len(each), "us": statistics.mean(statistics.median(x) for x in each),
         "sum_us": sum(statistics.median(x) for x in each), "length_us": statistics.median(lengths[name])}
        for name, each in shares.items()
    ]  # fmt: skip
    rows.sort(key=lambda row: -float(str(row["sum_us"])))
    print(f"{'kernel':40} {'times':>5} {'us each':>8} {'length':>8} {'us all':>8}")
    for x in rows:
        name = str(x["kernel"])[:40]
        print(f"{name:40} {x['times']:5} {x['us']:8.2f} {x['length_us']:8.2f} {x['sum_us']:8.1f}")
    if layer:
        _print_layer(kernels)
    print(f"replayed {plain * 1e6:.0f} us", flush=True)
    return {"us": plain * 1e6, "kernels": rows}


def _print_layer(kernels: list[tuple[str, float, float]]) -> None:
    """From attention to attention, in the middle: when each kernel begins and ends, in us."""
    places = [i for i, (name, _, _) in enumerate(kernels) if name == "_attend"]
    middle = len(places) // 2
    first = kernels[places[middle]][1]
    for name, start, end in kernels[places[middle] : places[min(middle + 2, len(places) - 1)]]:
        print(f"{start - first:8.2f} {end - first:8.2f}  {name[:60]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--layer", action="store_true")
    options = parser.parse_args()
    engines: dict[str, Engine] = {}
    found = []
    cases = [case.split(":") for case in options.cases.split(",")]
    deepest = max(tokens_of(depth) for _, depth, _ in cases) + 256
    most = max(int(shape.partition("x")[0]) for _, _, shape in cases)
    for kind, depth, shape in cases:
        count, rows = map(int, shape.split("x"))
        if kind not in engines:
            cache = CacheOptions(deepest, kind, kind, sequences=most)
            first = next(iter(engines.values()), None)
            load = LoadOptions(str(options.model))
            engines[kind] = first.beside(cache) if first else Engine.open(options.model, load, cache)
        print(f"\n{kind}, {tokens_of(depth):,} tokens, {count} x {rows} rows")
        with torch.inference_mode():
            graph, _kept = step_of(engines[kind], tokens_of(depth), count, rows)
            found.append({"case": [kind, depth, shape]} | profile(graph, options.layer))
    print(json.dumps({"device": torch.cuda.get_device_name(), "steps": found}))


if __name__ == "__main__":
    main()
