"""The files of benchmarks/synthetic.py: valid, of the real models' sizes, and quick to make."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from synthetics import module

from kvcli.kernels.reference import ggml
from kvcli.options import CacheOptions, LoadOptions, SampleOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("name", "parameters", "quant", "size"),
    [
        ("1b", 1_235_814_400, "Q4_K_M", 807_690_000),
        ("8b", 8_030_261_248, "Q4_K_M", 4_920_730_000),
        ("8b", 8_030_261_248, "Q8_0", 8_540_770_000),
        ("30b-a3b", 30_532_122_624, "Q4_K_M", 18_556_690_000),
    ],
)
def test_sizes_are_those_of_the_published_models(name: str, parameters: int, quant: str, size: int) -> None:
    """Parameters to the one; bytes of the published files to 2 %, which hold a little more metadata."""
    table = module().tensors(module().SHAPES[name], quant)
    assert sum(prod(tensor.shape) for tensor in table) == parameters
    assert abs(sum(tensor.nbytes for tensor in table) / size - 1) < 0.02


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("tiny", "Q4_K_M"),
        ("tiny", "Q8_0"),
        ("tiny-experts", "Q4_K_M"),
        *((f"tiny-{x}", "Q4_K_M") for x in ("delta", "falcon", "nemotron", "lfm2")),
        *((f"tiny-{x}", "Q8_0") for x in ("granite", "lite")),
    ],
)
def test_a_tiny_one_runs(name: str, quant: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    assert module().write(path, module().SHAPES[name], quant) == path.stat().st_size
    engine = Engine.open(path, LoadOptions("tiny", 1), CacheOptions())
    assert engine.loaded.text.template is not None
    ids = engine.tokenizer.encode_segments(
        engine.loaded.text.template.render_segments([{"role": "user", "content": "Hi!"}])
    )
    hidden = engine.forward(engine.new_sequence(), ids)
    assert torch.isfinite(engine.logits(hidden)).all()
    events = list(engine.generate(engine.new_sequence(), ids, SampleOptions(max_tokens=4, ignore_eos=True)))
    assert len(events[-1].ids) == 4


def test_weights_are_finite_and_as_large_as_they_should_be() -> None:
    for kind in ("Q8_0", "Q4_K", "Q6_K"):
        tensor = module().Tensor("t", (64, 1024), kind)
        pieces = list(module().random_blocks(tensor, np.random.default_rng(3)))
        assert sum(piece.nbytes for piece in pieces) == tensor.nbytes
        values = ggml.decode(kind, torch.from_numpy(np.concatenate(pieces).reshape(64, -1)))
        assert torch.isfinite(values).all()
        assert 0.8 < values.std() * 32 < 1.25 and abs(values.mean()) * 32 < 0.1


@pytest.mark.parametrize("size", [261, 512, 70000])
def test_the_vocabulary_has_the_size_asked_for(size: int) -> None:
    tokens, kinds, merges = module().vocabulary(size)
    assert len(tokens) == len(set(tokens)) == len(kinds) == size
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.tokens": tokens}
    metadata |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 3}
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.eos_token_id": 4})
    text = "naïve 😀 text\n\x00"
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module(), "KEEP_FREE_BYTES", 1 << 60)
    with pytest.raises(SystemExit, match="are free"):
        module().write(tmp_path / "f.gguf", module().SHAPES["tiny"], "Q8_0")
    assert list(tmp_path.iterdir()) == []


def test_the_file_holds_what_the_table_says(tmp_path: Path) -> None:
    path, shape = tmp_path / "tiny.gguf", module().SHAPES["tiny"]
    module().write(path, shape, "Q4_K_M", seed=5)
    with GGUFFile.open(path) as file:
        expected = {t.name: (t.shape, t.type, t.nbytes) for t in module().tensors(shape, "Q4_K_M")}
        assert {n: (t.shape, t.type, t.nbytes) for n, t in file.tensors.items()} == expected
        last = list(file.tensors)[-1]
        assert file.data(last).any()
