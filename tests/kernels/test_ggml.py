"""Block decoding: bit for bit the gguf package's values on random bytes, and blocks worked out by hand."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import gguf
import numpy as np
import packgrids
import pytest
import torch

from kvcli.blockformats import FORMATS, WEIGHT_FORMATS
from kvcli.kernels.grids import _PACKED, DOUBLED_E2M1, NONLINEAR, grids
from kvcli.kernels.reference.ggml import DECODERS, decode
from kvcli.runtime.formats.gguf import GGUFFile

NOT_IN_QUANTS = {"F64", "I8", "I16", "I32", "I64", "Q1_0"}  # formats that gguf has, but does not decode


def test_every_format_of_weights_can_be_decoded() -> None:
    assert set(DECODERS) == set(WEIGHT_FORMATS)
    theirs = {kind.name for kind in gguf.GGMLQuantizationType}
    assert theirs - set(WEIGHT_FORMATS) == {"Q8_1", "Q8_K"}, "of activations: no tensor of a file is stored so"


def test_the_grids_are_those_of_the_gguf_package() -> None:
    for name, grid in grids().items():
        theirs = getattr(gguf.quants, name)
        theirs.init_grid()
        assert np.array_equal(grid, theirs.grid.reshape(grid.shape))
    assert packgrids.packed() == _PACKED
    assert gguf.quants.IQ4_NL.kvalues == NONLINEAR and gguf.quants.MXFP4.kvalues == DOUBLED_E2M1


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def decoded(type: str, *fields: bytes) -> list[float]:
    return decode(type, torch.tensor(list(b"".join(fields)), dtype=torch.uint8)).tolist()


def reference(type: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # random scales: infinities and their differences are wanted here
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])


@pytest.mark.parametrize("type", [name for name in DECODERS if name not in NOT_IN_QUANTS])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_gguf_package_bit_for_bit(type: str, seed: int):
    form = FORMATS[type]
    raw = np.random.default_rng(seed).integers(0, 256, (64, 3 * form.bytes), dtype=np.uint8)
    found = decode(type, torch.from_numpy(raw)).numpy()
    expected = reference(type, raw)
    assert found.dtype == np.float32 and found.shape == expected.shape == (64, 3 * form.elements)
    assert np.isfinite(expected).mean() > 0.8
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found[numbers].view(np.uint32), expected[numbers].view(np.uint32))


@pytest.mark.parametrize("type", DECODERS)
def test_leading_dims_strides_and_slices(type: str):
    size = FORMATS[type].bytes
    raw = torch.randint(0, 256, (3, 4, 2 * size), dtype=torch.uint8, generator=torch.manual_seed(0))
    whole = decode(type, raw)
    assert whole.shape == (3, 4, 2 * FORMATS[type].elements)
    for view in (raw[1], raw[:, 2], raw[:, ::2], raw[2, 3], raw[..., size:], raw.transpose(0, 1)):
        expected = decode(type, view.contiguous())
        assert torch.equal(decode(type, view).view(torch.int32), expected.view(torch.int32))
    assert torch.equal(decode(type, raw[2, 3]).view(torch.int32), whole[2, 3].view(torch.int32))
    assert decode(type, raw[:0]).shape == (0, 4, 2 * FORMATS[type].elements)


@pytest.mark.parametrize("type", DECODERS)
def test_the_input_is_left_alone(type: str):
    raw = torch.full((2 * FORMATS[type].bytes,), 0x35, dtype=torch.uint8)
    decode(type, raw)
    assert torch.all(raw == 0x35)


def test_plain_floats():
    assert decoded("F32", struct.pack("<2f", 1.5, -(2.0**-149))) == [1.5, -(2.0**-149)]
    assert decoded("F16", half(-0.25), half(2.0**-24)) == [-0.25, 2.0**-24]
    halves = struct.pack("<f", 3.0)[2:], struct.pack("<f", -(2.0**-126))[2:]
    assert decoded("BF16", *halves) == [3.0, -(2.0**-126)]
    assert decoded("F64", struct.pack("<2d", 0.1, 1e300)) == [struct.unpack("<f", struct.pack("<f", 0.1))[0], math.inf]


@pytest.mark.parametrize(("type", "code"), [("I8", "b"), ("I16", "h"), ("I32", "i"), ("I64", "q")])
def test_integers(type: str, code: str):
    size = struct.calcsize(code)
    numbers = [1, -1, -(1 << 8 * size - 1), (1 << 7) - 1]
    assert decoded(type, struct.pack(f"<4{code}", *numbers)) == numbers  # all exact in float32


def test_q1_0_by_hand():
    values = decoded("Q1_0", half(0.5), bytes([0b1000_0001]), bytes(14), bytes([0x80]))
    assert [i for i, value in enumerate(values) if value == 0.5] == [0, 7, 127] and set(values) == {0.5, -0.5}


def test_four_bits_by_hand():
    qs = bytes(range(0x00, 0x100, 0x10))  # low halves 0, high halves 0..15
    assert decoded("Q4_0", half(0.5), qs) == [-4.0] * 16 + [0.5 * (i - 8) for i in range(16)]
    assert decoded("Q4_1", half(2.0), half(-1.0), qs) == [-1.0] * 16 + [2.0 * i - 1 for i in range(16)]


def test_five_bits_by_hand():
    qs = bytes(16)
    only_3_and_17 = struct.pack("<I", 1 << 3 | 1 << 17)
    values = decoded("Q5_0", half(1.0), only_3_and_17, qs)
    assert values == [0.0 if i in (3, 17) else -16.0 for i in range(32)]
    values = decoded("Q5_1", half(0.5), half(1.0), only_3_and_17, qs)
    assert values == [9.0 if i in (3, 17) else 1.0 for i in range(32)]


def test_eight_bits_by_hand():
    values = decoded("Q8_0", half(0.5), bytes([0x80, 0xFF, 0x7F]), bytes(29))
    assert values == [-64.0, -0.5, 63.5] + [0.0] * 29


def test_q2_k_by_hand():
    scales = bytes([0x21] + [0x00] * 14 + [0x3F])  # run 0: s 1, m 2; run 15: s 15, m 3
    qs = bytes([0b00_00_00_10]) + bytes(62) + bytes([0b01_00_00_00])
    values = decoded("Q2_K", scales, qs, half(2.0), half(0.5))
    assert values[0] == 2.0 * 1 * 2 - 0.5 * 2 and values[1:16] == [-1.0] * 15
    assert values[16:240] == [0.0] * 224
    assert values[240:] == [-1.5] * 15 + [2.0 * 15 * 1 - 0.5 * 3]


def test_q3_k_by_hand():
    hmask = bytes([0x01]) + bytes(31)  # only element 0 has its third bit
    scales = bytes([0x01] + [0] * 7) + bytes([0x02, 0, 0, 0])  # run 0: 1 + 16 * 2 = 33, all others 0
    values = decoded("Q3_K", hmask, bytes([0b11]) + bytes(63), scales, half(1.0))
    assert values[0] == (33 - 32) * (3 + 4 - 4) and values[1:16] == [-4.0] * 15
    assert values[16:] == [128.0] * 240


def test_q4_k_by_hand():
    # Scale 0 is 63, minimum 0 is 1; scale 4 is 0b11_0101, minimum 4 0b01_1000, upper bits in bytes 0 and 4.
    scales = bytes([0xFF, 0, 0, 0, 0x41, 0, 0, 0, 0x85, 0, 0, 0])
    qs = bytes([0x02]) + bytes(63) + bytes([0x0F]) + bytes(63)
    values = decoded("Q4_K", half(1.0), half(2.0), scales, qs)
    assert values[0] == 63 * 2 - 2 * 1 and values[1:32] == [-2.0] * 31 and values[32:128] == [0.0] * 96
    assert values[128] == 0b11_0101 * 15 - 2 * 0b01_1000 and values[129] == -2.0 * 0b01_1000


def test_q5_k_by_hand():
    scales = bytes([1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1])
    qh = bytes([0b1000_0001]) + bytes(31)  # element 0 of runs 0 and 7
    values = decoded("Q5_K", half(1.0), half(1.0), scales, qh, bytes([0x23]) + bytes(127))
    assert {i: v for i, v in enumerate(values) if v} == {0: 19.0, 32: 2.0, 224: 16.0}


def test_q6_k_by_hand():
    ql = bytes([0x21]) + bytes(127)
    qh = bytes([0b01_00_00_11]) + bytes(63)
    scales = struct.pack("<16b", -1, *[1] * 15)
    values = decoded("Q6_K", ql, qh, scales, half(0.5))
    assert values[0] == -0.5 * (1 + 16 * 3 - 32) and values[1:16] == [16.0] * 15
    assert values[64] == 0.5 * (2 - 32) and values[96] == 0.5 * (16 - 32) and values[97] == -16.0


def test_wrong_inputs_are_named():
    with pytest.raises(ValueError, match="Q8_K"):
        decode("Q8_K", torch.zeros(292, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"n \* 18"):
        decode("Q4_0", torch.zeros(19, dtype=torch.uint8))
    with pytest.raises(ValueError, match="float32"):
        decode("Q4_0", torch.zeros(18))
    with pytest.raises(ValueError, match="Q4_0"):
        decode("Q4_0", torch.zeros((), dtype=torch.uint8))


@pytest.mark.models
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_tensors(fixture: str, request: pytest.FixtureRequest):
    path: Path = request.getfixturevalue(fixture)
    file = GGUFFile.open(path)
    one_of_each = {tensor.type: tensor for tensor in file.tensors.values()}
    assert len(one_of_each) >= 3
    for type, tensor in one_of_each.items():
        rows = file.data(tensor.name).reshape(*tensor.shape[:-1], -1)[:64]
        found = decode(type, torch.from_numpy(rows)).numpy()
        assert np.isfinite(found).all() and found.any()
        assert np.array_equal(found, reference(type, rows))
