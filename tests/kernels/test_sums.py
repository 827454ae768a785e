"""Sums and products of the reference: right, and the same bits whatever the order, the shape, threads and processor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kernelcases import same_bits

from kvcli.kernels.reference import sums
from kvcli.kernels.reference.pointwise import glu, rms_norm


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def numbers(*shape: int) -> torch.Tensor:
    """Float32 numbers of many sizes, the same ones with every version of every library."""
    n = torch.Size(shape).numel()
    words = (torch.arange(n, dtype=torch.int64) * 2654435761 + 12345) % (1 << 32)
    words = words ^ (words >> 15)
    return ((words % (1 << 24)).double() / (1 << 22) - 2).float().view(shape)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("n", (1, 2, 3, 7, 20, 33, 64, 100, 576))
def test_fold_adds_by_halves(n: int):
    x = numbers(n, 5)
    rows = list(x.clone())
    while len(rows) > 1:
        half = len(rows) // 2
        for i in range(half):
            rows[i] = rows[i] + rows[len(rows) - half + i]
        del rows[-half:]
    assert same_bits(sums.fold(x.clone()), rows[0])
    assert torch.allclose(rows[0].double(), x.double().sum(0), atol=1e-4)
    assert same_bits(sums.total(x.t()), rows[0])


@pytest.mark.parametrize("k", (1, 33, 64, 576, 5000))
def test_dot_is_right_and_the_same_bits_in_any_order(k: int):
    x, w = numbers(19, k), numbers(7, k).flip(1)
    w[3] *= 2.0**-40
    exact = x.double() @ w.double().t()
    size = x.double().norm(dim=1)[:, None] * w.double().norm(dim=1)
    whole = sums.dot(sums.split(x), w)
    assert whole.shape == (19, 7) and ((whole - exact).abs() <= 2e-7 * size).all()
    for i in range(19):
        assert same_bits(sums.dot(sums.split(x[i : i + 1]), w), whole[i : i + 1])
    for i in range(7):
        assert same_bits(sums.dot(sums.split(x), w[i : i + 1]), whole[:, i : i + 1])
    order = torch.arange(k).flip(0).roll(k // 3)
    assert same_bits(sums.dot(sums.split(x[:, order]), w[:, order]), whole)
    batched = sums.dot(sums.split(torch.stack((x, -x))), torch.stack((w, w)))
    assert same_bits(batched[0], whole) and same_bits(batched[1], -whole)


def product(x: list[float], w: list[float]) -> float:
    return sums.dot(sums.split(torch.tensor([x])), torch.tensor([w])).item()


def test_products_of_numbers_of_all_sizes():
    assert product([1.0, 0.5, 0.0, 2.0], [3.0, -4.0, 5.0, 0.25]) == 1.5
    assert product([0.0, 0.0], [1.0, 2.0]) == product([1.0, 2.0], [0.0, 0.0]) == 0.0
    assert product([2.0**-149, 2.0**-130], [2.0**100, -(2.0**100)]) == 2.0**-49 - 2.0**-30
    assert product([1e-45], [3e38]) == pytest.approx(2.0**-149 * 3e38, rel=1e-6)
    assert product([3e38, 0.0], [1.0, 1.0]) == pytest.approx(3e38, rel=1e-6)
    assert product([3e38, 3e38], [1.0, 1.0]) == torch.inf
    rows = torch.tensor([[1.0, 0.0], [2.0**30, 2.0**-90]])
    assert sums.mix(torch.tensor([[1.0, 2.0**-25]]), rows).tolist() == [[33.0, 0.0]]


def test_what_is_no_number_stays_in_its_row():
    x = numbers(3, 8)
    for bad in (torch.inf, torch.nan):
        x[1, 5] = bad
        assert sums.dot(sums.split(x), numbers(4, 8)).isnan().all(1).tolist() == [False, True, False]


def test_mix_sees_no_row_of_weight_zero():
    p, rows = exp_weights(3, 5, 64), numbers(3, 64, 9)
    exact = torch.einsum("btk,bkn->btn", p.double(), rows.double())
    found = sums.mix(p, rows)
    assert (
        (found - exact).abs() <= 2e-7 * p.double().norm(dim=2)[..., None] * rows.double().norm(dim=1)[:, None]
    ).all()
    hidden = p.clone()
    hidden[:, :, 40:] = 0
    seen = sums.mix(hidden, rows)
    for other in (1e30, 1e-30, 0.0):
        changed = rows.clone()
        changed[:, 40:] *= other
        assert same_bits(sums.mix(hidden, changed), seen)
    for i in range(5):
        assert same_bits(sums.mix(p[:, i : i + 1], rows), found[:, i : i + 1])


def exp_weights(*shape: int) -> torch.Tensor:
    return sums.exp(numbers(*shape) * 20 - 40)


def test_roots_are_rounded_as_the_processor_rounds_them():
    """Which numpy leaves to it."""
    x = torch.cat((numbers(100_003).abs() * 1e-3, torch.tensor([0.0, 1e-45, 1e-38, 3e38, torch.inf])))
    assert same_bits(sums.sqrt(x), torch.from_numpy(np.sqrt(x.numpy())))
    assert sums.sqrt(torch.tensor([-1.0, torch.nan])).isnan().all()


def test_exp_and_tanh_are_right():
    x = torch.linspace(-90, 90, 100_001)
    found, exact = sums.exp(x), x.double().clamp(max=88).exp()
    near = x >= -87.3
    assert ((found.double() - exact).abs() <= 2.5 * 2**-24 * 2 * exact)[near].all()
    assert (found[~near] == 0).all()
    special = sums.exp(torch.tensor([0.0, -0.0, -torch.inf, torch.nan]))
    assert special[:3].tolist() == [1.0, 1.0, 0.0] and special[3].isnan()
    found, exact = sums.tanh(x / 4), (x / 4).double().tanh()
    assert ((found.double() - exact).abs() <= 4 * 2**-24 * exact.abs()).all()
    assert sums.tanh(torch.tensor([torch.inf, -torch.inf, 1e4, -0.0])).tolist() == [1.0, -1.0, 1.0, 0.0]


@pytest.mark.parametrize("threads", (1, 2, 3))
def test_threads_cut_nothing_where_it_shows(threads: int):
    """torch cuts long operations up among its threads, and what is left of a vector it may compute in another way."""
    torch.set_num_threads(threads)
    x = numbers(401, 2 * 257)
    for f in (lambda x: glu(x, "silu"), lambda x: glu(x, "gelu"), lambda x: rms_norm(x, x[0] * 0 + 1, 1e-6)):
        whole = f(x)
        for i in range(401):
            assert same_bits(f(x[i : i + 1]), whole[i : i + 1])


def test_the_same_bits_on_every_processor():
    """The digests were made once; nothing about a machine or a library may change them."""
    x, w = numbers(3, 5, 576), numbers(3, 11, 576).flip(0)
    found = {
        "dot": sums.dot(sums.split(x), w),
        "mix": sums.mix(exp_weights(2, 4, 64), numbers(2, 64, 32)),
        "exp": sums.exp(numbers(1000) * 40),
        "tanh": sums.tanh(numbers(1000) * 2),
        "silu": glu(numbers(7, 66) * 3, "silu"),
        "gelu": glu(numbers(7, 66) * 3, "gelu"),
        "rms_norm": rms_norm(numbers(7, 100), numbers(100), 1e-6),
    }
    assert {name: digest(value) for name, value in found.items()} == {
        "dot": "ad733d5ed50e7e15",
        "mix": "298869182ed73499",
        "exp": "9b99fc498b055d77",
        "tanh": "878052c013e6609f",
        "silu": "4c8363062da340af",
        "gelu": "57390cc79f3fbd22",
        "rms_norm": "5cf2fc7cd8920b9f",
    }
