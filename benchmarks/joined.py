"""Attention where values are keys (some layers of Gemma 4), stored once and stored apart, in turns.

    python benchmarks/joined.py                                  # on a CPU: 4k and 16k tokens
    python benchmarks/joined.py --device cuda --contexts 8192,32768,131072

One layer of Gemma 4 31B: 32 query heads, four KV heads of 512 dims, of which RoPE turns a quarter. Rows are random;
both forms have the same ones, and what they give is compared. Times are medians of
a token's attention (on a GPU of its kernels, in a CUDA graph), and of 512 rows behind the context with all that a layer
does with its cache. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kvcli.kernels import AttentionLayer, Backend
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import asked_isa
from kvcli.kernels.gpu import combine, latentcombine, latentrows, latents, rows
from kvcli.kernels.gpu.attention import attend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.host.cores import physical_cores
from kvcli.runtime.model.keysasvalues import JoinedRows
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

HEADS, KV_HEADS, DIM, TURNED, PROMPT, STEP = 32, 4, 512, 128, 512, 1024


class Form:
    """A layer and its cache, whose rows are stored once or apart."""

    def __init__(self, ops: Backend, types: str, once: bool) -> None:
        shape = LayerConfig(FULL, KV_HEADS, DIM, DIM, rope=RopeConfig(1e6, DIM), turned=TURNED)
        config = ModelConfig("gemma4", "", 10, 2, 2, HEADS, 1 << 18, 1e-6, (shape,), 1.0)
        layout = KVLayout.build(config, types, types).by_layer(ops.device.type == "cuda")
        self.layout, self.ops, self.once = layout if once else layout.apart(), ops, once
        factors = torch.tensor([1.0] * (TURNED // 2) + [1e30] * ((DIM - TURNED) // 2))
        rope, ones = RopeTable(shape.rope, factors), torch.ones(DIM, device=ops.device)
        weights = torch.linspace(0.5, 1.5, DIM, device=ops.device)
        self.how = AttentionLayer(
            HEADS, 1.0 / 16, rope, q_norm=weights, k_norm=weights, eps=1e-6, v_norm=ones, keys_as_values=True,
            seal=partial(seal_step, ops, rope),
        )  # fmt: skip
        self.joined = JoinedRows.of(self.how, rope, TURNED, weights, ops)
        self.seq = Sequence(PagePool(self.layout, device=ops.device))

    def step(self, qkv: torch.Tensor) -> torch.Tensor:
        """All that the layer does with its cache for new rows, which stay."""
        part = self.seq.reserve([0] * len(qkv))
        found = self.ops.attend(*self._asked(qkv, part.stretch(0, 0, len(qkv))))
        self.seq.commit([0] * len(qkv))
        return found

    def _asked(self, qkv: torch.Tensor, stretch: Any) -> tuple[torch.Tensor, list[Any], AttentionLayer]:
        if self.once:
            return self.joined.rows(self.ops, qkv), [stretch], self.joined.how
        return qkv, [stretch], self.how

    def token(self, qkv: torch.Tensor) -> Callable[[], object]:
        """What a token's attention is, without its projections: the same row again and again."""
        stretch = self.seq.reserve([0]).stretch(0, 0, 1)
        if not isinstance(self.ops, GpuBackend):
            asked = self._asked(qkv, stretch)
            copy = asked[0].clone()
            return lambda: self.ops.attend(copy.clone(), *asked[1:])
        x, _, how = self._asked(qkv, stretch)
        how.seal(stretch.kv, stretch.start, stretch.start + 1)
        if self.once:
            pages = self.ops._pages(stretch, how, None)
            queries = latentrows.prepare(x, how, pages)
            return lambda: latentcombine.combine(latents.attend(queries, pages), pages)
        angles = how.seal(stretch.kv, stretch.start, stretch.start + 1)
        pages = self.ops._pages(stretch, how, angles)
        x = rows.with_values(x, how, KV_HEADS, (DIM, DIM))
        queries = rows.prepare(x, rows.normed_together(x, how, DIM), pages)
        return lambda: combine.combine(attend(queries, pages), pages)


def projections(n: int, seed: int, ops: Backend) -> torch.Tensor:
    return torch.randn(n, (HEADS + KV_HEADS) * DIM, generator=torch.manual_seed(seed)).to(ops.device)


def timed(ops: Backend, calls: list[Callable[[], object]], runs: int) -> list[float]:
    """Median seconds of each call, in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(runs + 1):
        for call, found in zip(calls, times, strict=True):
            if ops.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / 1000)
            else:
                began = time.perf_counter()
                call()
                found.append(time.perf_counter() - began)
    return [statistics.median(found[1:]) for found in times]


def graphed(call: Callable[[], object], times: int = 20) -> Callable[[], object]:
    """So many of them as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def measure(ops: Backend, types: str, context: int, runs: int) -> dict[str, Any]:
    forms = [Form(ops, types, once) for once in (True, False)]
    filled = 0
    while filled < context:  # a step of many rows over few: it need not see what is before it
        n = min(STEP, context - filled)
        qkv = projections(n, filled, ops)
        for form in forms:
            form.step(qkv)
        filled += n
    last = projections(1, 10**6, ops)
    outputs = [form.step(last.clone()) for form in forms]
    difference = float((outputs[0] - outputs[1]).norm() / outputs[1].norm())
    tokens = [form.token(last.clone()) for form in forms]
    repeats = 1
    if ops.device.type == "cuda":
        tokens, repeats = [graphed(each) for each in tokens], 20
    token = [each / repeats for each in timed(ops, tokens, runs)]
    for form in forms:
        form.seq.rewind_to(context // 64 * 64)
    rows_ = projections(PROMPT, 5, ops)

    def prompt(form: Form) -> None:
        form.step(rows_.clone())
        form.seq.rewind_to(context // 64 * 64)

    times = timed(ops, [partial(prompt, form) for form in forms], max(3, runs // 4))
    bytes_ = [form.layout.token_bytes() for form in forms]
    return {"types": types, "context": context, "bytes": bytes_, "token_s": token, "prompt_s": times,
            "difference": difference}  # fmt: skip


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contexts", default="4096,16384")
    parser.add_argument("--types", default="f16,int8")
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--runs", type=int, default=12)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    ops: Backend = GpuBackend(torch.device("cuda")) if cuda else NativeBackend(options.threads, asked_isa())
    print("| type | context | bytes: once, apart | difference | a token, us: once, apart | 512 rows, ms: once, apart |")
    print("|---|---:|---:|---:|---:|---:|")
    found = []
    for types in options.types.split(","):
        for context in map(int, options.contexts.split(",")):
            one = measure(ops, types, context, options.runs)
            found.append(one)
            token, prompt = ([f"{1e6 * x:,.1f}" for x in one["token_s"]], [f"{1e3 * x:,.2f}" for x in one["prompt_s"]])
            print(
                f"| {types} | {context:,} | {one['bytes'][0]:,}, {one['bytes'][1]:,} | {one['difference']:.1e} |"
                f" {', '.join(token)} | {', '.join(prompt)} |",
                flush=True,
            )
    print(json.dumps({"device": torch.cuda.get_device_name() if cuda else ops.name, "measured": found}))


if __name__ == "__main__":
    main()
