"""Attention over latents: absorbed it is what it is when keys and values are computed; rows are stored once, in every
cache type that they may have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from engines import open_tiny, states
from kernelcases import backend, one_thread, packed
from reusecases import NOWHERE, ask, engine_of

from kvcli.codecs import CODECS, RecordLayout
from kvcli.errors import UsageError
from kvcli.kernels import QuantTensor
from kvcli.kernels.reference import ggml
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.config import LATENT, LayerConfig
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.latents import _transposed
from kvcli.runtime.model.sealing import seal_step
from kvcli.runtime.model.weights import Weights

LATENTS = ("f32", "f16", "bf16", "fp8", "fp8_e5m2", "int8")
RANK, TURNED, HEADS, PLAIN = 32, 8, 4, 12


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("codec", LATENTS)
@pytest.mark.parametrize("heads", (3, 16))
@pytest.mark.parametrize("name", ("reference", "", "avx2", "base"))
def test_a_value_is_a_part_of_its_key(codec: str, heads: int, name: str):
    """Against keys of both parts, in float64; of odd sizes, behind and within pages."""
    ops, dim_k, dim_v, n = backend(name), 24, 72, 41
    layer = LayerConfig(LATENT, 1, dim_k, dim_v)
    loaded = Loaded(tiny.make("deepseek2").path, "reference")
    config = replace(loaded.config, layers=(layer,))
    seq = Sequence(PagePool(KVLayout.build(config, codec, codec, 16)))
    k, v, q = (torch.randn(n, x, d, generator=torch.manual_seed(d)) for x, d in ((1, dim_k), (1, dim_v), (heads, 96)))
    part = seq.reserve([0] * n)
    kv = part.kv(0)
    assert kv.record.joined and kv.record.codec_k.bits >= 16 and kv.record.dim_q == dim_k + dim_v
    if rotated := kv.rotated[1]:
        ops.rotate_(v)
    ops.store(k, v, kv, 0)
    seal_step(ops, None, kv, 0, n)
    found = ops.attention(q, kv, 0, 0, 0.1, 0.0, None, None, None).view(n, heads, dim_v)
    for i in range(n):
        keys, values = [], []
        for page in range(i // 16 + 1):
            source = kv.open if kv.open and (page == 0 or page == i // 16) else kv
            at = source.entries.first.tolist().index(page * 16)
            rows = source.rows(source.entries.memory[at], 0, min(16, i + 1 - page * 16))
            keys.append(torch.cat(rows, 2)[0].double())
            values.append(rows[1][0].double())
        weights = (q[i].double() @ torch.cat(keys).T * 0.1).softmax(-1)
        assert torch.allclose(found[i].double(), weights @ torch.cat(values), rtol=1e-4, atol=2e-5)
    assert rotated == (codec in ("fp8", "fp8_e5m2", "int8"))


def _unabsorbed(model: Loaded, layer: int, x: torch.Tensor) -> torch.Tensor:
    """Attention of rows x [T, d_model] by keys and values of each head, in float64, before the last product."""
    file, c = model.model, model.config
    weights = Weights(GGUFFile.open(tiny.make("deepseek2").path))

    def matrix(name: str) -> torch.Tensor:
        info = weights.file.tensors[f"blk.{layer}.attn_{name}.weight"]
        return weights.vector(info.name, *info.shape).double()

    def normed(y: torch.Tensor, name: str) -> torch.Tensor:
        return y * (y.square().mean(-1, keepdim=True) + c.norm_eps).rsqrt() * matrix(name)

    x, t = x.double(), len(x)
    rope = file.ropes.table(c.layers[layer].rope)
    assert rope is not None
    cos, sin = (each.double() for each in rope.at(0, t))

    def turned(y: torch.Tensor) -> torch.Tensor:  # neighbours
        a, b = y[..., ::2], y[..., 1::2]
        each = [z.unsqueeze(1) for z in (cos, sin)]
        return torch.stack((a * each[0] - b * each[1], b * each[0] + a * each[1]), -1).flatten(-2)

    q = (normed(x @ matrix("q_a").T, "q_a_norm") @ matrix("q_b").T).unflatten(1, (HEADS, -1))
    latent, key = (x @ matrix("kv_a_mqa").T).split([RANK, TURNED], 1)
    latent = normed(latent, "kv_a_norm")
    keys = torch.einsum("hrp,tr->thp", matrix("k_b"), latent)
    values = torch.einsum("hvr,tr->thv", matrix("v_b"), latent)
    scores = torch.einsum("qhp,khp->hqk", q[..., :PLAIN], keys)
    scores += torch.einsum("qhr,kr->hqk", turned(q[..., PLAIN:]), turned(key.unsqueeze(1))[:, 0])
    seen = torch.ones(t, t).tril().bool()
    weights_of = (scores * c.attn_scale).masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khv->qhv", weights_of, values).flatten(1)


@pytest.mark.parametrize("name", ("", "reference"))
def test_absorbed_is_what_is_computed_with_keys_and_values(name: str):
    loaded = Loaded(tiny.make("deepseek2").path, name)
    decoder, seq = loaded.model, Sequence(loaded.pool)
    x = torch.randn(50, loaded.config.d_model, generator=torch.manual_seed(1))
    step = Step((seq.reserve([0] * 50),))
    inner = decoder.weights.sublayers[2].inner
    found = decoder._inner(inner, x, step, None)
    expected = _unabsorbed(loaded, 1, x)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("codec", LATENTS)
def test_chunks_rewinding_and_files_in_every_type(codec: str, tmp_path: Path):
    engine = engine_of("deepseek2", codec)
    with torch.inference_mode():
        seq, other = engine.new_sequence(), engine.new_sequence()
        whole = states(engine, seq, IDS)
        assert torch.equal(states(engine, other, IDS, 7), whole)
        for cut in (81, 64, 33, 17):
            back = other.rewind_to(cut)
            assert back in (cut, cut // 16 * 16)
            assert torch.equal(states(engine, other, IDS[back:], 5), whole[back:])
        seq.close()
        other.close()
    options = PromptCacheOptions(file=tmp_path / "x.safetensors")
    assert ask(engine, IDS[:60], options).usage.cache_write_tokens == 60
    more = ask(engine, [*IDS[:60], 5, 6, 7], options)
    assert more.usage.disk_tokens >= 48 and more.ids == ask(engine, [*IDS[:60], 5, 6, 7], NOWHERE).ids


def test_what_types_cost():
    """The median KL divergence from float32, since in a few rows other experts are chosen. On random weights, which say
    less than those of a model."""
    made = {}
    for codec in ("f32", *LATENTS, "int4"):
        loaded = Loaded(tiny.make("deepseek2").path, "", types=codec)
        made[codec] = loaded.run(Sequence(loaded.pool), IDS).log_softmax(-1)
    kld = {name: float((made["f32"].exp() * (made["f32"] - x)).sum(-1).median()) for name, x in made.items()}
    assert kld["f16"] < kld["int8"] < kld["fp8"] < kld["fp8_e5m2"] < kld["int4"]
    assert kld["f16"] < 1e-5 and kld["int8"] < 1e-3 and kld["int4"] > 20 * kld["int8"]


def test_types_below_8_bits_are_refused_and_can_be_forced():
    for codec in ("int4", "int6"):
        with pytest.raises(UsageError, match=f"^{codec} latents would fail on this model") as refused:
            open_tiny("deepseek2", "native", CacheOptions(96, codec, codec))
        assert "int8" in str(refused.value.hint)
    forced = open_tiny("deepseek2", "native", CacheOptions(96, "int4", "int4", force_types=True))
    assert isinstance(forced, Engine) and forced.new_sequence().losses() == ("quantized: latents int4",)


def test_latents_have_one_type_and_are_not_selected():
    with pytest.raises(UsageError, match="cannot be int8 as keys and f16 as values"):
        open_tiny("deepseek2", "native", CacheOptions(96, "int8", "f16"))
    for types in (("int8", "auto"), ("int8", "int8"), ("auto", "f16")):
        assert open_tiny("deepseek2", "native", CacheOptions(96, *types)).layout.groups[0].codec_k.name == "f16"
    with pytest.raises(UsageError, match="h2o does not select latents"):
        open_tiny("deepseek2", "native", CacheOptions(160, page_size=16, evict=EvictOptions("h2o", budget="64")))


def test_bytes_are_those_of_one_latent():
    """DeepSeek-V3: 61 layers, 512 + 64 numbers of two bytes; in int8 a scale, and 16 bits for what RoPE turns."""
    config = Loaded(tiny.make("deepseek2").path, "reference").config
    layers = (LayerConfig(LATENT, 1, 64, 512),) * 61
    config = replace(config, layers=layers)
    found = {codec: KVLayout.build(config, codec, codec).token_bytes() for codec in ("f16", "int8", "fp8")}
    assert found == {"f16": 61 * 576 * 2, "int8": 61 * (512 + 2 + 128), "fp8": 61 * (512 + 128)}
    record = RecordLayout.of(64, 1, 64, 512, CODECS["f16"], CODECS["int8"], joined=True)
    assert record.record_bytes == 64 * (128 + 512 + 2)


@pytest.mark.parametrize("type", ("F32", "F16", "Q8_0"))
def test_one_tensor_of_keys_and_values_is_cut_into_those_of_heads(type: str):
    heads, plain, rank = 3, 6, 64
    w = packed(type, heads * plain, rank)
    made = _transposed(QuantTensor(type, w.blocks, rank), heads)
    expected = w.decode().view(heads, plain, rank).mT
    for head in range(heads):
        assert torch.allclose(ggml.decode(made.type, made.of(head).blocks), expected[head], rtol=1e-3)
