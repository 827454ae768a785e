"""Noting the attention mass of prompts on a CUDA machine: right against float64, and what it costs beside attention.

    python benchmarks/gpu_mass.py                 # one layer of an 8B model, f16, int8 and int4, 8k and 32k
    python benchmarks/gpu_mass.py --tiles         # other tiles, too

A prompt comes in steps of STEP tokens, and each is computed with and without noting it, RUNS times in turn. Times are
medians of CUDA events, summed over the steps; `noting` is the difference, and of its kernels a profiler's time. A whole
model is measured by `kv bench -m MODEL -p 8192 -n 0`, with and without `--evict h2o --budget 100%`. A table, then one
JSON line; the exit code is 1 if any number is off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from gpu_attention import HalfCentres, back, filled, layer, on_device, on_gpu

from kvcli.kernels import MASS_UNIT, Angles, AttentionLayer, PagedKV, Stretch, Watch
from kvcli.kernels.gpu.attention import attend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.mass import Tile, add_mass
from kvcli.kernels.gpu.rows import prepare
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.sealing import seal_step

HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 32
STEP, RUNS, LIMIT = 4096, 5, 5e-3
KERNELS = ("_mass", "_stage", "_norms")
TILES = [  # keys, queries, positions, stages, registers
    Tile(*numbers)
    for numbers in (
        (128, 64, 16, 2, 0), (128, 64, 16, 3, 168), (128, 64, 16, 3, 0), (64, 64, 16, 2, 128), (64, 64, 16, 3, 128),
        (64, 128, 32, 2, 168),
    )
]  # fmt: skip


def exact(kv: PagedKV, q: torch.Tensor, start: int, angles: Angles | None) -> torch.Tensor:
    """float64 [kv_heads, n], of q [T, heads, dim_k] whose scores are exponents of 2, over decoded rows."""
    n, found = len(q), []
    for of in kv.classes:
        for at, page in enumerate(of.entries.memory):
            k, _ = of.rows(page, 0, of.record.page_size)
            centre = of.centre(at, angles)
            k = (k if centre is None else k + centre).double().nan_to_num()
            s = torch.einsum("thd,hnd->htn", q.double(), k.repeat_interleave(q.shape[1] // len(k), 0))
            seen = torch.arange(k.shape[1]) < torch.from_numpy(of.entries.shows(range_of(start, n))[:, at : at + 1])
            found.append((int(of.entries.first[at]), s.masked_fill(~seen, -torch.inf).exp2()))
    weights = torch.stack([p.sum(2) for _, p in found]).sum(0)[..., None]
    mass = torch.zeros(kv.record.kv_heads, max(first for first, _ in found) + kv.record.page_size, dtype=torch.float64)
    for first, p in found:
        mass[:, first : first + p.shape[2]] += (p / weights).sum(1).unflatten(0, (len(mass), -1)).sum(1)
    return mass


def range_of(start: int, n: int) -> Any:
    return torch.arange(start, start + n).numpy()


def check(kind: str, rows: int = 900, last: int = 700) -> float:
    """The relative error of the mass of the last rows."""
    rope = HalfCentres(RopeConfig(10000.0, DIM))
    kv, angles = filled(layer((kind, kind), (DIM, DIM), KV_HEADS), rows, last, rope)
    there, start = on_gpu(kv), rows - last
    pages = on_device(there, angles, start, last, HEADS)
    qkv = 2 * torch.randn(last, (HEADS + 2 * KV_HEADS) * DIM, generator=torch.manual_seed(2))
    queries = prepare(qkv.cuda(), AttentionLayer(HEADS, DIM**-0.5, rope), pages)
    back(kv, there)
    expected = exact(kv, queries.q.cpu(), start, angles)
    found = torch.zeros(expected.shape, dtype=torch.int64, device="cuda")
    add_mass(queries, there, pages, attend(queries, pages), Watch(0, found), start, 0, 0.0, None)
    return float((found.cpu().double() / MASS_UNIT - expected).norm() / expected.norm())


class Prompt:
    """One layer of a prompt that is computed in steps; `tile`: None = as it is launched."""

    def __init__(self, kind: str, tokens: int, tile: Tile | None) -> None:
        self.ops = GpuBackend(torch.device("cuda"))
        rope = HalfCentres(RopeConfig(10000.0, DIM))
        self.layer = AttentionLayer(HEADS, DIM**-0.5, rope, seal=partial(seal_step, self.ops, rope))
        self.sequence = Sequence(PagePool(layer((kind, kind), (DIM, DIM), KV_HEADS).by_layer(True), device="cuda"))
        self.tokens, self.tile = tokens, tile
        self.mass = torch.zeros(KV_HEADS, tokens, dtype=torch.int64, device="cuda")
        self.qkv = torch.randn(STEP, (HEADS + 2 * KV_HEADS) * DIM, device="cuda")

    def attend(self, part: Stretch, noted: bool) -> None:
        self.ops.attend(self.qkv, [part._replace(watch=Watch(0, self.mass) if noted else None)], self.layer)

    def ms(self, part: Stretch, noted: bool) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        self.attend(part, noted)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def run(self) -> dict[str, float]:
        """Milliseconds of the layer, of attention, of attention with noting, and of each kernel of this."""
        found = defaultdict[str, float](float)
        chosen = mock.patch.object(Tile, "of", lambda *_: self.tile) if self.tile else nullcontext()
        with torch.inference_mode(), chosen:
            for _ in range(0, self.tokens, STEP):
                step = self.sequence.reserve([0] * STEP)
                part = step.stretch(0, 0, STEP)
                for noted in (False, True, False, True):
                    self.attend(part, noted)
                pairs = [(self.ms(part, False), self.ms(part, True)) for _ in range(RUNS)]
                plain, noting = (statistics.median(x) for x in zip(*pairs, strict=True))
                found["attention"] += plain
                found["both"] += noting
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    self.attend(part, True)
                    torch.cuda.synchronize()
                for event in profile.key_averages():
                    if event.key in KERNELS:
                        found[event.key] += event.self_device_time_total / 1000
                self.sequence.commit([0] * STEP)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--types", default="f16,int8,int4")
    parser.add_argument("--tokens", default="8192,32768")
    options = parser.parse_args()
    kinds = options.types.split(",")
    errors = {kind: check(kind) for kind in kinds}
    print("error: " + ", ".join(f"{kind} {error:.1e}" for kind, error in errors.items()), flush=True)
    print(f"{'tokens':>7} {'cache':5} attention noting ms  x {LAYERS}: {'':12} {'  '.join(KERNELS)}  tile")
    rows: list[dict[str, object]] = []
    for tokens in map(int, options.tokens.split(",")):
        for kind in kinds:
            for tile in (None, *TILES) if options.tiles else (None,):
                found = Prompt(kind, tokens, tile).run()
                noting, each = found["both"] - found["attention"], [found[name] for name in KERNELS]
                rows.append({"tokens": tokens, "cache": kind, "tile": str(tile), "noting": noting, **found})
                times = f"{found['attention']:9.3f} {noting:9.3f}"
                whole = f"{LAYERS * found['attention']:9.1f} {LAYERS * noting:9.1f}"
                kernels = " ".join(f"{x:6.3f}" for x in each)
                print(f"{tokens:7} {kind:5} {times}  {whole}  {kernels}  {tile or 'usual'}", flush=True)
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "triton": triton.__version__, "errors": errors, "prompts": rows}))
    sys.exit(any(not error < LIMIT for error in errors.values()))


if __name__ == "__main__":
    main()
