"""What is done to queries and keys in some families alone holds over every way of keeping their rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from kernelcases import one_thread

from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.model.ropekeys import FACTORS

# A temperature and YaRN, factors and an amplitude of a part of each head, norms over all heads, layers without RoPE,
# parts side by side, norms behind RoPE, soft caps, rows of earlier layers, keys as values, chunks that end within pages
# and at their ends, latents, short convolutions, gated delta networks, Mamba-2 in the place of attention, beside it and
# alone.
SPECIAL = (
    "mistral3", "phi3-long", "olmo2-sliding", "cohere2", "hunyuan-dense", "gemma2", "gemma4", "gemma4-keys",
    "llama4", "llama4-interleaved", "deepseek2", "mistral4",
    "lfm2", "lfm2-biased", "lfm2moe", "qwen35", "qwen35-named", "qwen35moe", "qwen3next", "granitehybrid",
    "granitehybrid-dense", "falcon-h1", "nemotron_h", "nemotron_h_moe",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("variant", SPECIAL)
@pytest.mark.parametrize(("types", "limit"), [("f32", 0.0), ("int8", 0.02)])
def test_chunks_rewinding_and_forks_change_nothing(variant: str, types: str, limit: float):
    """Bit by bit, and int8 changes little."""
    made = tiny.make(variant)
    loaded = Loaded(made.path, "", types=types)
    seq = Sequence(loaded.pool)
    if seq.states:
        seq.states.wanted = frozenset({64})
    whole = loaded.run(seq, IDS)
    parts = Sequence(loaded.pool)
    chunks = [loaded.run(parts, IDS[start:end]) for start, end in ((0, 37), (37, 38), (38, 64), (64, 90))]
    assert torch.equal(torch.cat(chunks), whole)
    fork = parts.fork()
    assert torch.equal(loaded.run(fork, IDS[:3]), loaded.run(parts, IDS[:3]))
    back = seq.rewind_to(70)
    assert 0 < back <= 70 and torch.equal(loaded.run(seq, IDS[back:]), whole[back:])
    exact = made.logits(IDS)
    error = (whole - exact).abs().mean() / exact.std()
    assert error < (limit or 1e-5)


@pytest.mark.parametrize("variant", ("mistral3", "phi3-long", "hunyuan-dense", "mistral4"))
def test_backends_agree_where_rows_are_evicted(variant: str):
    """The second queries, for the rows that stay, are normed and multiplied as the others are."""
    found = []
    for name in ("", "reference"):
        loaded = Loaded(tiny.make(variant).path, name, retention=Rolling(20, 32, 16))
        seq = Sequence(loaded.pool)
        found.append(torch.cat([loaded.run(seq, IDS[:40]), loaded.run(seq, IDS[40:])]))
        assert seq.evicted > 0
    assert (found[0] - found[1]).abs().max() <= 1e-4
    assert (found[0] - tiny.make(variant).logits(IDS)).abs().max() > 0.01


@pytest.mark.parametrize(
    "variant", ("gemma2", "gemma4-keys", "olmo2-sliding", "hunyuan-dense", "deepseek2", "qwen35", "granitehybrid-dense")
)
def test_sealed_rows_that_are_evicted(variant: str):
    """Chunks change nothing where sealed rows go and others stay, and C and plain torch agree but for numbers between
    two codes, which may become either."""
    found = []
    for name in ("", "reference"):
        loaded = Loaded(tiny.make(variant).path, name, types="int8", retention=Rolling(20, 32, 16))
        for cuts in ((0, 40, 90), (0, 40, 41, 64, 90)) if name == "" else ((0, 40, 90),):
            seq = Sequence(loaded.pool)
            found.append(torch.cat([loaded.run(seq, IDS[a:b]) for a, b in itertools.pairwise(cuts)]))
            assert seq.evicted > 0
            seq.close()
    assert torch.equal(found[0], found[1])
    assert (found[0] - found[2]).abs().mean() <= 5e-4
    assert (found[0] - tiny.make(variant).logits(IDS)).abs().max() > 0.01


def test_longrope_is_that_of_the_context():
    made = tiny.make("phi3-long")
    for ctx, rows, scaling in ((40, 40, "short"), (41, 90, "long")):
        loaded = Loaded(made.path, "reference", ctx=ctx)
        assert {layer.rope and layer.rope.scaling for layer in loaded.config.layers} == {scaling}
        assert scaling in FACTORS
        logits = loaded.run(Sequence(loaded.pool), IDS[:rows])
        assert (logits - made.logits(IDS[:rows])).abs().max() <= 1e-4


def test_dynamic_rope_is_that_of_the_context(tmp_path: Path):
    """transformers has it of the text's length: at the end of a text as long as the context both are the same."""
    settings = {"rope_scaling": {"rope_type": "dynamic", "factor": 3.0}, "max_position_embeddings": 40}
    keys = {"type": "dynamic", "factor": 3.0, "original_context_length": 40}
    variant = tiny.Variant("llama", settings, {f"rope.scaling.{key}": value for key, value in keys.items()})
    made = tiny.build(variant, tmp_path / "dynamic.gguf")
    for ctx in (30, len(IDS)):
        loaded = Loaded(made.path, "reference", ctx=ctx)
        assert (loaded.run(Sequence(loaded.pool), IDS[:ctx]) - made.logits(IDS[:ctx])).abs().max() <= 1e-4
    early = made.logits(IDS[:30])
    assert (made.logits(IDS)[:30] - early).abs().max() > 0.01, "a longer text has another RoPE"
