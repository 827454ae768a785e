"""Folders of safetensors: the same model as transformers', and as the GGUF file that they become."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
import torch
from archcases import IDS, Loaded
from kernelcases import one_thread
from safetensors.torch import load_file, save_file

from kvcli.errors import ModelError, UsageError
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.headers.ggufwriter import write_gguf
from kvcli.runtime.headers.openmodel import open_model
from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel
from kvcli.runtime.promptcache.fingerprint import model_hashes


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def same(one: Any, other: Any) -> bool:
    """Whether two values of a key are one; numbers are kept in 32 bits."""
    if isinstance(one, float) or isinstance(other, float):
        return np.float32(one) == np.float32(other)
    return list(one) == list(other) if isinstance(one, (list, tuple)) else bool(one == other)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in tiny.VARIANTS if name not in tiny.FILES_ALONE])
def test_a_folder_is_the_model_of_transformers_and_the_file_that_a_converter_writes(variant: str, tmp_path: Path):
    made = tiny.make(variant)
    with SafetensorsModel(tiny.folder(variant)) as model:
        loaded = Loaded(model, "")
        assert (loaded.run(Sequence(loaded.pool), IDS) - made.logits(IDS)).abs().max() <= 1e-4
        write_gguf(model, tmp_path / "x.gguf")
        converted, by_hand = GGUFFile.open(tmp_path / "x.gguf"), GGUFFile.open(made.path)
        assert set(model.tensors) == set(converted.tensors) == set(by_hand.tensors)
        for name, tensor in model.tensors.items():
            other = converted.tensors[name]
            data, more = converted.data(name), other.shape[0] - tensor.shape[0]
            if name.startswith("per_layer_token_embd"):  # tokens without a row have the first one
                first = data[: tensor.nbytes // tensor.shape[0]]
                assert other.shape[0] == max(tensor.shape[0], model.tensors["token_embd.weight"].shape[0])
                assert np.array_equal(data[tensor.nbytes :], np.tile(first, more))
            assert (tensor.shape[0] + more, *tensor.shape[1:], tensor.type) == (*other.shape, other.type)
            assert np.array_equal(model.data(name), data[: tensor.nbytes])
            assert np.allclose(*(x.data(name).view(np.float32) for x in (model, by_hand)), rtol=1e-6, atol=0)
        for key, value in model.metadata.items():
            there = converted.metadata[key]
            if key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):  # llama.cpp wants a text for each row
                assert len(there) == model.tensors["token_embd.weight"].shape[0]
                there = list(there)[: len(value)]
            assert same(there, value), key
    arch = model.metadata["general.architecture"]
    implied = {f"{arch}.{key}" for key in ("n_deepstack_layers", "rope.scaling.type")}
    for key, value in by_hand.metadata.items():
        if not key.startswith("tokenizer.") and key not in implied:
            assert same(model.metadata[key], value), key


# --- what llama.cpp's own tools see ---


def test_the_file_is_read_by_the_package_of_llama_cpp(tmp_path: Path):
    path = tmp_path / "x.gguf"
    write_gguf(SafetensorsModel(tiny.folder("gemma3"), "Q8_0"), path)
    reader = gguf.GGUFReader(path)
    known = {
        f"{gguf.TENSOR_NAMES[kind].format(bid=i)}"
        for kind in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.GEMMA3]
        for i in range(3)
    }
    assert {tensor.name.rpartition(".")[0] for tensor in reader.tensors} <= known
    assert reader.get_field("general.architecture").contents() == "gemma3"
    assert reader.get_field("general.quantization_version").contents() == 2
    assert reader.get_field("gemma3.attention.sliding_window_pattern").contents() == [True, False, True]
    weight = next(each for each in reader.tensors if each.name == "blk.0.attn_v.weight")
    assert weight.tensor_type == gguf.GGMLQuantizationType.F32  # 48 columns are no whole blocks
    tokens = reader.get_field("tokenizer.ggml.tokens").contents()
    assert tokens[:3] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    types = reader.get_field("tokenizer.ggml.token_type")
    assert types.types == [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]


# --- other ways in which weights lie there ---


def altered(tmp_path: Path, variant: str = "llama-untied", config: Any = None, **tensors: Any) -> Path:
    """A copy of a folder with other tensors (None = without them), and other keys of its config."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder(variant), folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")
    if config is not None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def test_numbers_of_sixteen_bits_stay(tmp_path: Path):
    weights = load_file(tiny.folder("llama-untied") / "model.safetensors")
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16")):
        folder = altered(tmp_path / name, **{key: value.to(dtype) for key, value in weights.items()})
        model = SafetensorsModel(folder)
        assert {t.type for t in model.tensors.values() if len(t.shape) > 1} == {name}
        assert {t.type for t in model.tensors.values() if len(t.shape) == 1} == {"F32"}
        down = weights["model.layers.1.mlp.down_proj.weight"].to(dtype)
        assert torch.equal(torch.from_numpy(model.data("blk.1.ffn_down.weight").copy()).view(dtype), down.flatten())
        norm = weights["model.norm.weight"].to(dtype).float()
        assert torch.equal(torch.from_numpy(model.data("output_norm.weight").copy()).view(torch.float32), norm)


def test_shards_are_one_model(tmp_path: Path):
    folder, whole = altered(tmp_path), SafetensorsModel(tiny.folder("llama-untied"))
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {f"model-{i + 1:05d}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, keys in shards.items():
        save_file({key: weights[key] for key in keys}, folder / file)
    index = {"weight_map": {key: file for file, keys in shards.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = open_model(folder / "model-00002-of-00003.safetensors")
    assert all(np.array_equal(model.data(name), whole.data(name)) for name in whole.tensors)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors, which its index names"):
        open_model(folder)


def test_a_language_model_inside_another_one(tmp_path: Path):
    """What sees is left out, and names have one more word."""
    folder = altered(tmp_path, "gemma3")
    weights = load_file(folder / "model.safetensors")
    inner = {key.replace("model.", "model.language_model.", 1): value for key, value in weights.items()}
    save_file({**inner, "model.vision_tower.patch.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": config, "vision_config": {"num_hidden_layers": 2}}
    (folder / "config.json").write_text(json.dumps(outer))
    model, plain = SafetensorsModel(folder), SafetensorsModel(tiny.folder("gemma3"))
    assert set(model.tensors) == set(plain.tensors)
    assert all(np.array_equal(model.data(name), plain.data(name)) for name in plain.tensors)


@pytest.mark.parametrize("type", ("Q8_0", "Q6_K", "Q4_K", "Q4_0", "BF16"))
def test_matrices_are_packed_on_the_way(type: str):
    """Rows of 48 elements are whole blocks of no format but numbers; 64 are of those of 32, 256 of all."""
    from kvcli.runtime.formats.packing import packed_types

    shapes = {f"blk.0.ffn_{n}.weight": ((8, n), "F32") for n in (48, 64, 256)}
    others = {"output.weight": ((9, 256), "F32"), "output_norm.weight": ((256,), "F32")}
    types = packed_types({**shapes, **others, "blk.0.ffn_gate_inp.weight": ((8, 256), "F32")}, type)
    narrow = {"Q6_K": "Q8_0", "Q4_K": "Q5_0"}.get(type, type)
    assert list(types.values()) == [
        "BF16" if type == "BF16" else "F32", narrow, type, type if type in ("Q8_0", "BF16") else "Q6_K", "F32", "F32"
    ]  # fmt: skip


def test_a_gguf_file_is_not_packed(tmp_path: Path):
    with pytest.raises(UsageError, match="packs the weights of a folder"):
        open_model(tiny.make("llama").path, "Q8_0")


def test_packed_weights_run_and_are_near(tmp_path: Path):
    folder, expected = tiny.folder("llama-untied"), tiny.make("llama-untied").logits(IDS)
    loaded = Loaded(SafetensorsModel(folder, "BF16"), "")
    error = (loaded.run(Sequence(loaded.pool), IDS) - expected).std() / expected.std()
    assert 1e-4 < error < 0.03


def fp8(tmp_path: Path) -> Path:
    """The folder with the matrices of its layers in FP8."""
    weights = load_file(tiny.folder("llama-untied") / "model.safetensors")
    tensors = {}
    for name, weight in weights.items():
        if "_proj" in name:
            scale = weight.abs().max() / 448
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
    how = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return altered(tmp_path, config={"quantization_config": how, "dtype": "bfloat16"}, **tensors)


def test_fp8_runs_and_says_what_it_takes(tmp_path: Path):
    folder, expected = fp8(tmp_path), tiny.make("llama-untied").logits(IDS)
    model = SafetensorsModel(folder)
    assert len(model.notices) == 1 and model.notices[0].startswith(
        "the weights are stored as FP8, and unpacked to BF16: "
    )
    loaded = Loaded(model, "")
    error = (loaded.run(Sequence(loaded.pool), IDS) - expected).std() / expected.std()
    assert 1e-3 < error < 0.2  # of three bits
    packed = SafetensorsModel(folder, "F16")
    assert packed.notices == [
        "the weights are stored as FP8; they are unpacked and packed again as F16 while they are read"
    ]


def test_prompt_caches_know_a_folder_by_what_lies_in_it(tmp_path: Path):
    """Another form of the weights is another model; the same folder elsewhere is the same."""
    copy = altered(tmp_path)
    one, packed, other = (
        SafetensorsModel(tiny.folder("llama-untied")),
        SafetensorsModel(copy, "F16"),
        SafetensorsModel(copy),
    )
    hashes = [model_hashes(model)["weights"] for model in (one, packed, other, other, packed)]
    assert hashes[0] == hashes[2] == hashes[3] != hashes[1] == hashes[4]


# --- what is wrong with a folder ---


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        SafetensorsModel(folder)
    assert "\n" not in error.value.message
    return error.value.message


def test_a_bad_folder_is_one_line(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is a folder without model.safetensors" in refusal(empty)
    good = tiny.folder("llama-untied")

    def broken(name: str) -> Path:
        shutil.copytree(good, tmp_path / name)
        return tmp_path / name

    folder = broken("no-config")
    (folder / "config.json").unlink()
    assert "has no config.json beside its weights" in refusal(folder)
    for text, what in (("[1]", "not an object"), ("{", "not valid JSON"), ("{}", "lacks the key"), ("", "is empty")):
        (folder / "config.json").write_text(text)
        assert what in refusal(folder)
    folder = broken("truncated")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    assert "is truncated" in refusal(folder)
    folder = broken("index")
    for index, what in (
        ({"weight_map": {"a": "../x.safetensors"}}, "not a .safetensors file beside it"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"absent": "model.safetensors"}}, "tensor 'absent' is not in model.safetensors"),
    ):
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert what in refusal(folder)
    folder = broken("no-tokenizer")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer that kv reads" in refusal(folder)


def test_tensors_that_are_wrong_are_named(tmp_path: Path):
    name = "model.layers.1.mlp.up_proj.weight"
    cases: list[tuple[dict[str, Any], Any, str]] = [
        ({"some.other.weight": torch.ones(3)}, None, "tensor some.other.weight has no name in a GGUF file of llama"),
        (
            {name: torch.ones(80, 48, dtype=torch.int32)},
            None,
            f"tensor {name} is stored as I32, which kv does not read",
        ),
        ({name: torch.ones(80, 48, dtype=torch.float8_e4m3fn)}, None, f"has no tensor {name}_scale"),
        ({"lm_head.weight": None}, None, "has no lm_head.weight"),
        ({}, {"model_type": "nonsense"}, "kv neither runs nor converts models of the architecture 'nonsense'"),
        ({}, {"rope_parameters": {"rope_type": "odd", "rope_theta": 1.0}}, "of the type 'odd'"),
        ({}, {"hidden_act": "gelu"}, "kv's llama has the activation silu, not 'gelu'"),
        ({}, {"clip_qkv": 8.0}, "kv's llama cannot obey clip_qkv = 8.0"),
    ]
    for i, (tensors, config, what) in enumerate(cases):
        assert what in refusal(altered(tmp_path / str(i), config=config, **tensors))
    for i, tensors in enumerate(({name: None}, {name: torch.ones(80, 47)})):
        folder = altered(tmp_path / f"load{i}", **tensors)
        with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight"):
            Loaded(SafetensorsModel(folder), "reference")


def test_layers_without_rope_are_those_that_files_can_name(tmp_path: Path):
    folder = altered(tmp_path, "smollm3", config={"no_rope_layers": [1, 0, 1, 0]})
    assert "every 4th layer has no RoPE, and no others" in refusal(folder)
