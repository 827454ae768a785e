"""Products of rows in fixed point with interleaved matrices of experts, against their torch reference and alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expertcases import layer, random, stack
from kernelcases import ISAS, backends_of, in_file, in_files, native, one_thread, same_bits

from kvcli.blockformats import FORMATS, INTERLEAVED, INTERLEAVED_ROWS
from kvcli.kernels import ExpertMatrices, ExpertTensor
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.cpu.interleaved import Interleaved, InterleavedExperts
from kvcli.kernels.reference.experts import matmul_experts
from kvcli.kernels.reference.fixed import fixed_matmul, fixed_matmul_experts
from kvcli.kernels.reference.matmul import QuantTensor, matmul

WITH_FIXED = ISAS[:-1]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def beside_poison(rows: int, cols: int, seed: int = 1) -> torch.Tensor:
    """Random rows with an outlier, among NaN."""
    x = torch.full((rows, cols + 5), torch.nan)
    x[:, :cols] = random(rows, cols, seed=seed)
    x[:, 3] *= 50
    return x[:, :cols]


def chosen(t: int) -> torch.Tensor:
    """Two experts of five for each row: one is in all of them, one in none, and one in the last row alone."""
    ids = torch.cat([torch.full((t, 1), 3), (torch.arange(t) % 2)[:, None]], 1)
    ids[-1, 1] = 4
    return ids


class Sizes:
    """How large products are: those of absolute values."""

    @staticmethod
    def matmul(x: torch.Tensor, weights: list[QuantTensor]) -> torch.Tensor:
        decoded = [QuantTensor("F32", w.decode().abs().view(torch.uint8), w.cols) for w in weights]
        return matmul(x.abs(), decoded)


@pytest.mark.parametrize("isa", WITH_FIXED)
@pytest.mark.parametrize("type_", INTERLEAVED)
def test_products_are_the_references_and_pairs_do_not_depend_on_each_other(type_: str, isa: str):
    ops, k = native(isa), 2 * FORMATS[type_].elements
    weights = ExpertMatrices((stack(type_, 5, 37, k), stack(type_, 5, 16, k, seed=1)), random(5, 53))
    placed = ops.place_experts(weights)
    assert all(isinstance(w, InterleavedExperts) for w in placed.parts)
    for t, each in ((1, 2), (2, 2), (41, 2), (41, 1)):
        ids, x = chosen(t), beside_poison(2 * t // each, k)
        found, wanted = ops.matmul_experts(x, placed, ids), fixed_matmul_experts(x, weights, ids)
        size = matmul_experts(Sizes, x, ExpertMatrices(weights.parts, weights.bias.abs()), ids)
        assert ((found - wanted).abs() <= 4e-6 * size).all()
        assert ((found - matmul_experts(ops, x, weights, ids)).abs() <= 2e-3 * size + 1e-6).all()
        for p, expert in enumerate(ids.flatten().tolist()):
            alone = ops.matmul(x[p // each][None], [w.of(expert) for w in placed.parts])
            assert same_bits(found[p : p + 1], alone + placed.bias[expert])


def test_instruction_sets_and_threads_give_the_same_bits():
    k, x = 256, beside_poison(23, 256)
    weights = ExpertMatrices(tuple(stack(type_, 5, 20, k) for type_ in INTERLEAVED))
    both = backends_of(WITH_FIXED, (1, 3))
    found = [ops.matmul_experts(x, ops.place_experts(weights), chosen(23)) for ops in both]
    assert all(same_bits(each, found[0]) for each in found[1:])


def test_matrices_of_other_formats_stay_as_they_are_beside_interleaved_ones():
    """Some parts are interleaved, and one of them lies apart, a tensor for each expert."""
    ops, x, ids = native(), beside_poison(9, 256), chosen(9)
    parts = stack("Q4_K", 5, 20, 256), stack("IQ4_NL", 5, 7, 256), stack("F16", 5, 3, 256), stack("Q8_0", 5, 33, 256)
    apart = ExpertTensor("Q5_K", tuple(stack("Q5_K", 5, 18, 256).blocks), 256)
    weights = ExpertMatrices((*parts, apart))
    placed = ops.place_experts(weights)
    assert [isinstance(w, InterleavedExperts) for w in placed.parts] == [True, False, False, True, True]
    wanted = [(fixed_matmul_experts if w.type in INTERLEAVED else lambda *a: matmul_experts(ops, *a))(
        x, ExpertMatrices((w,)), ids) for w in weights.parts]  # fmt: skip
    assert torch.allclose(ops.matmul_experts(x, placed, ids), torch.cat(wanted, 1), rtol=1e-4, atol=1e-4)


def test_more_pairs_than_are_there_at_a_time():
    """They are cut where an expert has rows on both sides."""
    ops, t = native(), 1100
    placed = ops.place_experts(ExpertMatrices((stack("Q4_0", 5, 16, 32),)))
    x, ids = beside_poison(t, 32), chosen(t)
    whole = ops.matmul_experts(x, placed, ids)
    pieces = [ops.matmul_experts(x[i : i + 100], placed, ids[i : i + 100]) for i in range(0, t, 100)]
    assert same_bits(torch.cat(pieces), whole)


def test_what_is_no_number_stays_in_its_row_and_unchosen_experts_are_not_read():
    ops, x, ids = native(), beside_poison(9, 64), chosen(9)
    weights = ExpertMatrices((stack("Q8_0", 5, 16, 64),))
    placed = ops.place_experts(weights)
    clean = ops.matmul_experts(x, placed, ids)
    x[4, 5] = torch.inf
    placed.parts[0].blocks[2] = 0xFF  # scales that are NaN, of the one that nobody has
    found = ops.matmul_experts(x, placed, ids)
    assert found[8:10].isnan().all()
    others = [p for p in range(18) if p not in (8, 9)]
    assert same_bits(found[others], clean[others])


def test_exact_experts_are_taken_as_they_are_and_rows_of_the_two_are_told_apart():
    weights = ExpertMatrices((stack("Q4_0", 5, 16, 64),))
    assert NativeBackend(1, exact=True).place_experts(weights) is weights
    ops = native()
    dense = ops.arithmetic
    placed = ops.place_experts(weights)
    assert ops.arithmetic != dense
    assert ops.interleaved_bytes == placed.parts[0].nbytes == weights.parts[0].nbytes
    one = placed.parts[0].of(1)
    assert isinstance(one, Interleaved) and one.nbytes == INTERLEAVED_ROWS * weights.parts[0].blocks.stride(1)
    assert torch.equal(ops.rows(one, torch.arange(16)), weights.parts[0].of(1).decode())


@pytest.mark.parametrize("threads", (1, 3))
def test_experts_of_a_file_are_interleaved_when_they_are_used(threads: int, tmp_path: Path):
    """The first use keeps nothing, the second one what it makes; products are the same ones."""
    ids, x = chosen(11), beside_poison(11, 512)
    parts = [in_file(stack(type_, 5, rows, 512), tmp_path / type_) for type_, rows in (("Q4_K", 37), ("Q6_K", 80))]
    wanted = native().matmul_experts(x, native().place_experts(ExpertMatrices(tuple(parts))), ids)
    ops = in_files(NativeBackend(threads))
    placed = ops.place_experts(ExpertMatrices(tuple(parts)))
    first, each = placed.parts[0], sum(part.nbytes // 5 for part in placed.parts)
    assert (ops.interleaved_bytes, ops.pending_bytes) == (0, 5 * each)
    assert same_bits(ops.matmul_experts(x, placed, ids), wanted)
    assert (ops.interleaved_bytes, ops.pending_bytes) == (0, 5 * each) and not first.blocks.any()
    assert same_bits(ops.matmul_experts(x, placed, ids), wanted)
    assert (ops.interleaved_bytes, ops.pending_bytes) == (4 * each, each)
    assert [bool(x.any()) for x in first.blocks] == [True, True, False, True, True]
    for part in parts:
        part.blocks.zero_()  # what is kept is read instead
    assert same_bits(ops.matmul_experts(x, placed, ids), wanted)


def test_what_is_left_is_interleaved_at_once_for_processes_that_are_forked(tmp_path: Path):
    ops, ids, x = in_files(NativeBackend(1)), chosen(6), beside_poison(6, 64)
    weights = ExpertMatrices((in_file(stack("Q5_0", 5, 37, 64), tmp_path / "weights"),))
    placed, other = ops.place_experts(weights), ops.place_experts(weights)
    wanted = ops.matmul_experts(x, placed, ids)
    ops.finish()
    assert ops.pending_bytes == 0 and ops.interleaved_bytes == 2 * placed.parts[0].nbytes
    weights.parts[0].blocks.zero_()
    assert same_bits(ops.matmul_experts(x, other, ids), wanted)


def test_heads_have_matrices_of_their_own():
    ops, x, w = native(), beside_poison(7 * 5, 64).view(7, 5, 64), ExpertMatrices((stack("Q8_0", 5, 21, 64),))
    placed = ops.place_heads(w)
    found = ops.by_head(x, placed)
    wanted = fixed_matmul_experts(x.flatten(0, 1), w, torch.arange(5).repeat(7, 1)).view(7, 5, 21)
    assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert same_bits(torch.cat([ops.by_head(x[i : i + 1], placed) for i in range(7)]), found)


@pytest.mark.parametrize("biased", (False, True))
def test_a_mixture_is_that_of_the_reference_and_rows_do_not_depend_on_others(biased: bool):
    ops, x, made = native(), random(33, 64) * 0.1, layer(True, biased)
    experts = {"gate_up": ops.place_experts(made.gate_up), "down": ops.place_experts(made.down)}
    exact, placed = ops.experts(x, made), type(made)(**vars(made) | experts)
    found = ops.experts(x, placed)
    assert torch.allclose(found, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max())) and not same_bits(found, exact)
    assert same_bits(torch.cat([ops.experts(x[lo:hi], placed) for lo, hi in ((0, 1), (1, 9), (9, 33))]), found)


def test_a_reference_with_one_expert_is_that_of_a_matrix():
    x, w = beside_poison(3, 64), stack("Q4_1", 1, 8, 64)
    found = fixed_matmul_experts(x, ExpertMatrices((w,)), torch.zeros(3, 1, dtype=torch.int64))
    assert torch.equal(found, fixed_matmul(x, [w.of(0)]))
