"""What `--attend pages:K`, and noting what rows get of queries, cost a token on a CUDA machine, whole and by kernel.

    python benchmarks/gpu_choosing.py MODEL.gguf                        # f16, int8, int4 at 32k and 120k
    python benchmarks/gpu_choosing.py MODEL.gguf --types f16 --tokens 32768
    python benchmarks/gpu_choosing.py MODEL.gguf --noting               # as --evict h2o does, at 8k

K is a quarter of all pages. Beside it stands a context a quarter as long of which everything is read; `speed` is its
time over that of `pages:K`. Microseconds a layer are those that a profiler sees, in which kernels that are launched
ahead also wait, with those of the quarter in parentheses. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvcli import environment

environment.prepare()  # before torch is imported

import torch  # noqa: E402

from kvcli.kernels.gpu import attention, combine, noting, picking, rows  # noqa: E402
from kvcli.options import AttendOptions, CacheOptions, EvictOptions, LoadOptions  # noqa: E402
from kvcli.runtime.engine.engine import Engine  # noqa: E402
from kvcli.runtime.engine.loaded import LoadedModel  # noqa: E402
from kvcli.runtime.engine.opened import Opened  # noqa: E402

TOKENS, REPEATS = 40, 5
READING = {"attention": (attention._attend,), "merging": (combine._combine,)}
CHOOSING = {"queries": (rows._prepare, picking._prepare_and_pick), **READING}
NOTING = {**READING, "noting": (noting._note,)}


def token_ms(engine: Engine, length: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a token behind `length` rows, and microseconds of a layer by kernel."""
    seq, graph = engine.new_sequence(), engine.graph
    assert graph is not None
    if seq.selector:
        seq.selector.expect(length)
    ids = torch.randint(5, 30000, (length,), generator=torch.manual_seed(1)).tolist()
    for start, end in engine.chunks(0, length):
        engine.forward(seq, ids[start:end])
    graph.unbind()
    if seq.selector:
        assert seq.selector.notes(length + 1)

    def some(n: int) -> None:
        for i in range(n):
            graph.run(seq, 7 + i)
        torch.cuda.synchronize()

    some(3)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        some(TOKENS)
        times.append((time.perf_counter() - began) * 1000 / TOKENS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        some(4)
    layers, found = engine.config.n_layers, defaultdict[str, float](float)
    for event in profile.key_averages():
        found[event.key] += event.self_device_time_total / 4 / layers
    seq.close()
    return statistics.median(times), dict(found)


def us_of(kernels: tuple[Any, ...], found: dict[str, float]) -> float:
    return sum(found.get(kernel.__name__, 0.0) for kernel in kernels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--types", default="f16,int8,int4")
    parser.add_argument("--tokens")
    parser.add_argument("--noting", action="store_true")
    options = parser.parse_args()
    load, table = LoadOptions(str(options.model)), []
    loaded, noting = None, options.noting
    (one, other_one), kernels = (("noted", "not") if noting else ("pages:K", "quarter")), NOTING if noting else CHOOSING
    print(f"{'tokens':>7} {'cache':5} {one:>8} {other_one:>8} {'speed':>6}  us a layer")
    for tokens in map(int, (options.tokens or ("8192" if noting else "32768,122880")).split(",")):
        for kind in options.types.split(","):
            found = []
            all_stay = EvictOptions("h2o", budget="100%")
            pages = AttendOptions(pages=tokens // 256)
            more: dict[str, Any] = {"evict": all_stay} if noting else {"attend": pages}
            for length, asked in ((tokens, more), (tokens if noting else tokens // 4, {})):
                cache = CacheOptions(length + 1024, kind, kind, **asked)
                if loaded is None:
                    loaded = LoadedModel(Opened(options.model, load), load, cache)
                    engine = Engine(loaded)
                else:
                    engine = Engine(loaded, loaded.terms.under(cache))
                found.append(token_ms(engine, length))
                del engine
                torch.cuda.empty_cache()
            (chosen, by_kernel), (whole, other) = found
            each, of_other = ({n: round(us, 1) for n, us in x.items() if us > 0.5} for x in (by_kernel, other))
            row = {"tokens": tokens, "cache": kind, one: chosen, other_one: whole, "speed": whole / chosen}
            table.append({**row, "us": each, "us of the other": of_other})
            few = " ".join(f"{n} {us_of(k, each):.1f} ({us_of(k, of_other):.1f})" for n, k in kernels.items())
            print(f"{tokens:7} {kind:5} {chosen:8.3f} {whole:8.3f} {whole / chosen:6.2f}  {few}", flush=True)
    print(json.dumps({"device": torch.cuda.get_device_name(), "rows": table}))


if __name__ == "__main__":
    main()
