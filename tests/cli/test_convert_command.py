"""kv convert, and commands on folders of safetensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tiny
from conftest import KvHere
from jsonchecks import check

import kvcli
from kvcli.errors import ModelError, UsageError
from kvcli.runtime.formats.gguf import GGUFFile


def answer(model: str, quantize: str | None) -> str:
    with kvcli.load(model, ctx=64, quantize=quantize) as opened:
        return "".join(opened.generate("The page", max_tokens=6, temperature=0))


def test_a_folder_becomes_a_file_that_answers_alike(kv_here: KvHere, tmp_path: Path) -> None:
    folder, path = str(tiny.folder("gemma3")), tmp_path / "x.gguf"
    assert kv_here("convert", folder, "-o", str(path))[:2] == (0, f"{path}\n")
    from_folder, from_file = (kv_here("tokenize", "--ids", "The page", "-m", each) for each in (folder, str(path)))
    assert from_folder[0] == 0 and from_folder[1] and from_folder[1] == from_file[1]
    texts = [answer(each, quantize=None) for each in (folder, str(path))]
    assert texts[0] == texts[1] != ""
    shown = [kv_here("inspect", each)[1].splitlines()[2:] for each in (folder, str(path))]
    assert shown[0] == shown[1] and len(shown[0]) > 5


def test_json(kv_here: KvHere, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    _, out, _ = kv_here("convert", str(tiny.folder("llama")), "-o", str(path), "--quantize", "bf16", "--json")
    found = json.loads(out)
    check("convert", found)
    assert (found["path"], found["file_bytes"]) == (str(path), path.stat().st_size)
    assert {t.type for t in GGUFFile.open(path).tensors.values() if len(t.shape) == 2} == {"BF16"}


def test_matrices_that_are_packed_otherwise_are_told(kv_here: KvHere, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    code, out, err = kv_here("convert", str(tiny.folder("gemma3")), "-o", str(path), "--quantize", "q6_k", "--json")
    others = json.loads(out)["other_types"]
    there = {name: tensor.type for name, tensor in GGUFFile.open(path).tensors.items()}
    assert code == 0 and others and all(there[name] == type != "Q6_K" for name, type in others.items())
    assert err.startswith("kv: rows that are no whole blocks of Q6_K are stored otherwise: token_embd.weight")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"num_hidden_layers": 2},
            "num_hidden_layers in config.json is 2, and the folder has the tensor model.layers.2",
        ),
        ({"num_hidden_layers": 4}, "the file has no tensor blk.3.attn_q.weight"),
        ({"hidden_size": 96}, "tensor blk.0.attn_q.weight has the shape [48, 48], [48, 96] is needed"),
        ({"vocab_size": 400}, "vocab_size in config.json is 400, and the embedding has 377 rows"),
        ({"vocab_size": 300}, "vocab_size in config.json is 300, and the embedding has 377 rows"),
        ({"intermediate_size": 96}, "tensor blk.0.ffn_gate.weight has the shape [80, 48], [96, 48] is needed"),
        (
            {"model_type": "gpt2", "hidden_act": "gelu_new"},
            "kv neither runs nor converts models of the architecture 'gpt2'",
        ),
        (None, "config.json lacks the key num_hidden_layers\n  the file is incomplete: download it again"),
    ],
)
def test_a_config_of_other_weights_is_refused(
    change: dict[str, object] | None, told: str, kv_here: KvHere, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({} if change is None else config | change))
    code, _, err = kv_here("convert", str(folder), "-o", str(tmp_path / "x.gguf"))
    assert code == 3 and err.startswith(f"kv: error: {told}")
    with pytest.raises(ModelError, match=re.escape(told.splitlines()[0])):
        kvcli.load(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_estimate_counts_what_is_packed(kv_here: KvHere, tmp_path: Path) -> None:
    folder, path = str(tiny.folder("llama")), tmp_path / "x.gguf"
    assert kv_here("convert", folder, "-o", str(path), "--quantize", "bf16")[0] == 0

    def weights(*words: str) -> int:
        code, out, _ = kv_here("estimate", *words, "--device", "cpu", "--json")
        assert code == 0
        return next(each["predicted_bytes"] for each in json.loads(out)["fixed"] if each["name"] == "weights")

    assert weights(folder, "--quantize", "bf16") == weights(str(path)) < weights(folder)
    args = kv_here("estimate", folder, "--device", "cpu", "--quantize", "bf16", "--print-args")[1]
    assert "--quantize bf16" in args
    code, _, err = kv_here("estimate", str(path), "--quantize", "q8_0")
    assert code == 2 and "--quantize is counted for folders of safetensors that are here" in err


def test_nothing_beside_the_file_is_touched(kv_here: KvHere, tmp_path: Path) -> None:
    path, part = tmp_path / "x.gguf", tmp_path / "x.gguf.part"
    part.write_text("mine")
    assert kv_here("convert", str(tiny.folder("llama")), "-o", str(path))[0] == 0
    assert part.read_text() == "mine" and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "-o", "x.gguf"], "kv: error: nowhere is no folder"),
        (["FOLDER", "-o", "there"], "kv: error: there is there already"),
        (["FOLDER", "-o", "x.gguf", "--quantize", "q4_9"], "kv: error: --quantize cannot be 'q4_9'"),
        (
            ["FOLDER", "-o", "x.gguf", "--quantize", "iq2_s"],
            "kv: error: --quantize cannot be 'iq2_s'\n  there are q8_0",
        ),
        (["FOLDER", "-o", "-"], "kv: error: - cannot be the GGUF file"),
        (["FOLDER", "-o", "link", "--force"], "kv: error: link is a link to there, which kv does not replace"),
        (["FOLDER", "-o", "pipe", "--force"], "kv: error: pipe cannot be the GGUF file"),
        (["FOLDER"], "kv: error: --output is missing"),
    ],
)
def test_what_makes_no_sense(
    words: list[str], told: str, kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("mine")
    os.mkfifo("pipe")
    Path("link").symlink_to("there")
    code, _, err = kv_here("convert", *(str(tiny.folder("llama")) if word == "FOLDER" else word for word in words))
    assert code == 2 and err.startswith(told)
    assert Path("there").read_text() == "mine" and not Path("x.gguf").exists() and Path("pipe").is_fifo()


def test_what_cannot_be_written_leaves_nothing(kv_here: KvHere, tmp_path: Path) -> None:
    code, _, err = kv_here("convert", str(tiny.folder("llama")), "-o", str(tmp_path / "none" / "x.gguf"))
    assert code != 0 and "cannot be written" in err and list(tmp_path.iterdir()) == []
    (tmp_path / "empty").mkdir()
    code, _, err = kv_here("convert", str(tmp_path / "empty"), "-o", str(tmp_path / "x.gguf"))
    assert code == 3 and "is a folder without model.safetensors" in err


def test_weights_are_packed_while_a_folder_is_read() -> None:
    folder = str(tiny.folder("llama"))
    with kvcli.load(folder, ctx=64, quantize="bf16") as model:
        assert {t.type for t in model.engine.loaded.file.tensors.values() if len(t.shape) == 2} == {"BF16"}
    assert answer(folder, quantize="bf16")
    with pytest.raises(UsageError, match="packs the weights of a folder"):
        answer(str(tiny.make("llama").path), quantize="q8_0")
    with pytest.raises(UsageError, match="did you mean q4_k"):
        answer(folder, quantize="q4_kk")
