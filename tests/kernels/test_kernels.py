"""Products, norms, rotations and activations: the compiled kernels and their reference against float64."""

from __future__ import annotations

import subprocess
import sys
from itertools import cycle

import pytest
import torch
from conftest import PACKAGE_ROOT
from kernelcases import ISAS, backend, native, need_native, one_thread, packed, same_bits

from kvcli import kernels
from kvcli.blockformats import FORMATS, WEIGHT_FORMATS
from kvcli.errors import UsageError
from kvcli.kernels import QuantTensor
from kvcli.kernels.cpu import library as native_library
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.library import library
from kvcli.kernels.reference import ggml
from kvcli.kernels.reference.backend import ReferenceBackend

BACKENDS = (*ISAS, "reference")
ROWS_OF_X = (1, 2, 3, 4, 5, 8, 9, 16, 17)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def columns(type: str) -> tuple[int, ...]:
    """Row lengths with every kind of remainder that the format allows."""
    elements = FORMATS[type].elements
    return {1: (20, 33, 48, 160, 256), 32: (32, 96, 160, 544)}.get(elements, (elements, 3 * elements))


def product(x: torch.Tensor, w: QuantTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x . W^T in float64, and the sum of the terms' absolute values, which rounding errors are measured by."""
    exact = ggml.decode(w.type, w.blocks).double()
    return x.double() @ exact.T, x.double().abs() @ exact.abs().T


def close(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor, tolerance: float = 4e-6) -> bool:
    return found.dtype == torch.float32 and bool(((found - expected).abs() <= tolerance * size).all())


@pytest.mark.parametrize("type", FORMATS)
def test_the_compiled_kernels_have_every_format_of_weights(type: str):
    need_native()
    form = FORMATS[type]
    assert library().kv_block(form.id) == (form.elements << 16 | form.bytes if form.form else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("type", WEIGHT_FORMATS)
def test_matmul_is_right_and_rows_do_not_depend_on_each_other(type: str, name: str):
    ops = backend(name)
    for cols in columns(type):
        x = torch.randn(17, cols, generator=torch.manual_seed(cols))
        for rows in (1, 3, 37):
            w = packed(type, rows, cols)
            whole = ops.matmul(x, (w,))
            assert whole.shape == (17, rows) and close(whole, *product(x, w))
            for m in ROWS_OF_X:
                assert same_bits(ops.matmul(x[:m], (w,)), whole[:m]), (cols, rows, m)
            for i in range(17):
                assert same_bits(ops.matmul(x[i : i + 1], (w,)), whole[i : i + 1]), (cols, rows, i)


@pytest.mark.parametrize("name", ("", "reference"))
def test_rows_of_long_products_do_not_depend_on_each_other(name: str):
    """Nor on how many threads there are, and how their tasks are cut."""
    make = NativeBackend if name == "" else ReferenceBackend
    w, x = packed("F32", 640, 2048), torch.randn(130, 2048, generator=torch.manual_seed(0))
    need_native()
    whole = make(1).matmul(x, (w,))
    for threads in (2, 3):
        ops = make(threads)
        for m in (1, 7, 64, 100):
            assert same_bits(ops.matmul(x[:m], (w,)), whole[:m]), (threads, m)
        with torch.inference_mode():
            assert same_bits(ops.matmul(x, (w,)), whole), threads


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("m", ROWS_OF_X)
def test_stacked_matrices_of_all_formats(m: int, name: str):
    ops = backend(name)
    weights = tuple(
        packed(t, rows, 256, i) for i, (t, rows) in enumerate(zip(WEIGHT_FORMATS, cycle((1, 2, 3, 5, 16, 37, 8))))
    )
    x = torch.randn(m, 256, generator=torch.manual_seed(m))
    found = ops.matmul(x, weights)
    assert found.shape == (m, sum(w.rows for w in weights))
    exact, size = (torch.cat(parts, 1) for parts in zip(*(product(x, w) for w in weights), strict=True))
    assert close(found, exact, size)
    for part, w in zip(found.split([w.rows for w in weights], 1), weights, strict=True):
        assert same_bits(part, ops.matmul(x, (w,)))


@pytest.mark.parametrize("name", BACKENDS)
def test_matmul_adds_in_place_and_takes_views(name: str):
    ops, w = backend(name), packed("Q5_1", 37, 96)
    for m in (1, 2, 17):
        wide = torch.randn(m, 200, generator=torch.manual_seed(m))
        x, before = wide[:, 50:146], torch.randn(m, 40)
        added = before.clone()
        target = added[:, 2:39]
        assert ops.matmul(x, (w,), add_to=target) is target
        assert same_bits(target, before[:, 2:39] + ops.matmul(x.contiguous(), (w,)))
        assert torch.equal(added[:, :2], before[:, :2]) and torch.equal(added[:, 39:], before[:, 39:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("type", WEIGHT_FORMATS)
def test_rows_are_the_specified_values_to_the_bit(type: str, name: str):
    ops = backend(name)
    ids = torch.tensor([4, 0, 36, 4, 17])
    for cols in columns(type):
        w = packed(type, 37, cols, wild=True)
        expected = ggml.decode(type, w.blocks)[ids]
        assert expected.isfinite().all() and expected.abs().max() > 0
        assert same_bits(ops.rows(w, ids), expected)
        assert same_bits(ops.rows(w, ids, 25.298221), expected * 25.298221)
    with pytest.raises(IndexError):
        ops.rows(w, torch.tensor([0, 37]))


@pytest.mark.parametrize("type", WEIGHT_FORMATS)
def test_threads_change_no_bit(type: str):
    w, x = packed(type, 613, 256), torch.randn(33, 256, generator=torch.manual_seed(1))
    results = []
    for threads in (1, 2):
        ops = native("", threads)
        assert ops._lib.kv_threads() == threads
        results.append((ops.matmul(x, (w,)), ops.matmul(x[:1], (w,)), ops.glu(x, "gelu")))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))


MORE_THREADS = """
import torch
from kvcli.kernels import QuantTensor
from kvcli.kernels.cpu.backend import NativeBackend
w = QuantTensor("F32", torch.randn(700, 64).view(torch.uint8), 64)
x = torch.randn(9, 64)
expected = NativeBackend(1).matmul(x, (w,))
for threads in (2, 3, 5, 2, 7, 1, 8):
    ops = NativeBackend(threads)
    for _ in range(30):
        added = torch.zeros(9, 700)
        assert torch.equal(ops.matmul(x, (w,), add_to=added), expected), threads
print("equal")
"""


@pytest.mark.slow
def test_threads_can_be_added_and_taken_away():
    """In a process of its own: workers stay until the end."""
    native()
    command = [sys.executable, "-c", MORE_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=PACKAGE_ROOT)
    assert done.stdout.strip() == "equal", done.stderr


def test_an_instruction_set_can_be_asked_for(monkeypatch: pytest.MonkeyPatch):
    for isa in reversed(ISAS):
        native(isa)  # skips from there on what this processor lacks
        monkeypatch.setenv("KV_CPU_ISA", isa)
        assert kernels.backend("auto", 1)[0].isa == isa
    monkeypatch.setenv("KV_CPU_ISA", "sse9")
    with pytest.raises(UsageError, match=f"KV_CPU_ISA must be one of {', '.join(ISAS)}, not 'sse9'"):
        kernels.backend("auto", 1)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dim", (1, 7, 16, 48, 64, 100, 576))
def test_rms_norm(dim: int, name: str):
    ops = backend(name)
    generator = torch.manual_seed(dim)
    wide, weight = 3 * torch.randn(5, 4 * dim + 3, generator=generator), torch.randn(dim, generator=generator)
    heads = wide[:, 3:].unflatten(1, (4, dim))  # rows of a wider matrix, [5, 4, dim]
    for x in (wide[:, :dim], heads):
        exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
        found = ops.rms_norm(x, weight, 1e-6)
        assert found.shape == x.shape and close(found, exact, exact.abs(), 1e-6)
        for i in range(5):
            assert same_bits(ops.rms_norm(x[i : i + 1], weight, 1e-6), found[i : i + 1])
    assert torch.isfinite(ops.rms_norm(torch.zeros(2, dim), weight, 1e-6)).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dim", (1, 5, 16, 33, 576))
@pytest.mark.parametrize("biased", (True, False))
def test_layer_norm(biased: bool, dim: int, name: str):
    """Of rows far from zero, too, where the mean is most of a row."""
    ops, generator = backend(name), torch.manual_seed(dim)
    x = torch.randn(5, dim + 3, generator=generator)[:, 3:] + torch.tensor([0.0, 1.0, -5.0, 20.0, 0.0])[:, None]
    weight, bias = torch.randn(2, dim, generator=generator)
    wide = x.double() - x.double().mean(-1, keepdim=True)
    exact = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double() + (bias if biased else 0)
    found = ops.layer_norm(x, weight, bias if biased else None, 1e-5)
    assert found.shape == x.shape and close(found, exact, exact.abs() + 1, 2e-5)
    for i in range(5):
        assert same_bits(ops.layer_norm(x[i : i + 1], weight, bias if biased else None, 1e-5), found[i : i + 1])


@pytest.mark.parametrize("name", BACKENDS)
def test_softcap(name: str):
    x = torch.tensor([[-1e4, -30.0, -1.0, 0.0, 1e-3, 2.0, 60.0, 1e4]])
    found, exact = backend(name).softcap(x, 30.0), 30 * (x.double() / 30).tanh()
    assert close(found, exact, exact.abs(), 1e-6)


@pytest.mark.parametrize("name", ISAS)
def test_rows_are_added_in_place(name: str):
    ops, wide = backend(name), torch.randn(5, 90, generator=torch.manual_seed(4))
    for y in (torch.randn(5, 37), torch.randn(37), torch.randn(5, 60)[:, 20:57]):
        for scale in (1.0, 0.3):
            found, expected = wide.clone(), wide.clone()
            ops.add_(found[:, 3:40], y, scale)
            ReferenceBackend.add_(expected[:, 3:40], y, scale)
            assert same_bits(found, expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("dim", "rope_dim"), ((8, 8), (64, 64), (72, 72), (80, 32), (128, 2)))
def test_rope_rotates_in_place_what_it_should(dim: int, rope_dim: int, name: str):
    ops = backend(name)
    wide = torch.randn(6, 3 * dim + 5, generator=torch.manual_seed(dim))
    before, half = wide.clone(), rope_dim // 2
    angles = torch.randn(6, half, dtype=torch.float64)
    x = wide[:, 5:].unflatten(1, (3, dim))
    ops.rope_(x, angles.cos().float(), angles.sin().float())
    old = before[:, 5:].unflatten(1, (3, dim)).double()
    turned = (
        torch.complex(old[..., :half], old[..., half:rope_dim]) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    expected = torch.cat([turned.real, turned.imag, old[..., rope_dim:]], -1)
    assert torch.allclose(x.double(), expected, atol=1e-6, rtol=0)
    assert torch.equal(wide[:, :5], before[:, :5]) and torch.equal(x[..., rope_dim:].double(), old[..., rope_dim:])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("act", ("silu", "gelu", "relu2"))
@pytest.mark.parametrize("width", (1, 5, 16, 31, 80, 257))
def test_activations(width: int, act: str, name: str):
    ops = backend(name)
    x = 4 * torch.randn(7, 2 * width, generator=torch.manual_seed(width))
    x[:, 0] = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
    gate, up = x.double().chunk(2, 1)
    inner = gate if act == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    exact = gate.clamp(min=0) ** 2 if act == "relu2" else gate * torch.sigmoid(inner)
    found, plain = ops.glu(x, act), ops.activate(x[:, :width].contiguous(), act)
    assert close(plain, exact, exact.abs() + 1, 2e-6)
    assert close(found, exact * up, (exact * up).abs() + up.abs(), 2e-6)
    for i in range(7):
        assert same_bits(ops.glu(x[i : i + 1], act), found[i : i + 1])
        assert same_bits(ops.activate(x[i : i + 1, :width], act), plain[i : i + 1])


@pytest.mark.parametrize("name", BACKENDS)
def test_clamped_gates(name: str):
    x = 6 * torch.randn(7, 74, generator=torch.manual_seed(1))
    gate, up = x.double().chunk(2, 1)
    gate = gate.clamp(max=7)
    exact = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
    found = backend(name).glu(x, "clamped")
    assert close(found, exact, exact.abs() + 8, 2e-6) and (up.abs() > 7).any() and (x[:, :37] > 7).any()
    assert same_bits(backend(name).glu(x[2:3], "clamped"), found[2:3])


def test_kernels_of_other_sources_are_not_used(monkeypatch: pytest.MonkeyPatch):
    """After an update of a checkout, say: their structures may be other ones."""
    need_native()
    monkeypatch.setattr(native_library, "checksum", lambda folder: "0badc0de")
    library.cache_clear()
    try:
        found, notice = kernels.backend("auto", 1)
        assert found.name == "reference" and "compiled from older sources" in notice and "reinstall" in notice
    finally:
        library.cache_clear()
