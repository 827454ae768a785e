"""Weights on a GPU, and products with one vector, against float64; what lies behind the arrays is full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpucases import DEVICE, error, expect_activations, planes
from kernelcases import one_thread, packed

from kvcli.errors import ModelError
from kvcli.kernels import QuantTensor, ggml
from kvcli.kernels.gpu import expand, formats, products
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix
from kvcli.kernels.gpu.matvec import GATED, RESIDUAL, STORE
from kvcli.kernels.gpu.products import Activations, Norm, advance, matvec

TYPES = (*formats.FORMATS, *formats.STORED_AS)
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
    m = formats.repack(parts, torch.device(DEVICE), paired)
    codes, high, scales, supers = (guarded(x) for x in m.arrays)
    return replace(m, codes=codes, high=high, scales=scales, supers=supers)


def empty(n: int, keep: bool = True) -> Activations:
    made = Activations.empty(n, keep, torch.device(DEVICE))
    return Activations(*(guarded(x) for x in made.arrays), keep)


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.manual_seed(seed))


def columns(type_: str) -> tuple[int, ...]:
    """A number that kernels mask, and one that they need not."""
    return (768, 512) if ggml.DECODERS[type_].elements == 256 else (288, 512)


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


@pytest.mark.parametrize("type_", ["Q4_K", "Q8_0", "Q6_K", "F16"])
def test_pairs_and_slices(type_, monkeypatch):
    cols = columns(type_)[0]
    monkeypatch.setattr(expand, "SLICE_BYTES", 2 * cols * 50)
    gates, gated = packed(type_, 64, cols, 3), packed(type_, 64, cols, 4)
    matrix = on_device(gates, gated, paired=True)
    found = torch.cat([piece.clone() for _, piece in expand.slices(matrix)]).cpu()
    pairs = torch.stack((gates.decode().view(2, GROUP, cols), gated.decode().view(2, GROUP, cols)), 1)
    assert torch.equal(found, pairs.view(128, cols).half())


def test_repacking_in_slices(monkeypatch):
    monkeypatch.setattr(formats, "REPACK_BYTES", 1)
    weights = packed("Q5_K", 70, 256), packed("Q5_K", 70, 256, 1)
    out = expand.rows(on_device(*weights), torch.empty(140, 256, device=DEVICE))
    assert torch.equal(out.cpu(), torch.cat([w.decode() for w in weights]))


def test_what_cannot_be_held():
    with pytest.raises(ModelError, match="Q2_K"):
        formats.repack((packed("Q2_K", 4, 256),), torch.device(DEVICE))


@pytest.mark.parametrize(("type_", "cols"), [(t, c) for t in TYPES for c in columns(t)])
def test_store(type_, cols):
    rows, x = 67, Vector(cols)
    weights = packed(type_, rows, cols)
    matrix, exact = on_device(weights), weights.decode().double() @ x.plain * x.inverse
    for n_planes in (1, 2):
        out, squares = guarded(torch.zeros(rows)), guarded(torch.zeros(products.parts_of(matrix, STORE)))
        matvec(matrix, x.codes, STORE, norm=x.norm, out=out, squares=squares, planes=n_planes)
        expected = weights.decode().double() @ x.as_read(matrix, n_planes) * x.inverse
        assert error(out, expected) < ROUNDING
        assert error(out, exact) < UNROUNDED[n_planes]
        assert error(squares.sum(), expected.square().sum()) < 4 * ROUNDING
        assert unharmed(out, squares)
        again = guarded(torch.zeros(rows))
        matvec(matrix, x.codes, STORE, out=again, planes=n_planes)
        assert error(again, expected / x.inverse) < ROUNDING


@pytest.mark.parametrize("type_", TYPES)
def test_adding_to_the_residual(type_):
    cols, rows = columns(type_)[0], 96
    x, weights = Vector(cols), packed(type_, rows, cols)
    before, next_norm = floats(rows, seed=5), floats(rows, seed=6)
    matrix = on_device(weights)
    for n_planes in (1, 2):
        residual, into, squares = guarded(before), empty(rows), guarded(torch.zeros(rows // GROUP))
        matvec(
            matrix, x.codes, RESIDUAL, norm=x.norm, residual=residual, next_norm=next_norm.to(DEVICE), into=into,
            squares=squares, planes=n_planes,
        )  # fmt: skip
        expected = before + weights.decode().double() @ x.as_read(matrix, n_planes) * x.inverse
        assert error(residual, expected) < ROUNDING
        assert error(squares, expected.view(-1, GROUP).square().sum(1)) < 4 * ROUNDING
        expect_activations(residual.cpu() * next_norm, into)
        assert unharmed(residual, squares, *into.arrays)


@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("type_", TYPES)
def test_gates(type_, gelu):
    cols, rows = columns(type_)[0], 96
    x, gates, gated = Vector(cols), packed(type_, rows, cols, 1), packed(type_, rows, cols, 2)
    matrix = on_device(gates, gated, paired=True)
    for n_planes in (1, 2):
        into = empty(rows)
        matvec(matrix, x.codes, GATED, norm=x.norm, into=into, gelu=gelu, planes=n_planes)
        vector = x.as_read(matrix, n_planes) * x.inverse
        a, b = gates.decode().double() @ vector, gated.decode().double() @ vector
        expected = b * (torch.nn.functional.gelu(a, approximate="tanh") if gelu else torch.nn.functional.silu(a))
        assert error(into.values, expected) < VECTORS_CLOSE
        expect_activations(into.values, into)
        assert unharmed(*into.arrays)


@pytest.mark.parametrize("tiled", [products.Tiles(16, 32, 4, 4), products.Tiles(32, 16, 16, 1)])
def test_other_tiles(tiled):
    """The choice of tiles changes nothing but the order of sums; values are only written where they are wanted."""
    x, weights = Vector(512), packed("Q4_K", 100, 512)
    out, into, residual = guarded(torch.zeros(100)), empty(96, keep=False), guarded(torch.zeros(96))
    matvec(on_device(weights), x.codes, STORE, out=out, chosen=tiled, planes=2)
    assert error(out, weights.decode().double() @ planes(x.codes)[1]) < ROUNDING and unharmed(out)
    if tiled.bn == 32:
        weights = packed("Q4_K", 96, 512, 1)
        matvec(
            on_device(weights), x.codes, RESIDUAL, residual=residual, next_norm=torch.ones(96, device=DEVICE),
            into=into, squares=guarded(torch.zeros(3)), chosen=tiled,
        )  # fmt: skip
        expect_activations(residual, into)
        assert torch.equal(into.values.cpu(), torch.zeros(1)) and unharmed(*into.arrays)


def test_planes_of():
    small, large = (formats.empty_matrix(formats.FORMATS["Q4_0"], n, 2048, torch.device("meta"), False)
                    for n in (64, 8192))  # fmt: skip
    assert [products.planes_of(small, STORE), products.planes_of(small, GATED)] == [2, 2]
    assert [products.planes_of(large, role) for role in (STORE, GATED, RESIDUAL)] == [1, 1, 2]


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
