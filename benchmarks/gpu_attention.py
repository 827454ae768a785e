"""Attention kernels on a CUDA machine: checked against float64, then timed.

    python benchmarks/gpu_attention.py [--check] [--time] [--sweep] [--workers 8]

`--check`: every cache type and head dim, one query and a block of queries, against float64 over the decoded rows.
`--time`: attention and merging by replays of a CUDA graph that goes through at least 400 MB of pages, for 8 KV heads of
4 queries each, head dim 128; `--sweep` tries tilings and splits, else those of the table in attention.py are taken.
Without either flag both are done. Prints tables, and one JSON line last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from kvcli.codecs import CODECS, RecordLayout
from kvcli.kernels import Angles, AttentionLayer, Entries, Into, PagedKV
from kvcli.kernels.gpu.attention import Partials, Tiling, attend, block_rows, part_count, tiling
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.combine import MOST_PARTS, combine
from kvcli.kernels.gpu.language import AFTER
from kvcli.kernels.gpu.pages import Asked, DevicePages, device_pages, half_angles, page_lists
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.rows import LOG2_E, Queries, prepare
from kvcli.kernels.gpu.seal import seal
from kvcli.kernels.gpu.seal import seal_step as seal_page
from kvcli.kernels.gpu.shares import FAR
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.kernels.reference.rotation import rotate
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig, RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

TYPES = (
    *((name, name) for name in CODECS), ("int8", "int4"), ("int4", "int8"), ("f16", "int4"), ("fp8", "int6"),
    ("int5", "int4"), ("int8", "int5"),
)  # fmt: skip
DIMS = ((64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 192), (256, 256), (192, 128))
TIMED = ("f16", "bf16", "fp8", "int8", "int6", "int5", "int4")
LIMIT = 2e-3
OPS = ReferenceBackend()


def layer(types: tuple[str, str], dims: tuple[int, int], kv_heads: int) -> KVLayout:
    config = LayerConfig(FULL, kv_heads, *dims, 0, RopeConfig(10000.0, dims[0] - dims[0] % 4))
    return KVLayout.build(ModelConfig("llama", "", 10, 2, 2, 1, 4096, 1e-5, (config,), 1.0), *types, 64)


def on_gpu(kv: PagedKV) -> PagedKV:
    """The same pages in device memory, each once."""
    made: dict[int, torch.Tensor] = {}

    def moved(of: Entries | Into) -> dict[str, Any]:
        pages = [None if p is None else made.setdefault(p.data_ptr(), p.cuda()) for p in of.memory]
        return {"addresses": np.array([0 if p is None else p.data_ptr() for p in pages], np.int64), "memory": pages}

    entries, into = replace(kv.entries, made={}, **moved(kv.entries)), replace(kv.into, **moved(kv.into))
    opened = on_gpu(kv.open) if kv.open else None
    return replace(kv, entries=entries, into=into, open=opened, descriptors={})


def on_device(
    kv: PagedKV, angles: Angles | None, start: int, rows: int = 1, heads: int = 0, splits: int = 1
) -> DevicePages:
    """Pages in device memory as the kernels want them, for a step of these rows."""
    block, _ = block_rows(kv.record, heads or kv.record.kv_heads, rows, Chip.of(torch.device("cuda")))
    parts = part_count(splits, kv.open is not None, False) if rows == 1 else 0
    lists = page_lists(kv, None, Asked(start, rows, block, parts=parts), "cuda")
    return device_pages(kv, lists, "cuda", None if angles is None else half_angles(angles, "cuda"))


def filled(where: KVLayout, rows: int, last: int, rope: RopeTable) -> tuple[PagedKV, Angles | None]:
    """Rows with a mean, stored and sealed by the reference, the `last` ones as a step of their own; and the angles."""
    group, pool = where.groups[0], PagePool(where)
    sequence, generator = Sequence(pool), torch.manual_seed(rows)
    angles = None
    for n in (rows - last, last):
        part = sequence.reserve([0] * n)
        kv = part.kv(0)
        k = torch.randn(n, group.kv_heads, group.dim_k, generator=generator)
        k = k + 2 * torch.randn(group.dim_k, generator=torch.manual_seed(1))
        v = torch.randn(n, group.kv_heads, group.dim_v, generator=generator)
        for x, rotated in zip((k, v), kv.rotated, strict=True):
            if rotated:
                OPS.rotate_(x)
        OPS.store(k, v, kv, part.start)
        angles = seal_step(OPS, rope, kv, part.start, part.start + n)
        sequence.commit([0] * n)
    return kv, angles


def dense(kv: PagedKV, q: torch.Tensor, start: int, angles: Angles | None) -> torch.Tensor:
    """float64 [T, heads, dim_v] of queries at start.. in one page, over the decoded rows."""
    group, pages = q.shape[1] // kv.record.kv_heads, []
    for each in kv.classes:
        for at, n in enumerate(each.entries.shows(np.array([start + len(q) - 1]))[0].tolist()):
            k, v = each.rows(each.entries.memory[at], 0, n)
            centre = each.centre(at, angles)
            if n:
                k = k.double() if centre is None else k.double() + centre[:, :n].double()
                pages.append((int(each.entries.first[at]), k, v.double()))
    _, keys, values = zip(*sorted(pages, key=lambda page: page[0]), strict=True)
    k, v = (torch.cat(x, 1).repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("thd,hnd->thn", q.double(), k) * q.shape[-1] ** -0.5
    unseen = torch.arange(k.shape[1])[None, :] > start + torch.arange(len(q))[:, None]
    return torch.einsum("thn,hnd->thd", scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1), v)


class HalfCentres(RopeTable):
    """Angles of the mean as the kernels have them."""

    def centres(self, kv: PagedKV) -> Angles:
        cos, sin = super().centres(kv)
        return cos.half().float(), sin.half().float()


def check(case: tuple[tuple[str, str], tuple[int, int]]) -> list[tuple[str, float]]:
    """What is checked of one cache type and head dim, and the relative error (or, of seals, the bytes that differ)."""
    torch.set_num_threads(1)
    (types, dims), kv_heads, heads, found = case, 2, 8, []
    where = layer(types, dims, kv_heads)
    rope = HalfCentres(RopeConfig(10000.0, dims[0] - dims[0] % 4))
    for rows, t, splits in ((1517, 1, 5), (1517, 1, 40), (300, 40, 1)):
        kv, angles = filled(where, rows, t, rope)
        there = on_gpu(kv)
        pages = on_device(there, angles, rows - t, t, heads, splits)
        width = (heads + kv_heads) * dims[0] + kv_heads * dims[1]
        qkv = torch.randn(t, width, generator=torch.manual_seed(2))
        queries = prepare(qkv.cuda(), AttentionLayer(heads, dims[0] ** -0.5, rope), pages)
        back(kv, there)
        q = qkv[:, : heads * dims[0]].unflatten(1, (heads, -1)).clone()
        OPS.rope_(q, *rope.at(rows - t, t))
        q = rotate(q) if pages.rotated[0] else q
        if (rows - t) // 64 == (rows - 1) // 64:
            expected = dense(kv, q, rows - t, angles)
        else:
            parts = [dense(kv, q[i : i + 1], rows - t + i, angles) for i in range(t)]
            expected = torch.cat(parts)
        if pages.rotated[1]:
            expected = rotate(expected.float()).double()
        got = combine(attend(queries, pages), pages)
        assert got is not None
        difference = got.cpu().double() - expected.flatten(1)
        found.append((f"T={t} splits={splits}", (difference.norm() / expected.norm()).item()))
    if kv.open is not None:
        found.append(("seal", check_seal(where, rope)))
    return found


def check_seal(where: KVLayout, rope: RopeTable) -> float:
    """The share of bytes that differ from those of the reference: sums are made in another order."""
    group, generator = where.groups[0], torch.manual_seed(3)
    kv = Sequence(PagePool(where)).reserve([0] * 256).kv(0)
    k = torch.randn(256, group.kv_heads, group.dim_k, generator=generator) + 1
    OPS.store(k, torch.randn(256, group.kv_heads, group.dim_v, generator=generator), kv, 0)
    angles = seal_step(OPS, rope, kv, 0, 256)
    there = on_gpu(kv)
    for page in there.into.memory:
        if page is not None:
            page.fill_(0xA5)
    seal(on_device(there, angles, 0, 256), 64, 256)
    pairs = [(a, b) for a, b in zip(kv.into.memory, there.into.memory, strict=True) if a is not None and b is not None]
    used = group.page_size * group.record.token_bytes
    heads = [(x.view(group.kv_heads, -1)[:, :used] for x in (a, b.cpu())) for a, b in pairs]
    return max(float((a != b).float().mean()) for a, b in heads)


def back(kv: PagedKV, there: PagedKV) -> None:
    for mine, its in zip(kv.classes, there.classes, strict=True):
        for a, b in zip(mine.into.memory, its.into.memory, strict=True):
            if a is not None and b is not None:
                a.copy_(b)


def check_all(workers: int) -> dict[str, float]:
    cases = list(itertools.product(TYPES, DIMS))
    worst: dict[str, float] = {}
    print("| types | dims | worst error | differing bytes of seals |\n|---|---|---:|---:|")
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        for (types, dims), found in zip(cases, pool.map(check, cases), strict=True):
            name = "/".join(types)
            error = max((e if e == e else float("inf")) for what, e in found if what != "seal")
            seals = max((e for what, e in found if what == "seal"), default=0.0)
            flag = "" if error < LIMIT and seals < 0.01 else "  <-- " + repr(found)
            print(f"| {name} | {dims[0]}/{dims[1]} | {error:.1e} | {seals:.1e} |{flag}", flush=True)
            worst[name] = max(worst.get(name, 0.0), error)
    return worst


def arena(group: GroupLayout, pages: int) -> torch.Tensor:
    """uint8 [pages, page_bytes] with finite numbers everywhere."""
    r = group.record
    memory = torch.randint(0, 256, (pages, group.page_bytes), dtype=torch.uint8, device="cuda")
    records = memory.view(pages * r.kv_heads, r.record_bytes)
    for codec, at, n in ((r.codec_k, 0, r.k_row_bytes), (r.codec_v, r.v_offset, r.v_row_bytes)):
        rows = records[:, at : at + r.page_size * n]
        if codec.bits == 16:
            kind = torch.float16 if codec.name == "f16" else torch.bfloat16
            for some in rows.split(4096):
                some.copy_(torch.randn(len(some), r.page_size * n // 2, device="cuda", dtype=kind).view(torch.uint8))
    for at in (r.k_scales, r.v_scales):
        if at:
            scales = torch.full((2 * r.page_size,), 0.01, device="cuda").half()[: r.page_size]
            records[:, at : at + 2 * r.page_size] = scales.view(torch.uint8)
    return memory


class Timed:
    """One cache type at one context: as many caches as make 400 MB, in shuffled pages, read one after the other."""

    def __init__(self, kind: str, context: int, dim: int = 128, kv_heads: int = 8, group: int = 4) -> None:
        self.layout = layer((kind, kind), (dim, dim), kv_heads).groups[0]
        self.context, self.heads = context, kv_heads * group
        r, n = self.layout.record, -(-context // 64)
        self.bytes = context * kv_heads * r.token_bytes
        count = max(2, -(-400_000_000 // (n * self.layout.page_bytes)))
        self.memory = arena(self.layout, count * n)
        order = torch.randperm(count * n, device="cuda").view(count, n) * self.layout.page_bytes
        opened = self.layout.open_class
        self.open_memory = arena(opened, count * 2) if opened else None
        centred = self.layout.codec_k.centred
        ones = torch.ones(kv_heads, device="cuda")
        self.start = context - 2  # its page is not full
        self.pages = []
        for i in range(count):
            sealed, opened_kv = order[i].cpu().numpy() + self.memory.data_ptr(), None
            if opened is not None and self.open_memory is not None:
                first = self.open_memory.data_ptr() + 2 * i * opened.page_bytes
                opened_kv = self.kv(opened.record, np.array([first, first + opened.page_bytes]), np.array([0, n - 1]))
                sealed = sealed[1:]
            kv = replace(self.kv(r, sealed, np.arange(n - len(sealed), n)), open=opened_kv)
            lists = page_lists(kv, None, Asked(self.start), "cuda")
            angles = torch.rand((len(sealed) + 1) * 4, dim, device="cuda").half() if centred else None
            centre = torch.randn(kv_heads, dim, device="cuda") if centred else None
            two = DevicePages(opened.record, lists) if opened else None
            self.pages.append((kv, DevicePages(r, lists, 0, two, centre, ones, ones, angles)))
        q = torch.randn(1, self.heads, dim, device="cuda") * LOG2_E * dim**-0.5
        self.queries = Queries(q.half(), q.half(), torch.zeros(1, self.heads, device="cuda"))
        self.output = Activations.empty(self.heads * dim, False, torch.device("cuda"))

    @staticmethod
    def kv(record: RecordLayout, addresses: np.ndarray, numbers: np.ndarray) -> PagedKV:
        """Pages with these numbers, of which the last one is written into. Of those that are sealed it is not seen."""
        nothing: list[torch.Tensor | None] = [None] * len(addresses)
        size, last, zeros = record.page_size, int(numbers[-1]) * record.page_size, np.zeros_like(numbers)
        since = (numbers + 1) * size * record.codec_k.sealed
        entries = Entries(addresses, numbers * size, zeros, zeros + size, since, zeros + FAR, zeros, nothing)
        return PagedKV(record, entries, Into(last, addresses[-1:], nothing[-1:]))

    def at(self, start: int, parts: int) -> list[DevicePages]:
        """The pages for the row at `start`."""
        found = []
        for kv, pages in self.pages:
            lists = page_lists(kv, None, Asked(start, parts=parts), "cuda")
            two = replace(pages.open, lists=lists) if pages.open else None
            found.append(replace(pages, lists=lists, open=two))
        return found

    def parts(self, splits: int) -> int:
        return part_count(splits, self.layout.sealed, False)

    def run(self, splits: int, tiles: Tiling | None = None, merge: bool = True, pdl: int = AFTER) -> float:
        """us a layer."""
        pages = self.at(self.start, self.parts(splits))
        partials = Partials.empty(1, self.heads, pages[0], self.parts(splits))

        def one(i: int) -> None:
            attend(self.queries, pages[i], 0, 0.0, partials, pdl, tiles)
            if merge:
                combine(partials, pages[i], self.output, pdl)

        return replayed(one, len(pages))

    def sealed(self) -> float:
        """us of sealing a page."""
        if not self.layout.sealed:
            return 0.0
        pages = self.at(self.start + 1, 0)
        return replayed(lambda i: seal_page(pages[i], True), len(pages))

    def prepared(self) -> float:
        """us of `prepare` alone."""
        r = self.layout.record
        qkv = torch.randn(1, (self.heads + r.kv_heads) * r.dim_k + r.kv_heads * r.dim_v, device="cuda")
        layer, pages = AttentionLayer(self.heads, 1.0, RopeTable(RopeConfig(10000.0, r.dim_k))), self.at(self.start, 0)
        return replayed(lambda i: prepare(qkv, layer, pages[i], self.queries, True), len(pages))


def replayed(one: Callable[[int], object], n: int, samples: int = 9) -> float:
    """Median us of one call, in a graph of about 60 calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        one(0)
    torch.cuda.synchronize()
    graph, rounds = torch.cuda.CUDAGraph(), max(1, 60 // n)
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for i in range(n):
                one(i)
    times = []
    for _ in range(samples + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (rounds * n))
    return statistics.median(times[2:])


def tilings(kind: str) -> list[Tiling | None]:
    """What a sweep tries besides the table."""
    given = tiling(CODECS[kind], CODECS[kind], 128, True)
    tried = [given]
    for rows, warps, stages in itertools.product((32, 64, 128), (1, 2, 4), (2, 3, 4)):
        codes = CODECS[kind].bits <= 8
        if (warps == 1 and not codes) or (rows == 128 and not (codes and warps <= 2)):
            continue
        tried.append(Tiling(rows, warps, stages, 16 if warps == 1 else 32, left=codes and warps <= 2))
    return list(dict.fromkeys(tried))


def time_all(sweep: bool, kinds: list[str], contexts: list[int]) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    print("| type | context | us attend + combine | GB/s | splits | tiling |\n|---|---:|---:|---:|---:|---|")
    for kind, context in itertools.product(kinds, contexts):
        case = Timed(kind, context)
        best: tuple[float, int, Tiling | None] | None = None
        for tiles in tilings(kind) if sweep else [None]:
            for splits in (1, 2, 4, 8, 16) if context <= 1024 else (16, 32, 33, 64, 66, 99, 132):
                if case.parts(splits) > MOST_PARTS:
                    continue
                try:
                    us = case.run(splits, tiles)
                except Exception as e:
                    print(f"# {kind} {context} {tiles} {splits}: {type(e).__name__} {str(e)[:100]}")
                    break
                if best is None or us < best[0]:
                    best = us, splits, tiles
        if best is None:
            continue
        us, splits, tiles = best
        used = tiles or tiling(CODECS[kind], CODECS[kind], 128, True)
        rate = case.bytes / us / 1e3
        row = {"type": kind, "context": context, "us": us, "gbps": rate, "splits": splits, "tiling": str(used)}
        row["attend_us"] = case.run(splits, tiles, merge=False)
        row["prepare_us"] = case.prepared()
        row["sealing_us"] = case.sealed()
        results.append(row)
        print(f"| {kind} | {context} | {us:.2f} | {rate:.0f} | {splits} | {used} |", end="")
        print(
            f" attend alone {row['attend_us']:.2f}, prepare {row['prepare_us']:.2f}, sealing {row['sealing_us']:.2f}",
            flush=True,
        )
        del case
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--types", default=",".join(TIMED))
    parser.add_argument("--contexts", default="64,1024,8192,32768,120000")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA device")
    both = not (options.check or options.time or options.sweep)
    result: dict[str, object] = {"device": torch.cuda.get_device_name()}
    if options.check or both:
        result["errors"] = check_all(options.workers)
    if options.time or options.sweep or both:
        contexts = [int(x) for x in options.contexts.split(",")]
        result["times"] = time_all(options.sweep, options.types.split(","), contexts)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
