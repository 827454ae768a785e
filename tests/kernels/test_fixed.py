"""Products of rows in fixed point with interleaved weights, against their torch reference and float32."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from kernelcases import ISAS, backends_of, in_file, in_files, native, one_thread, packed, same_bits

from kvcli.blockformats import FORMATS, INTERLEAVED, INTERLEAVED_ROWS
from kvcli.kernels.cpu import backend
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.interleaved import Interleaved
from kvcli.kernels.reference.fixed import MOST, fixed_matmul, rounded
from kvcli.kernels.reference.matmul import QuantTensor, matmul

WITH_FIXED = ISAS[:-1]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def rows_of(m: int, k: int, seed: int = 0) -> torch.Tensor:
    """Rows with an outlier, a block of zeros and one of nearly nothing."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 50
    x[0, 32:64], x[-1, k - 32 :] = 0, 1e-36
    return x


def test_rounded_rows_are_near():
    x = rows_of(4, 256)
    off = (rounded(x) - x).abs().unflatten(1, (-1, 32)).amax(-1)
    assert (off <= x.abs().unflatten(1, (-1, 32)).amax(-1) * (0.501 / MOST) + 1e-30).all()


@pytest.mark.parametrize("isa", WITH_FIXED)
@pytest.mark.parametrize("type", INTERLEAVED)
def test_products_are_the_references_and_rows_do_not_depend_on_each_other(type: str, isa: str):
    ops = native(isa)
    k = 3 * FORMATS[type].elements
    stacked = packed(type, 45, k), packed(type, 5, k, seed=1), packed(type, 32, k, seed=2)
    placed = ops.place(stacked)
    assert all(isinstance(w, Interleaved) for w in placed)
    for m in (1, 2, 5, 8, 13, 37):
        x = rows_of(m, k)
        found, wanted = ops.matmul(x, placed), fixed_matmul(x, stacked)
        size = matmul(x.abs(), [QuantTensor("F32", w.decode().abs().view(torch.uint8), k) for w in stacked])
        assert ((found - wanted).abs() <= 4e-6 * size).all()
        assert ((found - matmul(x, stacked)).abs() <= 2e-3 * size + 1e-6).all()
        alone = torch.cat([ops.matmul(x[i : i + 1], placed) for i in range(m)])
        assert same_bits(found, alone)


@pytest.mark.parametrize("isa", WITH_FIXED)
@pytest.mark.parametrize("type", INTERLEAVED)
def test_interleaved_rows_decode_to_the_bit(type: str, isa: str):
    w = packed(type, 37, 2 * FORMATS[type].elements, wild=True)
    (placed,) = native(isa).place((w,))
    assert placed.nbytes == -(-37 // INTERLEAVED_ROWS) * INTERLEAVED_ROWS * w.blocks.shape[1]
    ids = torch.tensor([36, 0, 16, 15, 31, 0])
    assert torch.equal(native(isa).rows(placed, ids, 3.0), w.decode()[ids] * 3.0)


@pytest.mark.parametrize("type", ("Q4_1", "Q6_K"))
def test_weights_of_a_file_are_interleaved_when_they_are_used(type: str, tmp_path: Path):
    """Slabs of rows are uses of their own. Single rows are looked up before and behind."""
    ops, ids = in_files(NativeBackend(2)), torch.tensor([36, 0, 16])
    stacked = tuple(in_file(packed(type, rows, 512), tmp_path / str(rows)) for rows in (37, 4111))
    placed, at_once = ops.place(stacked), native().place(stacked)
    x = rows_of(259, 512)
    wanted = native().matmul(x, at_once)
    rows = native().rows(at_once[0], ids, 3.0)
    for m, kept in ((9, 0), (259, ops.pending_bytes), (2, ops.pending_bytes)):
        assert torch.equal(ops.rows(placed[0], ids, 3.0), rows)
        assert same_bits(ops.matmul(x[:m], placed), wanted[:m])
        assert ops.interleaved_bytes == kept and bool(placed[0].blocks.any()) == (kept > 0)
    for each in stacked:
        each.blocks.zero_()
    assert same_bits(ops.matmul(x, placed), wanted) and torch.equal(ops.rows(placed[0], ids, 3.0), rows)


def test_instruction_sets_and_threads_give_the_same_bits():
    k, x = 512, rows_of(9, 512)
    stacked = tuple(packed(type, 48, k) for type in INTERLEAVED)
    found = [ops.matmul(x, ops.place(stacked)) for ops in backends_of(WITH_FIXED, (1, 3))]
    assert all(same_bits(each, found[0]) for each in found[1:])


def test_products_add_in_place_beside_matrices_of_other_formats():
    ops, x = native(), rows_of(3, 256)
    stacked = packed("Q4_K", 20, 256), packed("F16", 7, 256), packed("Q8_0", 33, 256), packed("IQ4_NL", 16, 256)
    placed = ops.place(stacked)
    start = torch.randn(3, 76)
    wanted = start + torch.cat([(fixed_matmul if w.type in INTERLEAVED else matmul)(x, (w,)) for w in stacked], 1)
    found = start.clone()
    assert ops.matmul(x, placed, add_to=found) is found
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_what_is_no_number_stays_in_its_row():
    ops, x = native(), rows_of(3, 64)
    placed = ops.place((packed("Q8_0", 16, 64),))
    clean = ops.matmul(x, placed)
    x[1, 5] = torch.inf
    found = ops.matmul(x, placed)
    assert found[1].isnan().all()
    assert same_bits(found[[0, 2]], clean[[0, 2]])


def test_exact_products_take_weights_as_they_are():
    w = packed("Q4_0", 16, 64)
    ops = NativeBackend(1, exact=True)
    assert ops.place((w,)) == (w,)
    assert ops.arithmetic != native().arithmetic or native().exact


@pytest.mark.skipif(shutil.which("cc") is None or platform.machine() != "x86_64", reason="of compilers for x86")
def test_a_compiler_without_avx_vnni_will_do() -> None:
    """Such as GCC 10: the other instruction sets are there all the same."""
    source = Path(backend.__file__).with_name("cpu.c")

    def compiled(has: int, *how: str) -> str:
        words = ["cc", *how, "-std=gnu11", "-w", '-DKV_SOURCES=""', f"-DKV_AVX_VNNI={has}", str(source)]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    compiled(0, "-fsyntax-only")
    assert ["_avxvnni" in compiled(has, "-E") for has in (0, 1)] == [False, True]
    assert "fixed_avx512vnni" in compiled(0, "-E")
