"""Attention over latents on a CUDA machine, in DeepSeek V2 Lite's shape: a token beside its bytes, and where making
keys and values of latents ("un-absorbed") is worth it.

    python benchmarks/latents.py                                 # both; some 30 s
    python benchmarks/latents.py --tokens 4096,32768             # a token alone, behind so many
    python benchmarks/latents.py --rows 128,512,4096 --past 0,32768 --types int8
    python benchmarks/latents.py --model lite.gguf               # steps of a whole model, as graphs and without

A token: attention and merging by a CUDA graph that goes through layers until 400 MB were read; beside it `torch.sum`
over as many bytes, in a graph, too. Rows: all that a layer does from queries before they are absorbed to what heads
give, absorbed and un-absorbed, five calls one after the other ("with launches") and as a graph ("alone"). A model:
steps that are graphs, which absorb; and such as the host launches, absorbed and un-absorbed. Times are medians, all in
turns. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvcli.kernels import AttentionLayer, ExpertMatrices, ExpertTensor
from kvcli.kernels.gpu import latentcombine, latentpast, latentrows, latents
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import LATENT, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

HEADS, TURNED, PLAIN, DIM_V, RANK = 16, 64, 128, 128, 512
STEP, EACH, BYTES = 4096, 5, 400 << 20
NEVER = 1 << 62


class Layers:
    """Some layers and one sequence, whose rows are random."""

    def __init__(self, ops: GpuBackend, types: str, count: int) -> None:
        shape = LayerConfig(LATENT, 1, TURNED, RANK, rope=RopeConfig(1e4, TURNED))
        config = ModelConfig("deepseek2", "", 10, 2, 2, HEADS, 1 << 18, 1e-6, (shape,) * count, 1.0)
        self.layout = KVLayout.build(config, types, types).by_layer(True)
        self.ops, self.count, self.seq = ops, count, Sequence(PagePool(self.layout, device=ops.device))
        rope = RopeTable(RopeConfig(1e4, TURNED))
        norm = torch.linspace(0.5, 1.5, RANK, device=ops.device)
        scale, seal = (TURNED + PLAIN) ** -0.5, partial(seal_step, ops, rope)
        self.how = AttentionLayer(HEADS, scale, rope, eps=1e-6, v_norm=norm, seal=seal)
        self.random = torch.Generator(ops.device).manual_seed(1)
        self.matrices = [self._placed(RANK, PLAIN), self._placed(DIM_V, RANK)]

    def _placed(self, rows: int, cols: int) -> torch.Tensor:
        x = torch.randn(HEADS, rows, cols, generator=torch.manual_seed(rows)) * cols**-0.5
        return self.ops.place_heads(
            ExpertMatrices((ExpertTensor("F32", x.view(torch.uint8).view(HEADS, rows, -1), cols),))
        )

    def given(self, n: int) -> list[torch.Tensor]:
        """Queries that RoPE turns, the others, and rows."""
        shapes = (n, HEADS, TURNED), (n, HEADS, PLAIN), (n, TURNED + RANK)
        return [torch.randn(shape, generator=self.random, device=self.ops.device) for shape in shapes]

    def fill(self, rows: int) -> None:
        """So many rows in all."""
        while self.seq.length < rows:
            n = min(STEP, rows - self.seq.length)
            part, given = self.seq.reserve([0] * n), self.given(n)
            for i in range(self.count):
                self.ops.attend_latents(*given, [part.stretch(i, 0, n)], self.how, *self.matrices)
            self.seq.commit([0] * n)

    def rows(self, n: int) -> tuple[Callable[[], torch.Tensor], dict[object, object]]:
        """A step of n rows of the first layer, which can be computed again and again; and where its lists are kept."""
        stretch, given = self.seq.reserve([0] * n).stretch(0, 0, n), self.given(n)
        return lambda: self.ops.attend_latents(*given, [stretch], self.how, *self.matrices), stretch.kv.entries.made

    def token(self) -> list[Callable[[], object]]:
        """A token's attention and its merging in each layer."""
        part, found = self.seq.reserve([0]), list[Callable[[], object]]()
        qkv = torch.randn(1, HEADS * (TURNED + RANK) + TURNED + RANK, generator=self.random, device=self.ops.device)
        for i in range(self.count):
            stretch = part.stretch(i, 0, 1)
            self.how.seal(stretch.kv, stretch.start, stretch.start + 1)
            pages = self.ops._pages(stretch, self.how, None)
            queries = latentrows.prepare(qkv, self.how, pages)
            found.append(partial(_attended, queries, pages))
        return found


def _attended(queries: Any, pages: Any) -> None:
    latentcombine.combine(latents.attend(queries, pages), pages)


def graphed(calls: list[Callable[[], object]]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def timed(calls: list[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each, in turns, the first one left out."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):
        for call, found in zip(calls, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000)
    return [statistics.median(found[1:]) for found in times]


@contextmanager
def absorbing(always: bool) -> Iterator[None]:
    """Steps absorb whatever they are, or make keys and values of latents wherever they can."""
    limits = dict.fromkeys(("LEAST_QUERIES", "MANY", "WORTH"), NEVER if always else 1)
    with mock.patch.multiple(latentpast, **limits):
        yield


def called(always: bool, call: Callable[[], object], times: int = 1) -> None:
    with absorbing(always):
        for _ in range(times):
            call()


def tokens(ops: GpuBackend, types: str, context: int, runs: int) -> dict[str, Any]:
    """Seconds of a token's attention in a layer, and of reading as many bytes."""
    bytes_ = Layers(ops, types, 1).layout.token_bytes() * context
    layers = Layers(ops, types, -(-BYTES // bytes_))
    layers.fill(context)
    values = [torch.ones(bytes_ // 4, device=ops.device) for _ in range(layers.count)]
    sums: list[Callable[[], object]] = [partial(torch.sum, x) for x in values]
    both = timed([graphed(layers.token()), graphed(sums)], runs)
    token, read = (each / layers.count for each in both)
    return {"types": types, "context": context, "bytes": bytes_, "token_s": token, "sum_s": read}


def steps(ops: GpuBackend, types: str, past: int, counts: list[int], runs: int) -> list[dict[str, Any]]:
    """Seconds of a layer's steps of so many rows behind `past`, absorbed and un-absorbed: with launches, and alone."""
    layers, found = Layers(ops, types, 1), []
    layers.fill(past)
    for n in counts:
        call, made = layers.rows(n)
        ways = [partial(called, always, call, EACH) for always in (True, False)]
        with absorbing(True):
            expected = call().float()
        with absorbing(False):
            difference = float((call().float() - expected).norm() / expected.norm())
        launched, graphs, kept = [each / EACH for each in timed(list(ways), runs)], [], []
        for always in (True, False):
            graphs.append(graphed([partial(called, always, call)]))
            kept.append(dict(made))  # the lists that this graph reads
        alone = timed(graphs, runs)
        found.append({"types": types, "past": past, "rows": n, "launched_s": launched, "alone_s": alone,
                      "difference": difference})  # fmt: skip
    return found


def whole(path: str, types: str, past: int, counts: list[int], runs: int) -> list[dict[str, Any]]:
    """Seconds of a model's steps of so many rows behind `past`: as graphs, and launched, absorbed and un-absorbed."""
    engine = Engine.open(Path(path), LoadOptions(path), CacheOptions(past + 2 * max(counts), types, types))
    seq, found = engine.new_sequence(), []
    while seq.length < past:
        engine.forward(seq, [7] * min(STEP, past - seq.length))

    def step(n: int, graph: bool, always: bool) -> None:
        steps = engine.steps
        engine.steps = steps if graph else None
        with absorbing(always):
            engine.forward(seq, list(range(n)))
        engine.steps = steps
        seq.rewind_to(past)

    for n in counts:
        ways = [partial(step, n, *way) for way in ((True, True), (False, True), (False, False))]
        found.append({"types": types, "past": past, "rows": n, "step_s": timed(list(ways), runs)})
    return found


def numbers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=numbers, help="contexts of a token")
    parser.add_argument("--rows", type=numbers, help="of steps")
    parser.add_argument("--past", type=numbers, default=[0, 4096, 32768], help="rows before them")
    parser.add_argument("--types", default="f16,int8")
    parser.add_argument("--model", help="a file whose whole steps are measured, of --rows up to 1,024")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    if options.tokens is options.rows is options.model is None:
        options.tokens, options.rows = [4096, 32768, 131072], [16, 64, 128, 256, 512, 1024, 2048, 4096]
    return options


@torch.inference_mode()
def main() -> None:
    options, ops = asked(), GpuBackend(torch.device("cuda"))
    types = options.types.split(",")
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "tokens": [], "steps": [], "whole": []}
    if options.tokens:
        print("| type | context | MB | attention, us | torch.sum, us | ratio |\n|---|---:|---:|---:|---:|---:|")
    for kind in types if options.tokens else ():
        for context in options.tokens:
            x = tokens(ops, kind, context, options.runs)
            found["tokens"].append(x)
            a, b, size = 1e6 * x["token_s"], 1e6 * x["sum_s"], x["bytes"] / 1e6
            print(f"| {kind} | {context:,} | {size:.1f} | {a:.1f} | {b:.1f} | {a / b:.2f} |", flush=True)
    if options.rows and not options.model:
        print(
            "\n| type | before | rows | launched, us: absorbed, not | alone, us: absorbed, not | ratios | difference |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for kind in types:
            for past in options.past:
                for x in steps(ops, kind, past, options.rows, options.runs):
                    found["steps"].append(x)
                    print(_line(x), flush=True)
    if options.model:
        print("\n| type | before | rows | ms: graph, launched absorbed, launched not |\n|---|---:|---:|---:|")
        for kind in types:
            for past in options.past:
                for x in whole(options.model, kind, past, options.rows or [128, 256, 512, 1024], options.runs):
                    found["whole"].append(x)
                    times = ", ".join(f"{1e3 * t:.2f}" for t in x["step_s"])
                    print(f"| {kind} | {past:,} | {x['rows']:,} | {times} |", flush=True)
    print(json.dumps(found))


def _line(x: dict[str, Any]) -> str:
    launched, alone = ([f"{1e6 * t:,.0f}" for t in x[key]] for key in ("launched_s", "alone_s"))
    ratios = ", ".join(f"{x[key][1] / x[key][0]:.2f}" for key in ("launched_s", "alone_s"))
    return (f"| {x['types']} | {x['past']:,} | {x['rows']:,} | {', '.join(launched)} | {', '.join(alone)} | {ratios} |"
            f" {x['difference']:.1e} |")  # fmt: skip


if __name__ == "__main__":
    main()
