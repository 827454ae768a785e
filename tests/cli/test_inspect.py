"""`kv inspect` on the real models and on small files of every awkward kind."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
from conftest import KvHere

from kvcli.runtime.config import LATENT, RECURRENT, LayerConfig
from kvcli.runtime.headers.facts import f16_row_bytes


def _write(path: Path, arch: str, tensors: bool = True, **keys: object) -> Path:
    """A small GGUF file: metadata of a two-layer model, a vocabulary of four tokens, and perhaps weights."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("Tiny")
    numbers = {"block_count": 2, "embedding_length": 64, "feed_forward_length": 128, "context_length": 256}
    numbers |= {"attention.head_count": 4, "attention.head_count_kv": 2}
    for key, value in numbers.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<s>", "a", "b\x1b[31m", "c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    for key, value in keys.items():
        writer.add_string(key.replace("__", "."), str(value))
    if tensors:
        writer.add_tensor("token_embd.weight", np.zeros((4, 64), np.float32))
        writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float16))
        writer.add_tensor("blk.0.attn_k.weight", np.zeros((32, 68), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.models
def test_smollm2(kv_here: KvHere, smollm2_path: Path) -> None:
    code, out, err = kv_here("inspect", str(smollm2_path), "--json", "--tensors")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["arch"] == "llama" and facts["parameters"] == 134_515_008 and facts["runs"] is True
    assert facts["file_bytes"] == 98_362_432 and facts["context_length"] == 8192
    group = {"kind": "full", "layers": 30, "kv_heads": 3, "dim_k": 64, "dim_v": 64, "window": None}
    group |= {"row_bytes": 3 * (64 + 64) * 2, "state_bytes": 0, "turned": 0}
    assert facts["attention"] == {"kind": "gqa", "groups": [group]}
    # 30 layers x 3 heads x (64 + 64) x 2 bytes
    assert facts["bytes_per_token"] == facts["windows_full_bytes_per_token"] == 23_040
    mix = {share["type"]: share["tensors"] for share in facts["quantization"]}
    assert mix == {"Q4_1": 210, "Q8_0": 1, "F32": 61} and len(facts["tensors"]) == 272
    assert sum(share["size_bytes"] for share in facts["quantization"]) == facts["weight_bytes"]
    assert sum(share["weights"] for share in facts["quantization"]) == facts["parameters"]
    assert facts["tokenizer"]["pre_tokenizer"] == "smollm" and facts["tokenizer"]["bos"] == [1, "<|im_start|>"]
    assert facts["template"]["source"] == "file" and "<|im_start|>" in facts["template"]["text"]
    assert facts["kind"] == "instruct"
    text = kv_here("info", str(smollm2_path))[1]
    shown = ("93.8 MiB", "GQA, 9 query heads", "30 full · 3 KV heads · dim 64", "23,040 bytes a token at f16")
    assert [part for part in shown if part not in text] == []
    assert kv_here("inspect", str(smollm2_path), "--template")[1].startswith("{% for message in messages %}")


@pytest.mark.models
def test_gemma3(kv_here: KvHere, gemma3_path: Path) -> None:
    code, out, err = kv_here("inspect", str(gemma3_path), "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    groups = {group["kind"]: group for group in facts["attention"]["groups"]}
    assert groups["sliding"]["layers"] == 15 and groups["sliding"]["window"] == 512
    assert groups["full"]["layers"] == 3 and groups["full"]["dim_k"] == 256
    assert facts["attention"]["kind"] == "mqa"
    assert facts["bytes_per_token"] == 18 * 512 * 2
    assert facts["windows_full_bytes_per_token"] == 3 * 512 * 2
    assert (facts["kind"], facts["template"]["source"]) == ("base", "none")
    text = kv_here("inspect", str(gemma3_path))[1]
    assert "15 sliding (window 512) · 1 KV head · dim 256" in text
    assert "18,432 bytes a token at f16, 3,072 once the windows are full" in text


def test_a_small_model(kv_here: KvHere, tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", "llama", tokenizer__chat_template="{{ messages }}\n")
    code, out, err = kv_here("inspect", str(path), "--tensors")
    assert (code, err) == (0, "") and "\x1b" not in out
    lines = out.splitlines()
    assert "Tiny · llama · 6.4 K parameters" in lines[1]
    assert "2 full · 2 KV heads · dim 16" in out and "256 bytes a token at f16" in out
    assert "weights    F16 1 (8.0 KiB) · Q8_0 1 (2.1 KiB) · F32 1 (1.0 KiB)" in out
    assert "gpt2 (pre smollm) · 4 tokens · bos 0 <s> · eos 2 b\\x1b[31m" in out
    assert lines[-1].split() == ["blk.0.attn_k.weight", "32", "x", "64", "Q8_0", "2,176"]
    assert kv_here("inspect", str(path), "--template") == (0, "{{ messages }}\n", "")


def test_layers_that_keep_a_state_and_that_keep_nothing(kv_here: KvHere) -> None:
    code, out, err = kv_here("inspect", str(tiny.make("nemotron_h").path))
    assert (code, err) == (0, "")
    for line in ("2 recurrent · state of 4,608 bytes in f32", "3 feed-forward · nothing kept", "1 full · 2 KV heads"):
        assert line in out
    _, out, _ = kv_here("estimate", str(tiny.make("nemotron_h").path))
    assert "1 full + 2 recurrent + 3 feed-forward layers" in out


def test_a_vocabulary_only_file(kv_here: KvHere, tmp_path: Path) -> None:
    path = _write(tmp_path / "vocab.gguf", "llama", tensors=False)
    code, out, err = kv_here("inspect", str(path))
    assert (code, err) == (0, "")
    assert "runs       no: the file holds a vocabulary and no weights" in out and "4 tokens" in out
    code, out, _ = kv_here("inspect", str(path), "--json", "--tensors")
    facts = json.loads(out)
    assert code == 0 and facts["runs"] is False and facts["tensors"] == [] and facts["parameters"] == 0


def _adapter(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 16.0)
    for part in ("a", "b"):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{part}", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
def test_an_adapter_is_no_model(kv_here: KvHere, tmp_path: Path) -> None:
    path = str(_adapter(tmp_path / "lora.gguf"))
    code, out, err = kv_here("inspect", path)
    reason = "the file holds a LoRA adapter for llama models, not a model"
    assert (code, err) == (0, "") and f"runs       no: {reason}\n" in out and "template   none\n" in out
    facts = json.loads(kv_here("inspect", path, "--json")[1])
    assert (facts["runs"], facts["problem"], facts["kind"]) == (False, reason, None)
    for command in (("estimate", path), ("run", "-m", path, "--no-stdin", "hi")):
        assert kv_here(*command) == (3, "", f"kv: error: {reason}\n  give it as --lora, beside its model\n")


def test_a_name_that_is_not_utf8(kv_here: KvHere, tmp_path: Path) -> None:
    path = _write(tmp_path / "tiny.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"Tiny", b"T\xefny"))
    code, out, err = kv_here("inspect", str(path))
    assert (code, err) == (0, "") and "model      T\ufffdny · llama" in out


def test_an_unknown_architecture(kv_here: KvHere, tmp_path: Path) -> None:
    code, out, err = kv_here("inspect", str(_write(tmp_path / "new.gguf", "novel")))
    assert (code, err) == (0, "") and "runs       no: kv does not run the architecture 'novel'" in out
    assert "template   base model: no chat template in the file" in out
    code, out, err = kv_here("inspect", str(tmp_path / "new.gguf"), "--template")
    assert code == 3 and out == "" and "has no chat template" in err and "base model" in err
    code, out, _ = kv_here("inspect", str(_write(tmp_path / "small-it.gguf", "gemma3")))
    assert code == 0 and "kv's own for gemma3 is used (" in out


def test_a_type_that_kv_does_not_compute_with(kv_here: KvHere, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "iq.gguf", "llama")
    for key, value in (
        ("block_count", 1),
        ("embedding_length", 256),
        ("feed_forward_length", 64),
        ("context_length", 8),
    ):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code, out, _ = kv_here("inspect", str(tmp_path / "iq.gguf"))
    assert code == 0 and "runs       no: tensor token_embd.weight is stored as Q8_K" in out
    assert "context    8 tokens trained on" in out, "what the keys say is shown all the same"
    assert json.loads(kv_here("inspect", str(tmp_path / "iq.gguf"), "--json")[1])["runs"] is False


def test_options_that_exclude_each_other(kv_here: KvHere) -> None:
    for other in ("--tensors", "--json"):
        assert kv_here("inspect", "x.gguf", "--template", other)[0] == 2


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "is not a GGUF file but a PNG image"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "is not a GGUF file (it begins with 'root:x:0')"),
        (b"GGUF\x03\x00\x00\x00", "bad.gguf"),
    ],
)
def test_bad_files_are_one_line(content: bytes | None, message: str, kv_here: KvHere, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    if content is not None:
        path.write_bytes(content)
    code, out, err = kv_here("inspect", str(path))
    assert code == 3 and out == "" and message in err
    assert len(err.splitlines()) <= 2 and err.startswith("kv: error: ")
    code, out, err = kv_here("inspect", str(path), "--json")
    assert code == 3 and err == "" and message in json.loads(out)["error"]["message"]


def test_row_bytes_of_other_kinds() -> None:
    assert f16_row_bytes(LayerConfig(LATENT, 1, 64, 512)) == 576 * 2
    assert f16_row_bytes(LayerConfig("full", 4, 512, 512, turned=128)) == 4 * 640 * 2
    assert f16_row_bytes(LayerConfig(RECURRENT, 0, 0, 0, state_bytes=100)) == 0
    assert f16_row_bytes(LayerConfig("full", 8, 128, 128, shares_kv_with=0)) == 0
