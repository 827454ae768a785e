"""Weights that were quantized by others, packed here as their layouts are published, against float64."""

from __future__ import annotations

import json
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save

from kvcli.errors import ModelError
from kvcli.runtime.formats import packedweights
from kvcli.runtime.formats.elements import widened
from kvcli.runtime.formats.packedweights import Source, sources_of
from kvcli.runtime.formats.safetensors import parse_header

RNG = np.random.default_rng(5)


def sources(tensors: dict[str, Any], dtype: str = "float16", **quantization: Any) -> dict[str, Source]:
    """What is made of these tensors, in a file."""
    data = save(
        {name: torch.as_tensor(np.asarray(x)) if isinstance(x, np.ndarray) else x for name, x in tensors.items()}
    )
    header = parse_header(data, len(data), "x")
    config = {"dtype": dtype, "quantization_config": quantization} if quantization else {"dtype": dtype}
    return sources_of(header.tensors, lambda t: np.frombuffer(data, np.uint8, t.nbytes, t.offset), config)


def close(source: Source, expected: np.ndarray) -> bool:
    """Whether a weight is what it should be, rounded once to its 16 bits."""
    values = widened(source.type, source.read())
    assert source.shape == values.shape == expected.shape and not source.direct
    return np.allclose(values, expected, rtol=2**-8 if source.type == "BF16" else 2**-11, atol=1e-6)


def words(integers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Integers [..., n] in 32-bit words [..., n * bits / 32]: number order[i] of a word stands at place i. Those of 3
    bits are one after the other in three words."""
    if bits == 3:
        number = sum(
            integers.reshape(*integers.shape[:-1], -1, 32)[..., i].astype(object) << (3 * i) for i in range(32)
        )
        parts = np.stack([(number >> (32 * i)) & 0xFFFFFFFF for i in range(3)], -1)
        return parts.astype(np.uint32).reshape(*integers.shape[:-1], -1).view(np.int32)
    each = 32 // bits
    grouped = integers.reshape(*integers.shape[:-1], -1, each).astype(np.uint64)
    placed = grouped[..., list(order or range(each))] << (np.arange(each, dtype=np.uint64) * bits)
    return placed.sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("at_once", (1 << 21, 300 * 128, 1))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_fp8_in_blocks(dtype: str, at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packedweights, "_AT_ONCE", at_once)
    w = torch.from_numpy(RNG.standard_normal((200, 300)).astype(np.float32)).to(torch.float8_e4m3fn)
    scales = RNG.uniform(0.5, 2, (2, 3)).astype(np.float32)
    found = sources(
        {"a.weight": w, "a.weight_scale_inv": scales}, dtype, quant_method="fp8", weight_block_size=[128, 128]
    )
    spread = np.repeat(np.repeat(scales, 128, 0)[:200], 128, 1)[:, :300]
    assert list(found) == ["a.weight"] and found["a.weight"].layout == "FP8"
    assert close(found["a.weight"], w.double().numpy() * spread)


@pytest.mark.parametrize("at_once", (1 << 21, 64))
@pytest.mark.parametrize("shape", ((), (1,), (6, 1), (6,), (6, 4)))
def test_scales_of_rows_groups_or_all(shape: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packedweights, "_AT_ONCE", at_once)
    w = torch.from_numpy(RNG.standard_normal((6, 32)).astype(np.float32)).to(torch.float8_e4m3fn)
    scales = RNG.uniform(0.5, 2, shape).astype(np.float32)
    tensors = {"a.weight": w, "a.weight_scale": torch.tensor(scales), "a.input_scale": torch.ones(1)}
    found = sources(tensors, quant_method="compressed-tensors")
    spread = np.repeat(scales, 8, 1) if shape == (6, 4) else scales.reshape(-1, 1) if shape else scales
    assert list(found) == ["a.weight"] and close(found["a.weight"], w.double().numpy() * spread)
    integers = RNG.integers(-128, 128, (6, 32)).astype(np.int8)
    found = sources({"a.weight": integers, "a.weight_scale": torch.tensor(scales)}, quant_method="compressed-tensors")
    assert close(found["a.weight"], integers * spread.astype(np.float64))


def test_every_number_of_fp8():
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127]
    tensors = {"a.weight": codes.view(torch.float8_e4m3fn).view(2, -1), "a.weight_scale": torch.ones(1)}
    values = widened("F16", sources(tensors, quant_method="fp8")["a.weight"].read())
    assert np.array_equal(values, codes.view(torch.float8_e4m3fn).float().view(2, -1).numpy())


@pytest.mark.parametrize("bits", (3, 4, 8))
@pytest.mark.parametrize("format", ("gptq", "gptq_v2"))
@pytest.mark.parametrize("ordered", (True, False))
def test_gptq(bits: int, format: str, ordered: bool):
    rows, cols, groups = 32, 64, 4
    top = 1 << bits
    q, zeros = RNG.integers(0, top, (cols, rows)), RNG.integers(1, top, (groups, rows))
    scales = RNG.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)
    group = np.arange(cols) // 16 if ordered else RNG.permutation(np.arange(cols) % groups)
    tensors = {
        "m.qweight": words(q.T, bits).T.copy(), "m.scales": scales,
        "m.bias": RNG.standard_normal(rows).astype(np.float16),
        "m.qzeros": words(zeros - (format == "gptq"), bits),
    }  # fmt: skip
    if not ordered:
        tensors["m.g_idx"] = group.astype(np.int32)
    found = sources(tensors, quant_method="gptq", bits=bits, checkpoint_format=format)
    assert set(found) == {"m.weight", "m.bias"}
    assert close(found["m.weight"], ((q - zeros[group]) * scales.astype(np.float64)[group]).T)


def test_awq():
    rows, cols, groups, order = 16, 64, 2, (0, 2, 4, 6, 1, 3, 5, 7)
    q, zeros = RNG.integers(0, 16, (cols, rows)), RNG.integers(0, 16, (groups, rows))
    scales = RNG.uniform(0.01, 0.1, (groups, rows)).astype(np.float16)
    tensors = {"m.qweight": words(q, 4, order), "m.qzeros": words(zeros, 4, order), "m.scales": scales}
    found = sources(tensors, quant_method="awq", bits=4, version="gemm")
    group = np.arange(cols) // 32
    assert close(found["m.weight"], ((q - zeros[group]) * scales.astype(np.float64)[group]).T)
    with pytest.raises(ModelError, match="AWQ in the form 'gemv_fast' is not read by kv"):
        sources(tensors, quant_method="awq", bits=4, version="gemv_fast")


def test_awq_by_rows():
    rows, cols, groups = 6, 64, 2
    q, zeros = RNG.integers(0, 16, (rows, cols)), RNG.integers(0, 16, (rows, 8))
    scales = RNG.uniform(0.01, 0.1, (rows, 8)).astype(np.float16)  # more than there are groups
    tensors = {"m.qweight": words(q, 4), "m.qzeros": words(zeros, 4), "m.scales": scales}
    found = sources(tensors, quant_method="awq", bits=4, version="gemv", group_size=32)
    group = np.arange(cols) // 32
    assert group.max() + 1 == groups and close(
        found["m.weight"], (q - zeros[:, group]) * scales[:, group].astype(float)
    )
    with pytest.raises(ModelError, match="no groups of 48"):
        sources(tensors, quant_method="awq", bits=4, version="gemv", group_size=48)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.mark.parametrize("by", ("modelopt", "compressed-tensors", ""))
def test_nvfp4(by: str):
    q, factor = RNG.integers(0, 16, (6, 64)), 0.0125
    scales = torch.from_numpy(RNG.uniform(0.5, 200, (6, 4)).astype(np.float32)).to(torch.float8_e4m3fn)
    pairs = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)
    expected = E2M1[q] * np.repeat(scales.double().numpy(), 16, 1) * np.float32(factor)
    if by == "compressed-tensors":
        tensors = {"m.weight_packed": pairs, "m.weight_global_scale": torch.tensor([1 / factor])}
        tensors |= {"m.input_global_scale": torch.ones(1)}
    else:
        tensors = {"m.weight": pairs, "m.weight_scale_2": torch.tensor(factor), "m.input_scale": torch.tensor(1.0)}
    tensors["m.weight_scale"] = scales
    found = sources(tensors, "bfloat16", **({"quant_method": by} if by else {}))
    assert list(found) == ["m.weight"] and found["m.weight"].layout == "NVFP4" and close(found["m.weight"], expected)
    with pytest.raises(ModelError, match="pre_quant_scale"):
        sources(tensors | {"m.pre_quant_scale": np.ones(64, np.float32)})
    with pytest.raises(ModelError, match=r"has the shape \[6, 3\]"):
        sources(tensors | {"m.weight_scale": scales[:, :3].contiguous()})


@pytest.mark.parametrize("kind", ("MXFP4", "MXFP8"))
def test_powers_of_two_by_compressed_tensors(kind: str):
    """As its versions of 2026 write them: `mxfp4-pack-quantized` and `mxfp8-quantized`."""
    exponents = RNG.integers(110, 140, (6, 2)).astype(np.uint8)
    scales = np.repeat(2.0 ** (exponents.astype(float) - 127), 32, 1)
    tensors: dict[str, Any] = {"m.weight_scale": exponents}
    if kind == "MXFP4":
        q = RNG.integers(0, 16, (6, 64))
        tensors["m.weight_packed"], values = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8), E2M1[q]
    else:
        tensors["m.weight"] = torch.from_numpy(RNG.normal(size=(6, 64)).astype(np.float32)).to(torch.float8_e4m3fn)
        values = tensors["m.weight"].double().numpy()
    found = sources(tensors, "bfloat16", quant_method="compressed-tensors")
    assert (
        list(found) == ["m.weight"] and found["m.weight"].layout == kind and close(found["m.weight"], values * scales)
    )
    if kind == "MXFP4":
        with pytest.raises(ModelError, match=r"has the shape \[6, 1\]"):
            sources(tensors | {"m.weight_scale": exponents[:, :1].copy()}, quant_method="compressed-tensors")
        with pytest.raises(ModelError, match=r"packed is of a form \(compressed-tensors\)"):
            sources(tensors | {"m.weight_scale": scales[:, :2].copy()}, quant_method="compressed-tensors")


@pytest.mark.parametrize("nested", (True, False))
@pytest.mark.parametrize("kind", ("nf4", "fp4"))
def test_tables_of_bitsandbytes(kind: str, nested: bool):
    shape, n = (6, 100), 600  # the last block is not full
    q, table = RNG.integers(0, 16, n), np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    absmax, tensors = RNG.uniform(0.1, 2, 10).astype(np.float32), {}
    tensors["m.weight.absmax"] = absmax
    if nested:
        codes, wide = RNG.integers(0, 256, 10), RNG.uniform(0.5, 1, 3).astype(np.float32)
        quarter = RNG.uniform(-1, 1, 256).astype(np.float32)
        tensors = {"m.weight.absmax": codes.astype(np.uint8), "m.weight.nested_absmax": wide}
        tensors["m.weight.nested_quant_map"] = quarter
        state |= {"nested_blocksize": 4, "nested_offset": 0.75}
        absmax = quarter[codes] * np.repeat(wide, 4)[:10] + np.float32(0.75)
    tensors["m.weight"] = (q[::2] << 4 | q[1::2]).astype(np.uint8)[:, None]
    tensors["m.weight.quant_map"] = table
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors[f"m.weight.quant_state.bitsandbytes__{kind}"] = text.copy()
    expected = (table[q] * np.repeat(absmax, 64)[:n].astype(float)).reshape(shape)
    found = sources(tensors, "bfloat16", quant_method="bitsandbytes")
    assert list(found) == ["m.weight"] and close(found["m.weight"], expected)
    if (
        not nested
    ):  # of whole rows, saved behind a product on a CPU: bitsandbytes 0.50 leaves the scales as that has them
        whole = state | {"shape": [5, 128]}
        there = {
            f"m.weight.quant_state.bitsandbytes__{kind}": np.frombuffer(json.dumps(whole).encode(), np.uint8).copy()
        }
        more = RNG.integers(0, 16, 640)
        there["m.weight"] = (more[::2] << 4 | more[1::2]).astype(np.uint8)[:, None]
        there["m.weight.absmax"] = absmax.reshape(5, 2).T.copy()
        turned = (table[more] * np.repeat(absmax, 64).astype(float)).reshape(5, 128)
        assert close(sources(tensors | there, "bfloat16", quant_method="bitsandbytes")["m.weight"], turned)
    with pytest.raises(ModelError, match=r"m\.weight\.quant_map has 15 elements, 16 fit"):
        sources(tensors | {"m.weight.quant_map": table[:15].copy()})
    with pytest.raises(ModelError, match=r"m\.weight is stored as I8 \(bitsandbytes\), which kv does not read"):
        sources(tensors | {"m.weight": tensors["m.weight"].view(np.int8)}, quant_method="bitsandbytes")
    half = {"m.weight.quant_map": torch.from_numpy(table).bfloat16()}
    rounded = half["m.weight.quant_map"].float().numpy()
    expected = (rounded[q] * np.repeat(absmax, 64)[:n].astype(float)).reshape(shape)
    assert close(sources(tensors | half, "bfloat16")["m.weight"], expected)


def test_bytes_of_bitsandbytes():
    w, largest = RNG.integers(-127, 128, (6, 32)).astype(np.int8), RNG.uniform(0.1, 2, 6).astype(np.float32)
    tensors = {"m.weight": w, "m.SCB": largest, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = sources(tensors, quant_method="bitsandbytes")
    assert list(found) == ["m.weight"] and close(found["m.weight"], w * (largest.astype(float) / 127)[:, None])


@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("symmetric", (True, False))
def test_compressed_tensors(bits: int, symmetric: bool):
    rows, cols, groups = 16, 48, 3
    q, scales = RNG.integers(0, 1 << bits, (rows, cols)), RNG.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    zeros = np.full((rows, groups), 1 << (bits - 1)) if symmetric else RNG.integers(0, 1 << bits, (rows, groups))
    tensors = {
        "m.weight_packed": words(q, bits), "m.weight_scale": scales, "m.weight_shape": np.array([rows, cols]),
    }  # fmt: skip
    if not symmetric:
        tensors["m.weight_zero_point"] = words(zeros.T, bits).T.copy()
    how = {"group_0": {"weights": {"num_bits": bits, "type": "int"}}}
    found = sources(tensors, quant_method="compressed-tensors", format="pack-quantized", config_groups=how)
    group = np.arange(cols) // 16
    expected = (q - zeros[:, group]) * scales.astype(np.float64)[:, group]
    assert list(found) == ["m.weight"] and close(found["m.weight"], expected)


def test_mxfp4_keeps_its_numbers():
    blocks = RNG.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = RNG.integers(110, 140, (2, 6, 3)).astype(np.uint8)
    found = sources({"e.down_proj_blocks": blocks, "e.down_proj_scales": scales}, quant_method="mxfp4")
    source = found["e.down_proj"]
    assert list(found) == ["e.down_proj"] and (source.type, source.shape) == ("MXFP4", (2, 6, 96))
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    pairs = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], -1).reshape(2, 6, 3, 32)
    expected = (pairs * 2.0 ** (scales.astype(int) - 127)[..., None]).reshape(2, 6, 96)
    unpacked = gguf.quants.dequantize(source.read(), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(unpacked, expected.astype(np.float32))


def test_plain_numbers_are_views_and_counters_are_no_weights():
    found = sources({"a": torch.ones(3), "b": torch.ones(2, dtype=torch.float64), "n": torch.tensor([7])})
    assert set(found) == {"a", "b"} and found["a"].direct and not found["b"].direct
    assert found["b"].type == "F32" and found["b"].read().dtype == np.float32
    assert "scale" in sources({"x.output_scale": torch.ones(3), "y.scale": torch.ones(1)}).popitem()[0]


@pytest.mark.parametrize(
    ("tensors", "how", "what"),
    [
        ({"a.weight": torch.ones(4, 4, dtype=torch.uint8)}, {"quant_method": "bitsandbytes"}, r"U8 \(bitsandbytes\)"),
        ({"a.weight": torch.ones(4, 4, dtype=torch.float8_e5m2)}, {}, "stored as F8_E5M2"),
        ({"a.qweight": torch.ones(4, 4, dtype=torch.int32)}, {"quant_method": "gptq", "bits": 5}, "with 5 bits"),
        ({"a.weight_packed": torch.ones(4, 4, dtype=torch.uint8)}, {"quant_method": "compressed-tensors"}, "form"),
        ({"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(1)}, {}, "with a scale"),
        (
            {"a.weight": torch.ones(4, 4, dtype=torch.int8), "a.weight_scale": torch.ones(3, 1)}, {}, "of no use to"
        ),
    ],
)  # fmt: skip
def test_what_kv_does_not_read_is_named(tensors: dict[str, Any], how: dict[str, Any], what: str):
    with pytest.raises(ModelError, match=what):
        sources(tensors, **how)


def test_parts_that_are_missing_or_misshapen_are_named():
    tensors = {"m.qweight": torch.zeros(8, 16, dtype=torch.int32), "m.scales": torch.ones(4, 16, dtype=torch.float16)}
    with pytest.raises(ModelError, match=r"tensor m\.qzeros is missing"):
        sources(tensors, quant_method="gptq", bits=4)["m.weight"].read()
    tensors["m.qzeros"] = torch.zeros(4, 3, dtype=torch.int32)
    with pytest.raises(ModelError, match=r"m\.qzeros has the shape \[4, 3\], \[4, 2\] is needed"):
        sources(tensors, quant_method="gptq", bits=4)["m.weight"].read()
    tensors |= {"m.qzeros": torch.zeros(4, 2, dtype=torch.int32), "m.g_idx": torch.full((64,), 4, dtype=torch.int32)}
    with pytest.raises(ModelError, match="names groups that are not there"):
        sources(tensors, quant_method="gptq", bits=4)["m.weight"].read()
