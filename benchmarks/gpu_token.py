"""Where the time of a token goes on a CUDA machine: each kernel of its graph, beside what its bytes alone would take.

    python benchmarks/gpu_token.py MODEL                                  # a model's file
    python benchmarks/gpu_token.py MODEL --cases f16:0,f16:8k,int4:32k    # cache type and depth of each table

A kernel's share is from the end of the one before it to its own end, as the profiler (CUPTI) sees them in a replay, the
median of REPLAYS: kernels overlap, so these add up to the token, which lengths, from start to end, do not. "alone" is
how long its bytes take at the speed at which a plain sum reads memory. Below, what a replay takes without the profiler,
and how much less it takes without each kind of kernel. Tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from kvcli import environment

environment.prepare()  # before torch is imported

import torch  # noqa: E402

from kvcli.kernels.gpu.launching import collecting  # noqa: E402
from kvcli.options import CacheOptions, LoadOptions  # noqa: E402
from kvcli.runtime.engine.engine import Engine  # noqa: E402
from kvcli.runtime.engine.graph import tokengraph  # noqa: E402
from kvcli.runtime.engine.graph.capture import captured  # noqa: E402
from kvcli.runtime.engine.graph.nexttoken import NextToken  # noqa: E402

REPLAYS = 9
EACH = 10  # replays of a sample
KINDS = ("matvec", "advance", "prepare", "attend", "combine")  # functions of tokengraph.py


def bandwidth() -> float:
    """Bytes a second of a sum over 4 GiB."""
    x = torch.zeros(1 << 30, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x.sum()
    with torch.cuda.graph(graph):
        x.sum()
    return x.nbytes / timed(graph.replay, 1)


def timed(run: Callable[[], object], each: int = EACH, samples: int = REPLAYS) -> float:
    """Median seconds of a run."""
    times = []
    for _ in range(samples + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(each):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / each / 1e3)
    return statistics.median(times[2:])


class Token:
    """The token behind `depth` rows of an engine, whose graph was captured."""

    def __init__(self, engine: Engine, depth: int) -> None:
        assert isinstance(engine.graph, NextToken)
        self.engine, self.graph, self.depth = engine, engine.graph, max(depth, 1)
        self.seq = engine.new_sequence()
        done, generator = 0, torch.Generator().manual_seed(0)
        while done < self.depth:
            ids = torch.randint(0, 1000, (min(engine.ubatch, self.depth - done),), generator=generator).tolist()
            engine.forward(self.seq, ids)
            done += len(ids)
        self.graph.unbind()
        for _ in range(2):
            self.graph.run(self.seq, 1)
        self.bucket = max(1024, 1 << self.seq.length.bit_length())

    def close(self) -> None:
        self.seq.close()

    def captured(self) -> torch.cuda.CUDAGraph:
        """A graph of its own of what is launched now."""
        with torch.inference_mode():
            return captured(lambda: self.graph.launch(self.bucket), self.graph._legs, self.graph._memory)

    def launches(self) -> list[tuple[str, str, int]]:
        """Kinds, names and bytes of the kernels, in order."""
        found: list[tuple[str, str, int]] = []
        rows = self.seq.length

        def noted(kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def note(*args: Any, **options: Any) -> Any:
                found.append((kind, *named(kind, args, rows)))
                return run(*args, **options)

            return note

        patches: dict[str, Any] = {kind: noted(kind, getattr(tokengraph, kind)) for kind in KINDS}
        with mock.patch.multiple(tokengraph, **patches), collecting(), torch.inference_mode():
            self.graph.launch(self.bucket)
        return found


def named(kind: str, args: tuple[Any, ...], rows: int) -> tuple[str, int]:
    """A kernel's name and what it reads of weights and of the cache."""
    if kind == "matvec":
        m = args[0]
        return f"{m.rows}x{m.cols} {m.nbytes * 8 / m.rows / m.cols:.2f} bits", m.nbytes
    if kind == "attend":
        pages = args[1]
        return kind, rows * pages.record.token_bytes * pages.record.kv_heads
    return kind, 0


@contextmanager
def without(name: str) -> Iterator[None]:
    """Kernels of that name are not launched."""
    patches: dict[str, Any] = {}
    for kind in KINDS:
        run = getattr(tokengraph, kind)

        def some(*args: Any, kind: str = kind, run: Callable[..., Any] = run, **options: Any) -> Any:
            if named(kind, args, 1)[0] != name:
                return run(*args, **options)
            return args[3] if kind == "prepare" else None  # queries

        patches[kind] = some
    with mock.patch.multiple(tokengraph, **patches):
        yield


def traced(graph: torch.cuda.CUDAGraph) -> list[tuple[str, float, float]]:
    """Kernels of one replay: name, beginning and end in us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kernels = [x for x in events if x.get("cat") == "kernel"]
    return sorted(((x["name"], x["ts"], x["ts"] + x["dur"]) for x in kernels), key=lambda x: x[1])


def profile(token: Token, rate: float) -> dict[str, Any]:
    graph, launches = token.captured(), token.launches()
    plain = timed(graph.replay)
    shares: dict[str, list[list[float]]] = defaultdict(list)  # of a name, for each time it comes: of each replay
    lengths: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, int] = {}
    totals = []
    for _ in range(REPLAYS):
        kernels = traced(graph)
        left, last = list(launches), kernels[0][1]
        seen: dict[str, int] = defaultdict(int)
        totals.append(kernels[-1][2] - kernels[0][1])
        for function, start, end in kernels:
            name = function.strip("_").removesuffix("_kernel")
            if left and (left[0][0] == name or name.startswith(left[0][0])):
                _, name, size = left.pop(0)
                sizes[name] = size
            at, seen[name] = seen[name], seen[name] + 1
            if len(shares[name]) <= at:
                shares[name].append([])
            shares[name][at].append(max(0.0, end - last))
            lengths[name].append(end - start)
            last = max(last, end)
    rows: list[dict[str, Any]] = []
    for name, each in shares.items():
        size = sizes.get(name, 0)
        mine = [statistics.median(x) for x in each]
        rows.append({
            "kernel": name, "times": len(each), "us": statistics.mean(mine), "sum_us": sum(mine),
            "length_us": statistics.median(lengths[name]), "MB": size / 1e6, "alone_us": size / rate * 1e6,
        })  # fmt: skip
    print(f"{'kernel':28} {'times':>5} {'us each':>8} {'length':>8} {'MB':>8} {'alone':>7} {'TB/s':>5} {'us all':>8}")
    for x in rows:
        speed = x["MB"] / x["us"] if x["us"] else 0
        print(
            f"{x['kernel'][:28]:28} {x['times']:5} {x['us']:8.2f} {x['length_us']:8.2f} {x['MB']:8.2f}"
            f" {x['alone_us']:7.2f} {speed:5.2f} {x['sum_us']:8.1f}"
        )
    alone = sum(x["alone_us"] * x["times"] for x in rows)
    print(f"traced {statistics.median(totals):.0f} us, replayed {plain * 1e6:.0f} us, bytes alone {alone:.0f} us")
    less = {}
    for name in dict.fromkeys(name for _, name, _ in launches):
        with without(name):
            less[name] = (plain - timed(token.captured().replay)) * 1e6
    print("less without: " + ", ".join(f"{name} {us:.0f}" for name, us in less.items()), flush=True)
    return {"us": plain * 1e6, "alone_us": alone, "traced_us": statistics.median(totals), "kernels": rows, "less": less}


def tokens_of(text: str) -> int:
    return int(text[:-1]) * 1024 if text.endswith("k") else int(text)


def engines(path: Path, cases: list[tuple[str, int]]) -> Iterator[Token]:
    """The token of each case, over the same weights."""
    room = max(depth for _, depth in cases) + 256
    first: Engine | None = None
    for kind in dict.fromkeys(kind for kind, _ in cases):
        cache = CacheOptions(room, kind, kind)
        first = engine = Engine.open(path, LoadOptions(str(path)), cache) if first is None else first.beside(cache)
        for depth in (depth for each, depth in cases if each == kind):
            token = Token(engine, depth)
            yield token
            token.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--cases", default="f16:0,f16:8k,f16:32k,int4:32k")
    options = parser.parse_args()
    pairs = (case.split(":") for case in options.cases.split(","))
    cases = [(kind, tokens_of(depth)) for kind, depth in pairs]
    kinds = [kind for kind, _ in cases]
    cases.sort(key=lambda case: kinds.index(case[0]))  # `engines` opens one for each type
    rate, found = bandwidth(), []
    print(f"{torch.cuda.get_device_name()}: a sum reads {rate / 1e12:.2f} TB/s")
    for (kind, depth), token in zip(cases, engines(options.model, cases), strict=True):
        print(f"\n{kind}, {depth:,} tokens")
        found.append({"type": kind, "depth": depth} | profile(token, rate))
    print(json.dumps({"device": torch.cuda.get_device_name(), "bytes_s": rate, "tokens": found}))


if __name__ == "__main__":
    main()
