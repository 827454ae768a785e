"""Prompts that arrive together on a GPU: read in one pass by a graph, and one after the other.

python benchmarks/prompts_together.py MODEL [--cache-type f16] [--rows 32,128,250] [--prompts 4,8] [--repeats 5]

Each row: milliseconds of all prompts, medians of REPEATS in turns, and the largest difference of the last hidden rows,
as a part of their length. Then 16 requests of 250 tokens through the scheduler, each way: milliseconds of each of its
steps until all have their first tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.engine.scheduler import Scheduler


def timed(engine: Engine, ids: list[list[int]], together: bool) -> tuple[float, torch.Tensor]:
    """Milliseconds of these prompts, and their last hidden rows."""
    seqs, found = [engine.new_sequence() for _ in ids], list[torch.Tensor]()
    torch.cuda.synchronize()
    began = time.perf_counter()
    rows = [(seq, each, False) for seq, each in zip(seqs, ids, strict=True)]
    with torch.inference_mode():
        for some in [rows] if together else [[row] for row in rows]:
            hidden = engine.forward_all(some)
            found += [each[-1] for each in hidden.split([len(each) for _, each, _ in some])]
    torch.cuda.synchronize()
    took = 1e3 * (time.perf_counter() - began)
    last = torch.stack(found).float()
    for seq in seqs:
        seq.close()
    return took, last


def graphs(engine: Engine, joined: set[tuple[int, int]]) -> None:
    """Have graphs of so many rows of so many prompts."""
    assert isinstance(engine.steps, StepGraph)
    engine.steps.joined = joined


def compare(engine: Engine, rows: int, prompts: int, repeats: int) -> str:
    ids = torch.randint(100, 1000, (prompts, rows), generator=torch.manual_seed(rows)).tolist()
    graphs(engine, {(next(n for n in (32, 64, 128, 256, 512) if n >= rows), prompts)})
    times: dict[bool, list[float]] = {False: [], True: []}
    last = dict[bool, torch.Tensor]()
    for repeat in range(repeats + 1):
        for together in (False, True):
            took, last[together] = timed(engine, ids, together)
            times[together] += [took] if repeat else []
    apart, joined = (statistics.median(times[each]) for each in (False, True))
    differ = ((last[True] - last[False]).norm(dim=1) / last[False].norm(dim=1)).max()
    return f"| {rows} | {prompts} | {apart:.2f} | {joined:.2f} | {apart / joined:.2f} | {differ:.1e} |"


def steps(engine: Engine, together: bool, count: int = 16, rows: int = 250) -> str:
    """Milliseconds of each step of the scheduler until all have first tokens."""
    graphs(engine, {(256, 4)} if together else set())
    ids = torch.randint(100, 1000, (count, rows), generator=torch.manual_seed(7)).tolist()
    scheduler, options = Scheduler(engine, count), SampleOptions(temperature=0.0, max_tokens=12, ignore_eos=True)
    requests = [engine.request(engine.new_sequence(), each, options) for each in ids]
    for request in requests:
        scheduler.submit(request)
    found, waiting = list[str](), True
    while not scheduler.idle:
        began = time.perf_counter()
        scheduler.step()
        mark = "" if waiting else "+"  # steps behind the last first token
        waiting = any(len(request.history) == request.n_prompt for request in requests)
        found.append(f"{mark}{1e3 * (time.perf_counter() - began):.1f}")
    for request in requests:
        request.seq.close()
    return " ".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--cache-type", default="f16")
    parser.add_argument("--rows", default="32,128,250")
    parser.add_argument("--prompts", default="4,8")
    parser.add_argument("--repeats", type=int, default=5)
    flags = parser.parse_args()
    cache = CacheOptions(1024, flags.cache_type, flags.cache_type, sequences=16)
    engine = Engine.open(Path(flags.model), LoadOptions(flags.model, device="cuda"), cache)
    print("| rows of each | prompts | apart, ms | together | times | differ |\n|---:|---:|---:|---:|---:|---:|")
    for rows in map(int, flags.rows.split(",")):
        for prompts in map(int, flags.prompts.split(",")):
            print(compare(engine, rows, prompts, flags.repeats), flush=True)
    for together in (False, True, False, True):
        print(f"steps, {'together' if together else 'apart'}: {steps(engine, together)}", flush=True)


if __name__ == "__main__":
    main()
