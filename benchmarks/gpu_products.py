"""Matrix-vector products on a GPU: right against float64, and how fast.

    python benchmarks/gpu_products.py                # every format at the shapes of an 8B and a 1B model
    python benchmarks/gpu_products.py --tune Q4_K    # other tile sizes for one format

Weights are random and rotated, so that no cache holds them. A time is the median of CUDA-graph replays, launches
included. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable

import torch

from kvcli.blockformats import D_M, E4M3, EXPONENT, FORMATS, FORMS, GROUP, PAIR, PLAIN, QUARTERS, D
from kvcli.kernels import QuantTensor
from kvcli.kernels.gpu import expand
from kvcli.kernels.gpu.formats import DeviceMatrix, dealt, empty_matrix, repack
from kvcli.kernels.gpu.language import AFTER, SERIAL
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE
from kvcli.kernels.gpu.products import Activations, Norm, Tiles, advance, matvec, parts_of, planes_of, tiles

SHAPES = {  # name: (rows, columns, role)
    "qkv 8B": (6144, 4096, STORE), "out 8B": (4096, 4096, RESIDUAL), "gate/up 8B": (28672, 4096, GATED),
    "down 8B": (4096, 14336, RESIDUAL), "head 8B": (128256, 4096, STORE), "qkv 1B": (3072, 2048, STORE),
    "out 1B": (2048, 2048, RESIDUAL), "gate/up 1B": (16384, 2048, GATED), "down 1B": (2048, 8192, RESIDUAL),
    "head 1B": (128256, 2048, STORE), "qkv 135M": (960, 576, STORE), "out 135M": (576, 576, RESIDUAL),
    "gate/up 135M": (3072, 576, GATED), "down 135M": (576, 1536, RESIDUAL), "head 135M": (49152, 576, STORE),
}  # fmt: skip
ROTATE_BYTES = 200 << 20
DEVICE = torch.device("cuda")


def random_matrix(type_: str, rows: int, cols: int, role: int) -> DeviceMatrix:
    """Random blocks, with scales that are no larger than 1 / sqrt(cols)."""
    form, block = FORMS[type_], FORMATS[type_]
    if form.kind == PLAIN:
        m = empty_matrix(form, rows, cols, DEVICE, role == GATED)
        m.codes.normal_(std=cols**-0.5)
        return m
    parts = 2 if role == GATED else 1
    raw = torch.randint(0, 256, (rows, cols // block.elements * block.bytes), dtype=torch.uint8, device=DEVICE)
    tensors = tuple(QuantTensor(type_, part, cols) for part in raw.chunk(parts))
    m = repack(tensors, DEVICE, role == GATED, dealt(tensors, role == GATED))
    d = torch.rand((m.supers if m.supers.numel() else m.scales).shape, device=DEVICE) * cols**-0.5 / 64
    pairs = torch.stack((d, d * 8), -1).half().view(torch.int32).squeeze(-1)
    if form.kind == D:
        m.scales.copy_(d)
    elif form.kind == D_M:
        m.scales.copy_(pairs)
    elif form.kind == EXPONENT:
        m.scales.random_(110, 120)
    elif form.kind == E4M3:
        m.scales.bitwise_and_(0x1F1F)
    else:
        m.supers.copy_(pairs if form.kind in (PAIR, QUARTERS) else d)
    return m


def graph_us(launches: list[Callable[[], None]], repeats: int = 7) -> float:
    """Median microseconds of one launch, all of them captured in one graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for launch in launches:
                launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(launches))
    return statistics.median(times)


class Case:
    """One product with its vectors, and as many copies of the matrix as no cache holds."""

    def __init__(self, fmt: str, rows: int, cols: int, role: int) -> None:
        self.role, self.norm_weights = role, torch.rand(max(rows, cols), device=DEVICE) + 0.5
        first = random_matrix(fmt, rows, cols, role)
        copies = min(24, max(1, -(-ROTATE_BYTES // first.nbytes)))
        self.matrices = [first, *(random_matrix(fmt, rows, cols, role) for _ in range(copies - 1))]
        self.x, self.values = Activations.empty(cols, True, DEVICE), torch.randn(cols, device=DEVICE)
        self.squares = torch.empty(cols // GROUP, device=DEVICE)
        advance(self.values, torch.empty(cols, device=DEVICE), self.norm_weights, self.x, self.squares)
        self.out = torch.zeros(rows, device=DEVICE)
        self.into = Activations.empty(rows // 2 if role == GATED else rows, True, DEVICE)
        self.left = torch.empty(parts_of(first, role), device=DEVICE)

    def launch(self, matrix: DeviceMatrix, chosen: Tiles | None = None, pdl: int = AFTER, planes: int = 0) -> None:
        norm = Norm(self.squares, 1e-5) if self.role != RESIDUAL else None
        left = self.left if chosen is None else torch.empty(-(-matrix.rows // chosen.bn), device=DEVICE)
        matvec(
            matrix, self.x, self.role, norm=norm, out=self.out, residual=self.out, next_norm=self.norm_weights,
            into=self.into, squares=left if self.role == RESIDUAL else None, pdl=pdl, chosen=chosen,
            planes=planes,
        )  # fmt: skip

    def error(self) -> float:
        """Relative error against float64, given the same vector."""
        m = self.matrices[0]
        self.out.zero_()
        self.launch(m, pdl=SERIAL)
        w = expand.rows(m, torch.empty(m.rows, m.cols, device=DEVICE))
        packed = m.format.kind != PLAIN
        plain = self.x.codes.double() * torch.tensor([[254.0], [1.0]], device=DEVICE)
        plain = (plain[: planes_of(m)]).sum(0)
        codes = plain.view(-1, GROUP) * self.x.scales.double()[:, None]
        x = codes.view(-1) if packed else self.x.values.double()
        y = torch.cat([part.double() @ x for part in w.split(8192)])
        if self.role == RESIDUAL:
            return relative(self.out, y)
        y = y * (self.values.double().square().mean() + 1e-5).rsqrt()
        if self.role == STORE:
            return relative(self.out, y)
        gate, up = y.view(-1, 2, GROUP).unbind(1)
        return relative(self.into.values, (gate * torch.sigmoid(gate) * up).flatten())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def table(formats: list[str]) -> list[dict[str, object]]:
    rows = []
    print(f"{'product':12} {'format':7} {'error':>8} {'us':>8} {'GB/s':>7}  tiles")
    for (name, (n, k, role)), fmt in itertools.product(SHAPES.items(), formats):
        case = Case(fmt, n, k, role)
        us = graph_us([lambda m=m, case=case: case.launch(m) for m in case.matrices * 2])
        rate = case.matrices[0].nbytes / us / 1e3
        rows.append({"product": name, "format": fmt, "error": case.error(), "us": us, "GB/s": rate})
        t = tiles(case.matrices[0], role)
        print(f"{name:12} {fmt:7} {rows[-1]['error']:8.1e} {us:8.2f} {rate:7.0f}  {t}", flush=True)
    return rows


def tune(fmt: str, names: list[str]) -> list[dict[str, object]]:
    rows = []
    for name in names:
        n, k, role = SHAPES[name]
        case = Case(fmt, n, k, role)
        usual = tiles(case.matrices[0], role)
        found = []
        bns = {STORE: (4, 8, 16, 32), RESIDUAL: (32,), GATED: (64,)}[role]
        for bn, rc, warps in itertools.product(bns, (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16)):
            words = rc * usual.bg * 4 // (32 * warps)
            if rc > bn or not 4 <= words <= 64:
                continue
            t = Tiles(bn, usual.bg, rc, warps)
            found.append((graph_us([lambda m=m, t=t, case=case: case.launch(m, t) for m in case.matrices], 3), t))
        found.sort(key=lambda pair: pair[0])
        best = ", ".join(f"{us:.2f} {t.bn}/{t.rc}/{t.warps}" for us, t in found[:4])
        mine = next((us for us, t in found if t == usual), float("nan"))
        print(f"{name:12} {fmt}: usual {mine:.2f} ({usual.bn}/{usual.rc}/{usual.warps}); best {best}", flush=True)
        rows.append({"product": name, "format": fmt, "us": found[0][0], "tiles": str(found[0][1])})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", metavar="FORMAT")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default=",".join(name for name, form in FORMS.items() if form.table != "float32"))
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.tune:
        rows = [r for f in options.tune.split(",") for r in tune(f, options.shapes.split(","))]
    else:
        rows = table(options.formats.split(","))
    print(json.dumps({"device": torch.cuda.get_device_name(), "products": rows}))


if __name__ == "__main__":
    main()
