"""Products of packed matrices with a few rows, against exact ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from gpucases import COMPILED, DEVICE, MORE, OPS, error
from kernelcases import packed

from kvcli.blockformats import EXPONENT, FORMATS, FORMS, PLAIN, D
from kvcli.kernels import LowRank, QuantTensor
from kvcli.kernels.gpu import few, formats
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.wide import HalfRows, weave

TYPES = [name for name, form in FORMS.items() if form.kind != PLAIN]
SIZES = ((70, 1, 2), (160, 21, 3))  # of the second, rows are dealt out


@pytest.mark.parametrize(
    ("type_", "rows", "t", "parts"),
    [
        *((type_, *SIZES[i % 2]) for i, type_ in enumerate(TYPES)),
        *(pytest.param(type_, *SIZES[1 - i % 2], marks=MORE) for i, type_ in enumerate(TYPES)),
        *(pytest.param(type_, 64, 16, 1, marks=COMPILED) for type_ in TYPES),
    ],
)
def test_a_few_rows(type_: str, rows: int, t: int, parts: int) -> None:
    cols = {64: 320, 128: 384, 256: 512 if rows == 70 else 768}.get(FORMATS[type_].elements, 288)
    weights = packed(type_, rows, cols)
    matrix = formats.repack((weights,), torch.device(DEVICE), False, formats.dealt((weights,), False))
    x = torch.randn(t, cols, generator=torch.manual_seed(2)).half()
    out = torch.full((parts, t, rows + 9), torch.nan, device=DEVICE)
    few.product(weave(HalfRows(x.to(DEVICE)), cols).values, matrix, out[:, :, 4 : 4 + rows])
    exact = FORMS[type_].kind in (D, EXPONENT)  # in float16; else scales are rounded to it
    expected = x.double() @ (weights.decode().half() if exact else weights.decode()).double().T
    found = out[:, :, 4 : 4 + rows].double().sum(0).cpu()
    assert float((found - expected).norm() / expected.norm()) < (
        3e-6 if exact else 6e-4
    )  # what tensor cores make of float32 sums
    assert out[:, :, :4].isnan().all() and out[:, :, 4 + rows :].isnan().all()


@pytest.mark.parametrize("type_", ["Q4_K", "Q6_K", "Q4_0", "Q8_0"])
def test_rows_that_are_scaled_by_blocks(type_: str) -> None:
    cols, t = (288 if type_ in ("Q4_0", "Q8_0") else 1280), 3
    weights = packed(type_, 70, cols)
    matrix = formats.repack((weights,), torch.device(DEVICE), False)
    x = torch.randn(t, cols, generator=torch.manual_seed(2)).half()
    scales = torch.rand(t, -(-cols // 256), generator=torch.manual_seed(3))
    out = torch.full((2, t, 70), torch.nan, device=DEVICE)
    few.product(weave(HalfRows(x.to(DEVICE)), cols).values, matrix, out, scales=scales.to(DEVICE))
    expected = (x.double() * scales.double().repeat_interleave(256, 1)[:, :cols]) @ weights.decode().double().T
    found = out.double().sum(0).cpu()
    assert float((found - expected).norm() / expected.norm()) < 6e-4


@pytest.mark.parametrize("t", [1, 5, few.MOST + 1])
def test_matrices_with_changes(t: int) -> None:
    """Stacked, of which some have changes; and gates, paired."""
    ops, cols = GpuBackend(torch.device(DEVICE)), 96

    def matrix(type_: str, seed: int, changes: int) -> QuantTensor:
        more = (LowRank(packed("F32", 3 + i, cols, i), packed("F16", 64, 3 + i, i), 0.3) for i in range(changes))
        return replace(packed(type_, 64, cols, seed), changes=tuple(more))

    stacked = matrix("Q4_0", 1, 2), matrix("Q4_0", 2, 0), matrix("Q8_0", 3, 1)
    pair = matrix("Q4_0", 4, 0), matrix("Q4_0", 5, 1)
    x = torch.randn(t, cols, generator=torch.manual_seed(t))
    found = ops.matmul(x.to(DEVICE), ops.place(stacked)).cpu()
    assert error(found, OPS.matmul(x, stacked)) < 1e-3
    assert error(OPS.matmul(x, tuple(w.unchanged for w in stacked)), OPS.matmul(x, stacked)) > 0.1
    gated = weave(ops.gated(x.to(DEVICE), ops.place(pair, paired=True), "silu"), 64, False)
    values = gated.values.float() if gated.scales is None else gated.values.float() * gated.scales[:, None]
    assert error(values, OPS.gated(x, pair, "silu")) < 2e-3
    ids = torch.tensor([63, 0, 63])
    assert error(ops.rows(ops.place(stacked[:1])[0], ids, 2.0), OPS.rows(stacked[0], ids, 2.0)) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU that is busy")
@pytest.mark.parametrize(("type_", "t"), [("Q4_K", 16), ("Q4_K", 64), ("Q6_K", 16), ("Q5_K", 16)])
def test_every_run_has_the_same_bits(type_: str, t: int) -> None:
    """More programs than a card has room for, so that some of them wait for others: what one reads must stay as it is
    until it was read."""
    piece = formats.repack((packed(type_, 512, 4096),), torch.device(DEVICE), False)
    names = ("codes", "high", "scales", "supers")
    whole = replace(piece, rows=56 * 512, **{name: getattr(piece, name).repeat(56, 1) for name in names})
    x = weave(HalfRows(torch.randn(t, 4096, generator=torch.manual_seed(3)).half().to(DEVICE)), 4096).values
    outs = torch.empty(100, few.parts([whole], t), t, whole.rows, device=DEVICE)
    for out in outs:
        few.product(x, whole, out)
    pieces = outs.sum(1).view(100, t, 56, 512)
    assert torch.equal(pieces, pieces[:1, :, :1].expand_as(pieces))
