"""Values that are keys, too, stored once: the same answers as stored apart, in every cache type; what that takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from archcases import IDS, Loaded
from engines import open_tiny, states
from kernelcases import one_thread
from reusecases import NOWHERE, ask, engine_of, store_in

from kvcli.codecs import CODECS
from kvcli.errors import ModelError, UsageError
from kvcli.kernels.reference.backend import ReferenceBackend
from kvcli.kernels.reference.pointwise import rope_
from kvcli.options import AttendOptions, CacheOptions, EvictOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, LayerConfig
from kvcli.runtime.engine import chunks
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights

KEYS = ("gemma4-keys", "gemma4-experts")  # two KV heads, and one


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("name", ("", "reference"))
@pytest.mark.parametrize("variant", KEYS)
def test_stored_once_is_stored_apart(variant: str, name: str):
    """Across pages and steps, and with rows evicted; of transformers they are within 0.0001, as `test_archs` says."""
    loaded = Loaded(tiny.make(variant).path, name)
    assert loaded.pool.layout.joined
    apart = PagePool(loaded.pool.layout.apart())
    found = []
    for pool in (loaded.pool, apart):
        loaded.pool, seq = pool, Sequence(pool)
        found.append(torch.cat([loaded.run(seq, IDS[lo:hi]) for lo, hi in ((0, 37), (37, 38), (38, 90))]))
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()


@pytest.mark.parametrize("variant", KEYS)
@pytest.mark.parametrize("codec", list(CODECS))
def test_every_cache_type(variant: str, codec: str):
    """Types of 8 bits or more are stored once, and none is further from float32 than it is apart, but for rounding."""
    exact = tiny.make(variant).logits(IDS).log_softmax(-1)
    loaded = Loaded(tiny.make(variant).path, "", types=codec)
    layout = loaded.pool.layout
    assert layout.joined == (CODECS[codec].bits >= 8)
    kld = []
    for pool in (loaded.pool, PagePool(layout.apart())):
        loaded.pool = pool
        found = loaded.run(Sequence(pool), IDS).log_softmax(-1)
        kld.append(float((exact.exp() * (exact - found)).sum(-1).median()))
    assert kld[0] <= 1.5 * kld[1] + 1e-6, kld


def test_what_it_takes():
    """Of four KV heads of 512 dims, of which RoPE turns a quarter, in bytes a token and layer."""
    layer = LayerConfig(FULL, 4, 512, 512, turned=128)
    config = replace(Loaded(tiny.make("llama").path, "reference").config, layers=(layer,))
    once = {k: KVLayout.build(config, k, k).token_bytes() for k in ("f16", "fp8", "int8", "int4")}
    assert once == {"f16": 4 * 1280, "fp8": 4 * 768, "int8": 4 * 770, "int4": 4 * 516}
    apart = {k: KVLayout.build(config, k, k).apart().token_bytes() for k in ("f16", "fp8", "int8", "int4")}
    assert apart == {"f16": 4 * 2048, "fp8": 4 * 1024, "int8": 4 * 1028, "int4": 4 * 516}
    assert not KVLayout.build(config, "f16", "int8").joined
    assert not KVLayout.build(config, "f16", "f16").attending(AttendOptions(pages=4)).joined


@pytest.mark.parametrize("codec", ("f16", "int8"))
def test_rewinding_stored_prompts_and_policies(codec: str, tmp_path: Path):
    engine = engine_of("gemma4-experts", codec)
    assert engine.layout.joined
    with torch.inference_mode():
        seq, other = engine.new_sequence(), engine.new_sequence()
        whole = states(engine, seq, IDS)
        assert torch.equal(states(engine, other, IDS, 7), whole)
        back = other.rewind_to(70)
        assert torch.equal(states(engine, other, IDS[back:], 5), whole[back:])
        seq.close()
        other.close()
    cold = ask(engine, IDS[:60], store_in(tmp_path))
    again = ask(engine, IDS[:60], store_in(tmp_path))
    assert again.ids == cold.ids == ask(engine, IDS[:60], NOWHERE).ids and again.usage.disk_tokens >= 48
    by_score = EvictOptions("keydiff", budget="64")
    scored = open_tiny("gemma4-experts", "native", CacheOptions(320, codec, codec, 16, evict=by_score))
    assert not scored.layout.joined
    assert ask(scored, IDS[:60], store_in(tmp_path)).usage.disk_tokens == 0
    with pytest.raises(UsageError, match="values that are keys"):
        engine.reopened(320, by_score)


@pytest.mark.parametrize("kept", (EvictOptions("sink", window=64), EvictOptions("window", window=64)))
def test_evicted_rows(kept: EvictOptions):
    """As where they are stored apart."""
    found = []
    for apart in (False, True):
        engine = open_tiny("gemma4-keys", "native", CacheOptions(160, "f32", "f32", 16, evict=kept))
        if apart:
            engine.pool = PagePool(engine.layout.apart())
        with torch.inference_mode():
            found.append(states(engine, engine.new_sequence(), (IDS * 4)[:200], 16))
    assert (found[0] - found[1]).abs().max() <= 1e-4 * found[1].abs().max()


def test_moved_documents_turn_what_is_turned():
    engine = open_tiny("gemma4-keys", "native", CacheOptions(320, "f32", "f32", 16))
    assert not chunks.refused(engine)
    with torch.inference_mode():
        alone, moved = engine.new_sequence(), engine.new_sequence()
        states(engine, alone, IDS[:80])
        chunks.graft(engine, moved, alone, 16, 80)
    (group,) = (i for i, g in enumerate(engine.layout.groups) if g.joined)
    rows = []
    for seq, page in ((alone, 1), (moved, 0)):
        kv = seq.views()[group][0]
        rows.append(kv.rows(kv.entries.memory[page], 0, 16))
    before = rows[0][0].transpose(0, 1).clone()
    table = engine.model.ropes.table(engine.config.layers[2].rope)
    assert table is not None
    rope_(before, *(x.expand(16, -1) for x in table.first(8).at_positions(np.array([-16.0]))))
    assert torch.allclose(rows[1][0].transpose(0, 1), before, atol=1e-5) and torch.equal(rows[1][1], rows[0][1])
    assert not torch.allclose(rows[1][0], rows[0][0], atol=1e-2)
    assert "apart in this cache type" in chunks.refused(
        open_tiny("gemma4-keys", "native", CacheOptions(320, "int4", "int4", 16))
    )


def test_rope_that_turns_more_is_refused(monkeypatch: pytest.MonkeyPatch):
    file = GGUFFile.open(tiny.make("gemma4-keys").path)
    loaded = Loaded(tiny.make("gemma4-keys").path, "reference")
    vector = Weights.vector

    def other(self: Weights, name: str, *shape: int) -> torch.Tensor:
        return torch.ones(*shape) if name == "rope_freqs.weight" else vector(self, name, *shape)

    monkeypatch.setattr(Weights, "vector", other)
    with pytest.raises(ModelError, match="turns 24 dims of keys in layer 2, at most 8"):
        load(loaded.config, Weights(file), ReferenceBackend(1))
