"""Weights on a GPU take the bytes that the plan says: against the code that repacks them, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import KvHere
from synthetics import module

from kvcli.blockformats import FORMATS, WEIGHT_FORMATS
from kvcli.kernels import QuantTensor
from kvcli.kernels.gpu import formats
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig
from kvcli.runtime.formats.ggufheader import TensorInfo
from kvcli.runtime.host.memory import CPU, CUDA
from kvcli.runtime.plan import footprint, repacked

MIB = 1 << 20


@pytest.mark.parametrize("type_", WEIGHT_FORMATS)
@pytest.mark.parametrize("shape", [(32, 256), (96, 1536)])
def test_predicted_bytes_are_those_of_the_arrays(type_: str, shape: tuple[int, int]) -> None:
    rows, cols = shape
    form = FORMATS[type_]
    blocks = torch.randint(0, 256, (rows, cols // form.elements * form.bytes), dtype=torch.uint8)
    matrix = formats.repack((QuantTensor(type_, blocks, cols),), torch.device("cpu"))
    assert repacked.device_bytes(type_, shape, blocks.numel()) == matrix.nbytes


def test_weights_of_a_file() -> None:
    def tensor(type_: str, nbytes: int, *shape: int) -> TensorInfo:
        return TensorInfo("x", shape, type_, 0, nbytes)

    config = ModelConfig("llama", "x", 512, 256, 512, 4, 1 << 15, 1e-5, (LayerConfig(FULL, 2, 64, 64),), 1.0)
    tensors = {
        "token_embd.weight": tensor("Q6_K", 512 * 210, 512, 256),
        "output.weight": tensor("Q4_K", 512 * 144, 512, 256),
        "blk.0.attn_q.weight": tensor("Q2_K", 256 * 84, 256, 256),
        "blk.0.attn_norm.weight": tensor("F16", 512, 256),
    }
    found = footprint.weights_of_tensors(tensors, config, CUDA)
    q4, kept = 512 * 256 * 37 // 64, 256 * 84 + 4 * 256
    assert (found.packed, found.copies, found.read) == (512 * 210 + q4 + kept, 0, q4 + kept)
    assert (
        found.in_file
        == sum(t.nbytes for t in tensors.values())
        == footprint.weights_of_tensors(tensors, config, CPU).packed
    )
    assert found.part(2).in_file == found.in_file // 2
    del tensors["output.weight"]  # the head is the embedding, which then is read
    assert footprint.weights_of_tensors(tensors, config, CUDA).read == 512 * 210 + kept


def test_estimate_shows_both_sizes(tmp_path: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "model.gguf"
    synthetic = module()
    synthetic.write(path, synthetic.Shape(4, 1024, 4096, 16, 4, 64, vocab=4096, context=2048), "Q4_K_M")
    code, out, err = kv_here("estimate", str(path), "--gpu", "rtx3060-12g", "-c", "2048")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    row = next(line for line in out.splitlines() if line.startswith("weights"))
    on_cpu = json.loads(kv_here("estimate", str(path), "--device", "cpu", "--json")[1])
    in_file = next(each["predicted_bytes"] for each in on_cpu["fixed"] if each["name"] == "weights")
    resident = int(row.split()[1])
    assert row.split("exact: ")[1] == f"repacked; {in_file / MIB:,.0f} MiB in the file" and resident > in_file / MIB
    assert f" {8 * in_file / on_cpu['model_info']['parameters']:.2f} bits/weight" in out  # those of the file


@pytest.mark.parametrize(
    ("dims", "types", "reason"),
    [
        ((64, 64), {"blk.0.attn_q.weight": "Q4_K", "token_embd.weight": "Q6_K"}, ""),
        ((64, 64), {"blk.0.attn_q.weight": "Q8_K"}, "blk.0.attn_q.weight is stored as Q8_K"),
        ((60, 64), {}, "a head dim of 60"),
        ((64, 520), {}, "a head dim of 520"),
        ((64, 64), {"blk.0.ffn_gate.weight": "Q4_K", "blk.0.ffn_up.weight": "Q6_K"}, "gate and up of layer 0"),
    ],
)
def test_what_a_gpu_cannot_compute(dims: tuple[int, int], types: dict[str, str], reason: str) -> None:
    layers = (LayerConfig(FULL, 2, *dims),)
    config = ModelConfig("llama", "x", 512, 256, 512, 4, 1 << 15, 1e-5, layers, 1.0)
    found = repacked.unfit(config, types)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.slow
def test_a_model_that_a_gpu_cannot_compute_is_told_before_loading(
    monkeypatch: pytest.MonkeyPatch, kv_here: KvHere
) -> None:
    import tiny

    from kvcli.errors import ModelError
    from kvcli.options import CacheOptions, LoadOptions
    from kvcli.runtime.engine import loaded, opened
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.host.device import Device

    monkeypatch.setattr(loaded, "choose", lambda name: Device(CUDA, 0, "a card"))
    monkeypatch.setattr(opened, "check_there", lambda *card: None)
    monkeypatch.setattr(repacked, "MOST_HEAD_DIM", 4)
    path = tiny.make("llama").path
    engine = Engine.open(path, LoadOptions("llama"), CacheOptions())
    assert engine.device.kind == CPU and "runs on the CPU" in engine.notices[0] and "head dim" in engine.notices[0]
    with pytest.raises(ModelError, match="head dim"):
        Engine.open(path, LoadOptions("llama", device="cuda"), CacheOptions())
    assert "cannot be computed on a GPU: a head dim" in kv_here("estimate", "-v", str(path), "--vram", "8G")[2]
    assert "on a GPU" not in kv_here("estimate", "-v", str(path), "--device", "cpu")[2]
