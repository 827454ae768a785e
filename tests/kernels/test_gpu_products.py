"""Weights on a GPU, and products with one vector, against float64; what lies behind the arrays is full of NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import synthetics
import torch
from conftest import ROOT
from gpucases import DEVICE, MORE, error, expect_activations, planes
from kernelcases import one_thread, packed

from kvcli.blockformats import FORMATS, FORMS, WEIGHT_FORMATS
from kvcli.kernels import QuantTensor
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.gpu import expand, formats, products
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE
from kvcli.kernels.gpu.products import Activations, Norm, advance, matvec
from kvcli.kernels.reference.pointwise import glu

TYPES = WEIGHT_FORMATS
EPS = 1e-5
SPARE = 512  # bytes
ROUNDING = 1e-6  # given the same codes
UNROUNDED = {1: 2e-2, 2: 1e-4}  # by planes, against the vector itself
VECTORS_CLOSE = 3e-6


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy on the device with NaN (or -1) behind its end."""
    memory = torch.full((x.numel() * x.element_size() + SPARE,), 0xFF, dtype=torch.uint8, device=DEVICE)
    copy = memory[:-SPARE].view(x.dtype).view(x.shape)
    return copy.copy_(x)


def unharmed(*arrays: torch.Tensor) -> bool:
    """Nothing was written behind arrays that `guarded` made."""
    ends = (torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(x.untyped_storage())[-SPARE:] for x in arrays)
    return all(bool((end == 0xFF).all()) for end in ends)


def on_device(*parts: QuantTensor, paired: bool = False) -> DeviceMatrix:
    m = formats.repack(parts, torch.device(DEVICE), paired, formats.dealt(parts, paired))
    codes, high, scales, supers = (guarded(x) for x in m.arrays)
    return replace(m, codes=codes, high=high, scales=scales, supers=supers)


def empty(n: int, keep: bool = True) -> Activations:
    made = Activations.empty(n, keep, torch.device(DEVICE))
    return Activations(*(guarded(x) for x in made.arrays), keep)


def some_of(types: Sequence[str], first: int, each: int = 2) -> list[Any]:
    """Every second type, of which each has another role here; the others take their turn with --thorough."""
    return [pytest.param(x, marks=() if i % each == first else MORE) for i, x in enumerate(types)]


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


def columns(type_: str) -> tuple[int, ...]:
    """A number that kernels mask, and one that they need not."""
    return {64: 320, 128: 384, 256: 768}.get(FORMATS[type_].elements, 288), 512


def few_programs(matrix: DeviceMatrix, role: int) -> products.Tiles:
    """The interpreter takes its time for each step of each program; compiled kernels get the tiles of the product."""
    usual = products.tiles(matrix, role)
    bn, rc = {STORE: (64, 32), RESIDUAL: (32, 32), GATED: (64, 32)}[role]
    return usual if DEVICE == "cuda" else replace(usual, bn=bn, rc=rc)


class Vector:
    """A vector [n], its norm's weights, and the two as the next product's vector, with its sums of squares."""

    def __init__(self, n: int, seed: int = 1) -> None:
        self.x, self.weights = floats(n, seed=seed), floats(n, seed=seed + 1).abs() + 0.5
        self.codes, self.squares, self.residual = empty(n), guarded(torch.zeros(n // GROUP)), guarded(torch.zeros(n))
        x, weights = self.x.to(DEVICE), self.weights.to(DEVICE)
        advance(x, self.residual, weights, self.codes, self.squares)
        self.norm = Norm(self.squares, EPS)
        self.inverse = (self.x.double().square().mean() + EPS).rsqrt()
        self.plain = (self.x * self.weights).double()

    def as_read(self, matrix: DeviceMatrix, n_planes: int) -> torch.Tensor:
        """float64 [n]: as a product with that matrix sees it."""
        return self.plain if matrix.format.kind == PLAIN else planes(self.codes)[n_planes - 1]


@pytest.mark.slow
@pytest.mark.parametrize("type_", TYPES)
def test_expanding_is_exact(type_):
    cols = columns(type_)[0]
    parts = packed(type_, 67, cols, 1, wild=True), packed(type_, 30, cols, 2, wild=True)
    whole, matrix = torch.cat([p.decode() for p in parts]), on_device(*parts)
    assert (matrix.rows, matrix.cols) == whole.shape

    def expanded(n: int, **which) -> torch.Tensor:
        out = guarded(torch.zeros(n, cols))
        expand.rows(matrix, out, **which)
        assert unharmed(out)
        return out.cpu()

    assert torch.equal(expanded(97), whole)
    assert torch.equal(expanded(20, first=60), whole[60:80])
    ids = torch.tensor([96, 0, 67, 0, 12])
    assert torch.equal(expanded(5, ids=ids.to(DEVICE)), whole[ids])
    assert torch.equal(expanded(5, ids=ids.to(DEVICE), scale=0.5), whole[ids] * 0.5)


@pytest.mark.parametrize(("paired", "rows"), [(True, (96, 96)), (False, (96, 64))])
def test_rows_are_dealt_out_among_programs(
    paired: bool, rows: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What programs read first stands side by side, then what they read next, of every array."""
    monkeypatch.setattr(formats, "REPACK_BYTES", 1)  # in slices of 32 rows
    cols = 512
    parts = tuple(packed("Q6_K", n, cols, i) for i, n in enumerate(rows))
    each = formats.dealt(parts, paired)
    assert each == (64 if paired else 32)
    plain, found = (formats.repack(parts, torch.device(DEVICE), paired, n) for n in (0, each))
    for stands, order in zip(found.arrays, plain.arrays, strict=True):
        turns = order.unflatten(0, (-1, each // formats.TURN, formats.TURN)).transpose(0, 1)
        assert torch.equal(stands, turns.flatten(0, 2))
    ids = torch.tensor([95, 0, 33, 63, 64, 0], device=DEVICE)
    for n, first, picked in ((plain.rows, 0, None), (plain.rows - 60, 60, None), (len(ids), 0, ids)):
        here, there = (expand.rows(m, torch.zeros(n, cols, device=DEVICE), first, picked) for m in (plain, found))
        assert torch.equal(here, there)
    assert formats.dealt((packed("F16", 96, cols),), False) == 0
    assert formats.dealt((packed("Q6_K", 80, cols),), False) == 0  # not whole programs
    assert formats.dealt((packed("Q6_K", 512, 256),), False) == 0  # of few columns


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "Q6_K", "F16"])
def test_pairs_and_slices(type_, monkeypatch):
    cols = columns(type_)[0]
    monkeypatch.setattr(expand, "SLICE_BYTES", 2 * cols * 50)
    gates, gated = packed(type_, 64, cols, 3), packed(type_, 64, cols, 4)
    matrix = on_device(gates, gated, paired=True)
    room = torch.full((expand.room_for(matrix),), torch.nan, dtype=torch.float16, device=DEVICE)
    found = torch.cat([piece.clone() for _, piece in expand.slices(matrix, room)]).cpu()
    pairs = torch.stack((gates.decode().view(2, GROUP, cols), gated.decode().view(2, GROUP, cols)), 1)
    assert torch.equal(found, pairs.view(128, cols).half())


def test_repacking_in_slices(monkeypatch):
    monkeypatch.setattr(formats, "REPACK_BYTES", 1)
    weights = packed("Q5_K", 70, 256), packed("Q5_K", 70, 256, 1)
    out = expand.rows(on_device(*weights), torch.empty(140, 256, device=DEVICE))
    assert torch.equal(out.cpu(), torch.cat([w.decode() for w in weights]))


UNMASKED = [(t, columns(t)[1]) for t in ("Q4_0", "Q8_0", "Q5_K", "Q6_K", "F16")]


@pytest.mark.slow
@pytest.mark.parametrize(("type_", "cols"), [*((t, columns(t)[0]) for t in TYPES), *UNMASKED])
def test_store(type_, cols):
    rows, x = 67, Vector(cols)
    weights = packed(type_, rows, cols)
    matrix, exact = on_device(weights), weights.decode().double() @ x.plain * x.inverse
    tiled = few_programs(matrix, STORE)
    for n_planes in (1, 2):
        out, squares = guarded(torch.zeros(rows)), guarded(torch.zeros(-(-rows // tiled.bn)))
        matvec(matrix, x.codes, STORE, norm=x.norm, out=out, squares=squares, planes=n_planes, chosen=tiled)
        expected = weights.decode().double() @ x.as_read(matrix, n_planes) * x.inverse
        assert error(out, expected) < ROUNDING
        assert error(out, exact) < UNROUNDED[n_planes]
        assert error(squares.sum(), expected.square().sum()) < 4 * ROUNDING
        assert unharmed(out, squares)


@pytest.mark.slow
@pytest.mark.parametrize("type_", some_of(TYPES, 0))
def test_adding_to_the_residual(type_):
    cols, rows = columns(type_)[0], 64
    x, weights = Vector(cols), packed(type_, rows, cols)
    before, next_norm = floats(rows, seed=5), floats(rows, seed=6)
    matrix = on_device(weights)
    for n_planes in (1, 2):
        residual, into, squares = guarded(before), empty(rows), guarded(torch.zeros(rows // GROUP))
        matvec(
            matrix, x.codes, RESIDUAL, norm=x.norm, residual=residual, next_norm=next_norm.to(DEVICE), into=into,
            squares=squares, planes=n_planes, chosen=few_programs(matrix, RESIDUAL),
        )  # fmt: skip
        expected = before + weights.decode().double() @ x.as_read(matrix, n_planes) * x.inverse
        assert error(residual, expected) < ROUNDING
        assert error(squares, expected.view(-1, GROUP).square().sum(1)) < 4 * ROUNDING
        expect_activations(residual.cpu() * next_norm, into)
        assert unharmed(residual, squares, *into.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("type_", some_of(TYPES, 1))
def test_gates(type_):
    act = ("silu", "gelu")[TYPES.index(type_) // 2 % 2]
    cols, rows = columns(type_)[0], 64
    x, gates, gated = Vector(cols), packed(type_, rows, cols, 1), packed(type_, rows, cols, 2)
    matrix = on_device(gates, gated, paired=True)
    for n_planes in (1, 2):
        into = empty(rows)
        tiled = few_programs(matrix, GATED)
        matvec(matrix, x.codes, GATED, norm=x.norm, into=into, act=act, planes=n_planes, chosen=tiled)
        vector = x.as_read(matrix, n_planes) * x.inverse
        a, b = gates.decode().double() @ vector, gated.decode().double() @ vector
        expected = glu(torch.cat((a, b))[None], act)[0]
        assert error(into.values, expected) < VECTORS_CLOSE
        expect_activations(into.values, into)
        assert unharmed(*into.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("type_", some_of([name for name in TYPES if FORMS[name].table != "float32"], 1, 4))
def test_what_the_benchmark_times_is_right(type_, monkeypatch):
    script = synthetics.module("gpu_products")
    monkeypatch.setattr(script, "DEVICE", torch.device(DEVICE))
    monkeypatch.setattr(script, "ROTATE_BYTES", 1)
    assert 0 < script.Case(type_, 64, 256, GATED).error() < VECTORS_CLOSE


@pytest.mark.parametrize("tiled", [None, products.Tiles(16, 32, 8, 4), products.Tiles(32, 16, 16, 1)])
@pytest.mark.parametrize("type_", ["Q4_K", "BF16"])
def test_tiles(type_, tiled):
    """Their choice changes nothing but the order of sums. No norm, no squares; nothing is kept in floats."""
    x, weights = Vector(512), packed(type_, 37, 512)
    matrix, out = on_device(weights), guarded(torch.zeros(37))
    if tiled is not None and matrix.format.kind == PLAIN:
        tiled = replace(tiled, bg=512)
    matvec(matrix, x.codes, STORE, out=out, chosen=tiled, planes=2)
    assert error(out, weights.decode().double() @ x.as_read(matrix, 2)) < ROUNDING and unharmed(out)


def test_values_are_kept_where_they_are_wanted():
    x, into, residual = Vector(256), empty(64, keep=False), guarded(torch.zeros(64))
    ones, squares = torch.ones(64, device=DEVICE), guarded(torch.zeros(2))
    matrix = on_device(packed("Q4_0", 64, 256))
    matvec(matrix, x.codes, RESIDUAL, residual=residual, next_norm=ones, into=into, squares=squares)
    expect_activations(residual, into)
    assert torch.equal(into.values.cpu(), torch.zeros(1)) and unharmed(*into.arrays)


def test_planes_of():
    """Two where the matrix is small."""
    sizes = [formats.empty_matrix(FORMATS["Q4_0"].form, n, 2048, torch.device("meta"), False) for n in (64, 32768)]
    assert [products.planes_of(matrix) for matrix in sizes] == [2, 1]


@pytest.mark.parametrize("n", [32, 96, 512])
@pytest.mark.parametrize("post", [False, True])
def test_advance(n, post):
    y, before, next_norm, weights = (floats(n, seed=i) for i in range(4))
    residual, into, squares = guarded(before), empty(n), guarded(torch.zeros(n // GROUP))
    parts = guarded(y.view(-1, 8).square().sum(1))  # as a product leaves them
    after = (weights.to(DEVICE), Norm(parts, EPS)) if post else None
    advance(y.to(DEVICE), residual, next_norm.to(DEVICE), into, squares, after)
    if post:
        expected = before + y.double() * (y.double().square().mean() + EPS).rsqrt() * weights
        assert error(residual, expected) < ROUNDING
    else:
        expected = y.double()
        assert torch.equal(residual.cpu(), y)
    assert error(squares, expected.view(-1, GROUP).square().sum(1)) < 4 * ROUNDING
    expect_activations(residual.cpu() * next_norm, into)
    assert unharmed(residual, squares, *into.arrays)


@pytest.mark.slow
@pytest.mark.parametrize("type_", ["Q4_K", "IQ2_XXS", "F16"])
def test_what_the_table_of_formats_times_is_right(type_, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = synthetics.module("formats")
    for name, value in {"DEVICE": torch.device(DEVICE), "ROTATE_BYTES": 1}.items():
        monkeypatch.setattr(script.gpu_products, name, value)
    for name, value in {"GPU_SHAPE": (64, 256), "CPU_SHAPE": (48, 256), "CPU_BYTES": 1, "PROMPT": 96}.items():
        monkeypatch.setattr(script, name, value)
    for case in (script.OnCpu(type_, NativeBackend(1)), script.OnGpu(type_)):
        assert all(0 < case.error(rows) < close for rows, close in ((1, 1e-4), (96, 1e-3)))
