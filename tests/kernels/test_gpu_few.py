"""Products of packed matrices with a few rows, against the same weights expanded to float16."""

from __future__ import annotations

import pytest
import torch
from gpucases import DEVICE
from kernelcases import packed

from kvcli.blockformats import FORMATS, FORMS, PLAIN
from kvcli.kernels.gpu import few, formats

TYPES = [name for name, form in FORMS.items() if form.kind != PLAIN]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize(("rows", "t", "parts"), [(70, 1, 2), (64, 16, 1), (130, 21, 3)])
def test_a_few_rows(type_: str, rows: int, t: int, parts: int) -> None:
    cols = {64: 320, 128: 384, 256: 768}.get(FORMATS[type_].elements, 288)
    weights = packed(type_, rows, cols)
    matrix = formats.repack((weights,), torch.device(DEVICE), False)
    x = torch.randn(t, cols, generator=torch.manual_seed(2)).half()
    out = torch.full((parts, t, rows + 9), torch.nan, device=DEVICE)
    few.product(x.to(DEVICE), matrix, out[:, :, 4 : 4 + rows])
    expected = x.double() @ weights.decode().half().double().T
    found = out[:, :, 4 : 4 + rows].double().sum(0).cpu()
    assert float((found - expected).norm() / expected.norm()) < 3e-6  # what tensor cores make of float32 sums
    assert out[:, :, :4].isnan().all() and out[:, :, 4 + rows :].isnan().all()
