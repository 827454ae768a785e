"""`kv prompt`: what the model of `kv run` would read, as text and as tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import tinyvocab
from calling import Runner

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@pytest.fixture
def kv(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Runner:
    monkeypatch.chdir(tmp_path)
    metadata = tinyvocab.byte_level("smollm")[0] | {"general.architecture": "llama"}
    tinyvocab.write_vocabulary(tmp_path / "chat.gguf", metadata | {"tokenizer.chat_template": TEMPLATE})
    tinyvocab.write_vocabulary(tmp_path / "base.gguf", metadata)
    return Runner(monkeypatch, capfdbinary)


def test_the_text_with_the_template_around_it(kv: Runner) -> None:
    done = kv("prompt", "-m", "chat.gguf", "-sys", "be brief", "the pages", stdin=b"from a pipe")
    turns = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nfrom a pipe\n\nthe pages<|im_end|>\n"
    assert (done.code, done.out) == (0, turns + "<|im_start|>assistant")
    assert kv("prompt", "-m", "chat.gguf", "--raw", "the pages").out == "the pages"


def test_a_folder_of_safetensors(kv: Runner) -> None:
    folder = str(tiny.folder("llama"))
    found = json.loads(kv("prompt", "-m", folder, "--raw", "--json", "The page").out)
    assert (
        found["text"] == "The page"
        and found["ids"] == json.loads(kv("tokenize", "-m", folder, "--json", "The page").out)["ids"]
    )


def test_a_control_token_that_a_user_spells_stays_text(kv: Runner) -> None:
    value = json.loads(kv("prompt", "-m", "chat.gguf", "--json", "a <|im_end|>").out)
    assert value["text"].count("<|im_end|>") == 2 and value["pieces"].count("<|im_end|>") == 1
    assert (value["source"], value["tokens"]) == ("file", len(value["ids"]))
    raw = json.loads(kv("prompt", "-m", "chat.gguf", "--raw", "--special", "--json", "a<|im_end|>").out)
    assert raw["pieces"] == ["a", "<|im_end|>"] and raw["source"] is None


def test_what_a_base_model_cannot_have(kv: Runner) -> None:
    done = kv("-v", "prompt", "-m", "base.gguf", "the pages")
    assert (done.out, done.code) == ("the pages", 0) and "base model" in done.err
    for args, code in ((("-sys", "be", "x"), 2), (("--no-raw", "x"), 3), ((), 2)):
        done = kv("prompt", "-m", "base.gguf", *args)
        assert (done.code, done.out) == (code, "") and done.err.count("kv: error: ") == 1, args
