"""Weights packed in K formats: read back by others, as near as the bits allow, compiled or not."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kvcli.runtime.formats import kquants, packing
from kvcli.runtime.formats.packing import pack

# Root mean square of the error of normal numbers, relative to theirs, that rows do not exceed on average.
MOST = {"Q2_K": 0.28, "Q3_K": 0.155, "Q4_K": 0.074, "Q5_K": 0.038, "Q6_K": 0.019}


def weights(rows: int = 40) -> np.ndarray:
    """Normal numbers, and rows that are odd: zeros, all alike, of one sign, with outliers, tiny and huge."""
    x = np.random.default_rng(1).standard_normal((rows, 512)).astype(np.float32)
    x[0], x[1], x[2], x[3] = 0, 3, -2, np.abs(x[3])
    x[4, ::9] *= 30
    x[5] *= 1e-6
    x[6] *= 1e3
    return x


def unpacked(type: str, packed: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[type])


def error(type: str, x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    """Of each row, relative to its size."""
    size = np.sqrt((x * x).mean(1))
    return np.sqrt(((unpacked(type, packed) - x) ** 2).mean(1)) / np.maximum(size, 1e-30)


@pytest.mark.parametrize("type", MOST)
def test_packed_weights_are_near(type: str):
    x = weights()
    found = error(type, x, kquants.pack(type, x))
    assert 0.9 * MOST[type] < found[7:].mean() <= MOST[type] and found[7:].max() <= 1.2 * MOST[type]
    assert found[0] == 0 and found[1:5].max() <= 2 * MOST[type] and found[5] <= 1 and found[6] <= 1.2 * MOST[type]


@pytest.mark.parametrize("type", MOST)
def test_the_compiled_search_is_that_of_numpy(type: str, monkeypatch: pytest.MonkeyPatch):
    x = weights()
    fast = kquants.pack(type, x)
    monkeypatch.setattr(kquants, "_library", lambda: None)
    slow = kquants.pack(type, x)
    assert (fast == slow).mean() > 0.99  # sums in another order may choose another candidate
    near = 0.06 if type == "Q2_K" else 0.01  # where a row has outliers, few codes are many ways to err alike
    assert np.allclose(error(type, x, fast), error(type, x, slow), rtol=near, atol=1e-6)


@pytest.mark.parametrize("type", ("Q4_K", "Q8_0", "BF16"))
def test_more_rows_than_are_packed_at_a_time(type: str, monkeypatch: pytest.MonkeyPatch):
    x = weights().astype(np.float16)
    whole = packing.pack(type, x.astype(np.float32).reshape(2, 20, 512))
    monkeypatch.setattr(packing, "_AT_ONCE", 7 * 512)
    assert np.array_equal(packing.pack(type, x, "F16"), whole.reshape(40, -1)) and whole.shape[:2] == (2, 20)


@pytest.mark.parametrize("type", ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"))
def test_other_formats_are_those_of_the_package(type: str):
    x = weights()
    assert np.array_equal(pack(type, x), gguf.quants.quantize(x, gguf.GGMLQuantizationType[type]))


def test_sixteen_bits_are_rounded_to_even():
    import torch

    x = np.concatenate([weights().ravel(), np.array([1.00390625, 1.01171875, -0.0, 3e38], np.float32)])
    expected = torch.from_numpy(x).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(pack("BF16", x).view(np.int16), expected)
