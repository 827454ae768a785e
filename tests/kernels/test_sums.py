"""Sums in an order of our own: right, and the same bits whatever the shape, the threads and the processor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

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


@pytest.mark.parametrize("terms", (1, 500, 1 << 19))
def test_dot_is_cut_anywhere_without_a_change(terms: int, monkeypatch: pytest.MonkeyPatch):
    x, w = numbers(33, 3, 19), numbers(33, 3, 7).flip(0)
    whole = sums.dot(x, w)
    assert torch.allclose(whole.double(), torch.einsum("kbt,kbn->btn", x.double(), w.double()), atol=1e-4)
    monkeypatch.setattr(sums, "TERMS", terms)
    assert same_bits(sums.dot(x, w), whole)
    for i in range(19):
        assert same_bits(sums.dot(x[:, :, i : i + 1], w), whole[:, i : i + 1])


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
    x, w = numbers(576, 3, 5), numbers(576, 3, 11).flip(0)
    found = {
        "dot": sums.dot(x, w),
        "exp": sums.exp(numbers(1000) * 40),
        "tanh": sums.tanh(numbers(1000) * 2),
        "silu": glu(numbers(7, 66) * 3, "silu"),
        "gelu": glu(numbers(7, 66) * 3, "gelu"),
        "rms_norm": rms_norm(numbers(7, 100), numbers(100), 1e-6),
    }
    assert {name: digest(value) for name, value in found.items()} == {
        "dot": "6973e7855e5c2416",
        "exp": "9b99fc498b055d77",
        "tanh": "878052c013e6609f",
        "silu": "4c8363062da340af",
        "gelu": "57390cc79f3fbd22",
        "rms_norm": "46505cef9f5c0095",
    }
