"""A layer that predicts further tokens, and heads of EAGLE-3: their rows beside a plain computation, and answers that
are to the bit what they are without them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import eagles
import numpy as np
import pytest
import tiny
import torch
from batches import Watched, alone, same
from engines import DRAWN, GREEDY, PROMPT
from kernelcases import need_native
from safetensors.torch import load_file, save_file

from kvcli.errors import ModelError, UsageError
from kvcli.options import CacheOptions, EvictOptions, LoadOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.engine.spec.pace import Drafted
from kvcli.runtime.engine.spec.predicting import PredictedGuesses, Predictions, Rows
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel

OFF = {"spec": "off"}
VARIANTS = ("glm4moe-ahead", "deepseek2-ahead", "qwen35-ahead", "qwen35moe-ahead")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses are made whether they are worth it or not."""
    monkeypatch.setattr(Drafted, "worth", lambda self, most: max(0, min(most, 4)))


@functools.cache
def engine_of(
    variant: str, backend: str = "native", codec: str = "f16", evict: EvictOptions = EvictOptions()
) -> Engine:
    if backend == "native":
        need_native()
    options = CacheOptions(160, codec, codec, page_size=16, ubatch=24, evict=evict)
    return Engine.open(tiny.make(variant).path, LoadOptions(variant, 2, backend, mtp=True, exact=True), options)


def predictions(engine: Engine) -> Predictions:
    assert isinstance(engine.session.drafts, Predictions)
    return engine.session.drafts


class Twin:
    """The layer in float64, over the layer of transformers."""

    def __init__(self, variant: str) -> None:
        made = tiny.BESIDE.get(variant) or tiny.VARIANTS[variant]
        model, before = tiny.next_layer(made)
        self.model, self.before = model.double(), {name: x.double() for name, x in before.items()}
        self.model.config._experts_implementation = "eager"  # the others are of float32
        self.main = tiny.make(variant).reference
        self.head = self.main.lm_head.weight.double()

    @torch.inference_mode()
    def rows(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the model [n, d], and of the layer for every row that has a token behind it [n - 1, d]."""
        hidden = self.main.model(torch.tensor([ids])).last_hidden_state[0].double()
        return hidden, self.next(ids[1:], hidden[:-1])

    def next(self, ids: list[int], features: torch.Tensor) -> torch.Tensor:
        """The layer over tokens, each with the features of the row before it."""
        model = self.model.model
        embedded = self.main.model.embed_tokens(torch.tensor(ids)).double()
        both = [self._norm(rows, self.before[name]) for rows, name in ((embedded, "enorm"), (features, "hnorm"))]
        x = (torch.cat(both, 1) @ self.before["eh_proj"].T)[None]
        n = len(ids)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        angles = model.rotary_emb(x, positions)
        layer = model.layers[-1]
        layer.self_attn.layer_idx = 0
        x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=angles)
        return model.norm(x[0] if isinstance(x, tuple) else x)[0]

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.model.config.rms_norm_eps).rsqrt() * weight


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_rows_are_those_of_a_plain_computation(variant: str, backend: str) -> None:
    engine, twin, ids = engine_of(variant, backend, "f32"), Twin(variant), PROMPT[:40]
    hidden, expected = twin.rows(ids)
    seq = engine.new_sequence()
    computed = torch.cat([engine.forward(seq, ids[a : a + 16]) for a in range(0, 40, 16)])
    assert torch.allclose(computed, hidden.float(), atol=3e-4)
    predictor, own = predictions(engine).predictor, Sequence(predictions(engine).pool)
    found = []
    for start, end in ((0, 11), (11, 30), (30, 39)):
        part = own.reserve(ids[start + 1 : end + 1])
        found.append(predictor.rows(Step((part,)), computed[start:end])[0])
        own.commit(ids[start + 1 : end + 1])
    assert torch.allclose(torch.cat(found), expected.float(), atol=3e-4)
    logits = (expected @ twin.head.T).float()
    assert torch.allclose(predictor.logits(torch.cat(found)), logits, atol=1e-3)
    own.close()
    seq.close()


def both(engine: Engine, prompt: list[int], options: SampleOptions) -> tuple[Watched, Watched]:
    return alone(engine, prompt, replace(options, **OFF)), alone(engine, prompt, options)


@pytest.mark.parametrize("codec", ["f16", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_without_guesses(variant: str, codec: str) -> None:
    engine = engine_of(variant, codec=codec)
    for options, n in ((replace(GREEDY, max_tokens=60), 60), (replace(DRAWN, max_tokens=40), 9)):
        plain, found = both(engine, PROMPT[:n], options)
        assert same(plain, found) and found.end.usage.drafted_tokens > 60
    engine.pool.check([])


@pytest.mark.parametrize("codec", ["f16", "int8"])
def test_another_context_and_one_that_forgets(codec: str) -> None:
    engine = Engine(engine_of("glm4moe-ahead", codec=codec).loaded)
    answer = alone(engine, PROMPT[:40], replace(GREEDY, max_tokens=20))
    larger = engine.reopened(240, EvictOptions("sink", window=48, keep=5))
    assert predictions(larger).pool.layout.retention == larger.retention
    assert same(*both(larger, PROMPT[:40], replace(GREEDY, max_tokens=120)))
    assert alone(larger, PROMPT[:40], replace(GREEDY, max_tokens=20)).ids == answer.ids
    assert larger.beside(CacheOptions(64)).session.drafts is None


def test_turns_go_on_from_the_rows_of_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, options, rows = engine_of("glm4moe-ahead"), replace(GREEDY, max_tokens=30), list[int]()
    run = Rows.run
    monkeypatch.setattr(Rows, "run", lambda self, ids, features: rows.append(len(ids)) or run(self, ids, features))
    seq = engine.new_sequence()
    first = [*engine.generate(seq, PROMPT[:60], options)][-1]
    assert isinstance(first, End) and sum(rows) >= 60
    rows.clear()
    turn = [*PROMPT[:60], *first.ids, *PROMPT[60:70]]
    second = [*engine.generate(seq, turn, options)][-1]
    assert isinstance(second, End) and second.usage.drafted_tokens > 30
    assert max(rows) < 16  # what is new, and no row of the first turn
    kept = predictions(engine).last
    assert kept is not None and kept.first == 0
    assert second.ids == alone(engine, turn, replace(options, **OFF)).ids
    seq.close()


def compared_with(chain: Callable[[list[int], int], list[int]], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on all guesses are compared with those of `chain` -> the list into which they go."""
    draft, seen = PredictedGuesses._draft, list[int]()

    def compared(self: PredictedGuesses, count: int) -> list[int]:
        known = list(self._known)
        if found := draft(self, count):
            assert found == chain(known, len(found))
            seen.extend(found)
        return found

    monkeypatch.setattr(PredictedGuesses, "_draft", compared)
    return seen


@pytest.mark.parametrize("variant", ["glm4moe-ahead", "qwen35-ahead"])
def test_guesses_are_those_of_the_plain_computation(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a greedy answer every chain of guesses, made anew from the hidden states of all that is known."""
    engine = engine_of(variant, codec="f32")
    ends = engine.tokenizer.eog_ids  # which GREEDY does not draw
    seen = compared_with(functools.partial(chain, Twin(variant), ends), monkeypatch)
    alone(engine, PROMPT[:20], replace(GREEDY, max_tokens=30))
    assert len(seen) > 40


@torch.inference_mode()
def chain(twin: Twin, banned: frozenset[int], known: list[int], count: int) -> list[int]:
    hidden, _ = twin.rows(known)
    features, ids = hidden[:-1], known[1:]
    found: list[int] = []
    while True:
        rows = twin.next(ids, features)
        logits = twin.head @ rows[-1]
        logits[list(banned)] = float("-inf")
        found.append(int(logits.argmax()))
        if len(found) == count:
            return found
        features, ids = torch.cat((features, rows[-1:])), [*ids, found[-1]]


def test_what_is_refused() -> None:
    with pytest.raises(ModelError, match="no layer that predicts further tokens"):
        Engine.open(tiny.make("llama").path, LoadOptions("llama", 1, "reference", mtp=True), CacheOptions(64))
    with pytest.raises(UsageError, match="with `evict=h2o`, so `mtp` is of no use"):
        options = CacheOptions(160, evict=EvictOptions("h2o", budget="128"))
        Engine.open(tiny.make(VARIANTS[0]).path, LoadOptions("glm", 1, "reference", mtp=True), options)


# --- heads of EAGLE-3


@functools.cache
def headed(variant: str, codec: str = "f16", own: bool = False, normed: bool = False) -> Engine:
    need_native()
    options = CacheOptions(160, codec, codec, page_size=16, ubatch=24)
    load = LoadOptions(variant, 2, "native", exact=codec == "f32")
    return Engine.open(tiny.make(variant).path, load, options, eagles.make(variant, own, normed)[0])


@pytest.mark.parametrize(("own", "normed"), [(False, False), (True, True)])
def test_guesses_of_a_head_are_those_of_a_plain_computation(
    own: bool, normed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, head = headed("llama", "f32", own, normed), eagles.make("llama", own, normed)[1]
    seen = compared_with(head.chain, monkeypatch)
    alone(engine, PROMPT[:40], replace(GREEDY, max_tokens=30))
    assert len(seen) > 6
    assert set(seen) <= set(head.ids.tolist())


@pytest.mark.parametrize(("variant", "codec"), [("llama", "f16"), ("llama", "int4"), ("qwen35", "int8")])
def test_answers_are_those_without_a_head(variant: str, codec: str) -> None:
    engine = headed(variant, codec)
    for options, n in ((replace(GREEDY, max_tokens=60), 60), (replace(DRAWN, max_tokens=40), 9)):
        plain, found = both(engine, PROMPT[:n], options)
        assert same(plain, found) and found.end.usage.drafted_tokens > 60
    engine.pool.check([])


def test_heads_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the head reads layers"):
        config = json.loads((eagles.make("llama")[0] / "config.json").read_text())
        shutil.copytree(eagles.make("llama")[0], tmp_path / "head")
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
        (tmp_path / "head" / "config.json").write_text(json.dumps(config))
        Engine.open(tiny.make("llama").path, LoadOptions("llama", 1, "reference"), CacheOptions(64), tmp_path / "head")


def test_a_folder_has_the_layer_too(tmp_path: Path) -> None:
    """Written as authors do: one more layer than config.json counts, with what stands before it beside its block."""
    model, before = tiny.next_layer(tiny.VARIANTS["glm4moe-ahead"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.2.{name}.weight": x.contiguous() for name, x in before.items()}
    tensors["model.layers.2.shared_head.norm.weight"] = model.model.norm.weight.data.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    changed = config | {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in changed.items() if k != "layer_types"}))
    shutil.copy(tiny.folder("glm4moe") / "tokenizer.json", tmp_path)
    check_folder(tmp_path, "glm4moe")


@pytest.mark.parametrize("arch", ["qwen35", "qwen35moe", "qwen3next"])
def test_folders_of_qwen_have_it_beside_the_layers(arch: str, tmp_path: Path) -> None:
    model, before = tiny.next_layer(tiny.BESIDE[f"{arch}-ahead"])
    model.save_pretrained(tmp_path)
    tensors = {
        name.replace("model.layers.2.", "mtp.layers.0."): x
        for name, x in load_file(tmp_path / "model.safetensors").items()
    }
    names = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"}
    tensors |= {f"mtp.{names[name]}.weight": x.contiguous() - int(name != "eh_proj") for name, x in before.items()}
    save_file(tensors | {"mtp.norm.weight": model.model.norm.weight.data.clone()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 2, "layer_types": config["layer_types"][:2], "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(tiny.folder(arch) / "tokenizer.json", tmp_path)
    check_folder(tmp_path, arch)


def check_folder(path: Path, arch: str) -> None:
    """Beside two layers there is one more, with the tensors of the file."""
    with SafetensorsModel(path) as folder, GGUFFile.open(tiny.make(f"{arch}-ahead").path) as file:
        assert [folder.metadata[f"{arch}.{key}"] for key in ("block_count", "nextn_predict_layers")] == [3, 1]
        names = {name for name in file.tensors if name.startswith("blk.2.")}
        assert names == {name for name in folder.tensors if name.startswith("blk.2.")}
        for name in names:
            assert np.allclose(folder.data(name).view(np.float32), file.data(name).view(np.float32), atol=1e-6), name
