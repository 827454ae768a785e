"""`kv estimate --print-args PROGRAM`: command lines of other programs, and what they leave for the cache."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tiny
from conftest import KvHere

from kvcli.errors import UsageError
from kvcli.peers import mapping, memory
from kvcli.peers.mapping import LLAMA, SGLANG, VLLM
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.headers.shapes import config_from_recipe
from kvcli.runtime.hub.recipes import load_recipes

CARD = ("llama-3.1-8b", "--gpu", "h100-80g", "-c", "32k")
CONFIG: ModelConfig = config_from_recipe("llama-3.1-8b", load_recipes()["llama-3.1-8b"].shape)
WEIGHTS = 2 * 8030261248


def asked(types: tuple[str, str] = ("f16", "f16"), sequences: int = 1) -> memory.Asked:
    return memory.Asked(CONFIG, WEIGHTS, 32768, sequences, types, 0, {})


def test_one_gpu(kv_here: KvHere) -> None:
    code, out, err = kv_here("estimate", *CARD, "--print-args", "vllm")
    *comments, command = out.splitlines()
    assert code == 0 and "MODEL stands for llama-3.1-8b" in err and all(line[0] == "#" for line in comments)
    taken, *less, left = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) (?:\(|for)", comments[0]))
    assert taken - sum(less) == pytest.approx(left, abs=2) and taken == int(0.92 * 81559)
    words = shlex.split(command)
    assert words[:5] == ["vllm", "serve", "MODEL", "--max-model-len", "32768"] and "0.92" in words
    assert kv_here("estimate", *CARD, "--print-args", "kv")[1] == kv_here("estimate", *CARD, "--print-args")[1]


def test_several_nodes(kv_here: KvHere) -> None:
    how = ("--nodes", "2", "--gpus", "8", "-ct", "fp8", "--batch-size", "16")
    out = kv_here("estimate", *CARD, "--print-args", "vllm", *how)[1]
    assert "on paper" in out and "ray start --address HEAD:6379  # on node 1" in out
    words = shlex.split(out.splitlines()[-1])
    said = {"--tensor-parallel-size": "8", "--pipeline-parallel-size": "2", "--max-num-seqs": "16"}
    assert {name: words[words.index(name) + 1] for name in said} == said and "fp8_e4m3" in words
    out = kv_here("estimate", *CARD, "--print-args", "sglang", *how, "--tp", "4")[1]
    first, second = out.splitlines()[-2:]
    assert "--node-rank 0" in first and "--node-rank 1" in second and "--tp-size 4 --pp-size 4 --nnodes 2" in first
    out = kv_here(
        "estimate", *CARD, "--print-args", "llama-server", "--nodes", "2", "--batch-size", "4", "-ct", "int8"
    )[1]
    assert "rpc-server" in out and "--rpc NODE1:50052" in out and "-c 131072" in out and "-ctk q8_0" in out


def test_the_card_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    name = "CUDA_VISIBLE_DEVICES"
    assert mapping.variables({"--device": "cuda"}) == {} and mapping.variables({"--device": "cuda:3"}) == {name: "3"}
    monkeypatch.setenv(name, "4,5")
    assert mapping.variables({"--device": "cuda:1"}) == {name: "5"}
    with pytest.raises(UsageError, match="is not among those of CUDA_VISIBLE_DEVICES=4,5"):
        mapping.variables({"--device": "cuda:2"})


def test_their_arithmetic() -> None:
    total = 80 << 30
    one, eight = memory.cluster(1, 1, None, total, VLLM), memory.cluster(1, 8, None, total, VLLM)
    assert (eight.tp, eight.pp) == (8, 1)
    found = memory.left(VLLM, asked(), one)
    assert sum(size for _, size in found.rows[:-1]) == found.rows[-1][1] and found.token_bytes == 131072
    assert memory.left(VLLM, asked(), eight).token_bytes == 131072 / 8
    assert memory.left(VLLM, asked(("fp8", "fp8")), one).token_bytes == 65536
    static = memory.left(SGLANG, asked(), one)
    share = float(static.words[1])
    assert share == round(1 - (512 + 1.5 * 8192 + 2 * 256 + 128) / (80 * 1024), 3)
    assert static.rows[-1][1] == int(share * total) - WEIGHTS
    small = memory.cluster(1, 1, None, 12 << 30, LLAMA)
    layers = int(memory.left(LLAMA, asked(), small).words[1])
    assert 0 < layers < 32 and memory.left(LLAMA, asked(), one).words == ("-ngl", "33")
    assert memory.left(LLAMA, asked(("int8", "int4")), one).token_bytes == 65536 / 2 * (34 / 32 + 18 / 32)


def test_states_of_sequences_take_their_share() -> None:
    name, total = "nemotron-h-8b", 24 << 30
    config = config_from_recipe(name, load_recipes()[name].shape)
    question = memory.Asked(config, 2 * 8_000_000_000, 32768, 4, ("f16", "f16"), 0, {})
    state, one = sum(layer.state_bytes for layer in config.layers), memory.cluster(1, 1, None, total, VLLM)
    assert state > 50 << 20
    vllm = memory.left(VLLM, question, one)
    cache = vllm.rows[-1][1]
    assert vllm.state_bytes == state and vllm.tokens == (cache - state) // vllm.token_bytes
    assert vllm.contexts(32768) == cache / (state + 32768 * vllm.token_bytes)
    halves = memory.left(VLLM, question, memory.cluster(1, 2, None, total, VLLM))
    assert halves.state_bytes == pytest.approx(state / 2, rel=0.001)
    sglang = memory.left(SGLANG, question, one)
    rows = dict(sglang.rows)
    assert rows["states"] == pytest.approx(-0.9 * rows["the cache"], rel=0.001)
    assert sglang.contexts(16) == -rows["states"] // state
    llama = dict(memory.left(LLAMA, question, memory.cluster(1, 1, None, 80 << 30, LLAMA)).rows)
    assert llama["states"] == -4 * state
    assert "states" not in dict(memory.left(LLAMA, asked(), memory.cluster(1, 1, None, total, LLAMA)).rows)


@pytest.mark.parametrize(
    ("args", "code", "told"),
    [
        (("--print-args", "vllm", "--evict", "sink"), 2, "--evict cannot be used with vllm: it forgets nothing"),
        (("--print-args", "sglang", "-ct", "int4"), 2, "int4 is no type of sglang"),
        (("--print-args", "vllm", "-ct", "int5"), 2, "int5 is no type of vllm"),
        (("--print-args", "llama-server", "-ct", "int6/int4"), 2, "int6 is no type of llama-server"),
        (("--print-args", "llama-server", "--tp", "2"), 2, "it divides a model by layers"),
        (("--print-args", "vllm", "--nodes", "3", "--gpus", "2", "--tp", "4"), 2, "--tp 4 does not divide the 6 GPUs"),
        (("--print-args", "vllm", "-c", "1k,2k"), 2, "one context"),
        (("--print-args", "vllm", "-ct", "f16,fp8"), 2, "one cache type"),
        (("--print-args=ollama",), 2, "--print-args must be one of kv, vllm, sglang, llama-server"),
        (("--print-args", "llama.cpp"), 2, "did you mean llama-server?"),
        (("--print-args=LLaMA.cpp",), 2, "did you mean llama-server?"),
        (("--print-args", "SGLang"), 2, "did you mean sglang?"),
        (("--nodes", "2"), 2, "need --print-args PROGRAM"),
        (("--print-args", "vllm", "--gpu", "rtx3060-12g"), 4, "leaves 0 MiB of each GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_what_cannot_be(kv_here: KvHere, args: tuple[str, ...], code: int, told: str) -> None:
    card = CARD[:1] + CARD[3:] if "--gpu" in args else CARD
    card = tuple(word for word in card if word not in ("-c", "32k")) if "-c" in args else card
    found, out, err = kv_here("estimate", *card, *args)
    assert (found, out) == (code, "") and told in err, err


def test_a_model_that_is_here(kv_here: KvHere, tmp_path: Path) -> None:
    file = str(tiny.make("llama").path)
    assert "does not read GGUF" in kv_here("estimate", file, "--vram", "8G", "--print-args", "vllm")[2]
    out = kv_here("estimate", file, "--vram", "8G", "--print-args", "llama-server")[1]
    assert shlex.split(out.splitlines()[-1])[:3] == ["llama-server", "-m", file]
    folder = str(tiny.folder("qwen3"))
    assert folder in kv_here("estimate", folder, "--vram", "8G", "--print-args", "vllm")[1]
