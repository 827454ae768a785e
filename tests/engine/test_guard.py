"""The guard against key types that a model's weights speak against, on vectors made here."""

from __future__ import annotations

import pytest
import torch
from engines import open_tiny

from kvcli.codecs import CODECS, Codec
from kvcli.errors import UsageError
from kvcli.kernels.reference import codecs
from kvcli.options import CacheOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import FULL, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.engine import guard

HEADS, KV_HEADS, DIM = 8, 4, 128


class Vectors(dict[str, torch.Tensor]):
    """What the guard asks of weights."""

    def vector(self, name: str, size: int) -> torch.Tensor:
        found = self[name]
        assert found.shape == (size,), name
        return found


def config(*kinds: str, window: int = 512) -> ModelConfig:
    layers = tuple(LayerConfig(kind, KV_HEADS, DIM, DIM, window if kind == SLIDING else 0) for kind in kinds)
    return ModelConfig("llama", "", 10, 2, 2, HEADS, 4096, 1e-5, layers, DIM**-0.5)


def noise(norm: float, size: int = KV_HEADS * DIM) -> torch.Tensor:
    x = torch.randn(size, generator=torch.manual_seed(size))
    return x * (norm / x.norm())


def biased(norms: list[float]) -> Vectors:
    """A model of the Qwen2 kind with key biases of these norms."""
    return Vectors({f"blk.{i}.attn_k.bias": noise(norm) for i, norm in enumerate(norms)})


def reason(weights: Vectors, type_k: str, model: ModelConfig | None = None) -> str:
    model = model or config(*[FULL] * 4)
    return guard.weakness(weights, model, KVLayout.build(model, type_k, "int4"))


def test_outliers_of_key_biases_are_named_with_layer_norm_and_median():
    found = reason(biased([605.0, 20.0, 22.0, 24.0]), "int4")
    assert found == "int4 keys would fail on this model (key bias norm 605 in layer 0, median 23)"
    assert "norm 921 in layer 3" in reason(biased([605.0, 20.0, 22.0, 921.0]), "int4")


@pytest.mark.parametrize("type_k", [name for name, row in CODECS.items() if row.bits > 4])
def test_types_with_more_bits_take_them(type_k: str):
    assert reason(biased([605.0, 22.0, 22.0, 22.0]), type_k) == ""


def test_ordinary_biases_and_models_without_any_pass():
    assert reason(biased([22.0, 40.0, 18.0, 80.0]), "int4") == ""
    assert reason(Vectors(), "int4") == ""
    assert reason(biased([0.001, 0.4, 0.001, 0.001]), "int4") == ""  # an outlier of nothing


def test_one_wild_head_is_not_hidden_by_the_others():
    bias = torch.zeros(KV_HEADS * DIM)
    bias[5] = 300.0
    assert "norm 300 in layer 1" in reason(Vectors({"blk.1.attn_k.bias": bias, "blk.2.attn_k.bias": bias / 50}), "int4")


def test_a_query_bias_counts():
    weights = biased([200.0] * 4)
    assert reason(weights, "int4") == ""
    weights["blk.2.attn_q.bias"] = noise(50.0, HEADS * DIM)
    assert reason(weights, "int4") == ""
    weights["blk.2.attn_q.bias"] = noise(300.0, HEADS * DIM)
    assert "layer 2" in reason(weights, "int4")


def test_norms_over_heads_count_by_their_gains():
    def normed(key: float, query: float) -> Vectors:
        gains = {"k": torch.full((DIM,), key), "q": torch.full((DIM,), query)}
        return Vectors({f"blk.{i}.attn_{x}_norm.weight": gain for i in range(4) for x, gain in gains.items()})

    assert reason(normed(4.75, 1.85), "int4") == ""  # gemma3 270M's most daring layer
    assert "key norm gain norm 226 in layer 0, median 226" in reason(normed(20.0, 1.85), "int4")
    assert reason(normed(20.0, 1.85), "int8") == ""
    assert reason(normed(200.0, 2.0), "int8").startswith("int8 keys would fail")


def test_sink_logits_refuse_four_bits_only():
    weights = Vectors({"blk.3.attn_sinks.weight": torch.zeros(HEADS)})
    assert reason(weights, "int4") == "int4 keys would fail on this model (learned sink logits in layer 3)"
    assert reason(weights, "int8") == reason(weights, "int6") == ""


def test_small_windows_stay_in_16_bits_and_need_no_guard():
    weights = biased([605.0, 22.0])
    assert reason(weights, "int4", config(SLIDING, FULL)) == ""
    assert "layer 0" in reason(weights, "int4", config(SLIDING, FULL, window=4096))


def test_not_a_number_does_not_pass():
    strange = biased([22.0, 22.0, 22.0]) | {"blk.2.attn_k.bias": torch.full((KV_HEADS * DIM,), torch.nan)}
    assert "would fail" in reason(Vectors(strange), "int8")
    assert "would fail" in reason(Vectors({"blk.0.attn_k.bias": torch.full((KV_HEADS * DIM,), torch.nan)}), "int8")


def test_refused_unless_forced_with_a_type_that_would_do():
    model, weights = config(FULL, FULL), biased([605.0, 22.0])
    layout = KVLayout.build(model, "int4", "int4")
    with pytest.raises(UsageError) as refused:
        guard.check(weights, model, layout, ("int4", "int4"), force=False)
    assert refused.value.hint == "try `type_k=int8`, or `force_types`"
    assert guard.check(weights, model, layout, ("int4", "int4"), force=True) == reason(weights, "int4", model)
    wilder = biased([60500.0, 22.0])
    with pytest.raises(UsageError, match="int4 keys") as refused:
        guard.check(wilder, model, layout, ("int4", "int4"), force=False)
    assert "`type_k=f16`" in refused.value.hint


@pytest.mark.parametrize("row", [row for row in CODECS.values() if row.sealed], ids=lambda row: row.name)
def test_the_errors_of_types_are_those_that_the_codecs_make(row: Codec):
    rows, codec = torch.randn(1, 2000, DIM, generator=torch.manual_seed(0)), codecs.of(row)
    if codec.per_head:
        scales = codec.static_scale(rows)
        found = codec.decode(codec.encode(rows, scales), scales, DIM)
    else:
        found = codec.decode(*codec.encode(rows), DIM)
    assert float((found - rows).norm() / rows.norm()) == pytest.approx(row.error, rel=0.1)


def test_the_engine_asks_before_it_builds_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "LIMIT_NATS", 1e-6)  # the tiny model has norms over heads
    with pytest.raises(UsageError, match=r"int4 keys would fail on this model .key norm gain"):
        open_tiny("gemma3", "auto", CacheOptions(type_k="int4", type_v="int4"))
    forced = open_tiny("gemma3", "auto", CacheOptions(type_k="int4", type_v="int4", force_types=True))
    assert any("int4 keys would fail" in notice for notice in forced.notices)
    assert open_tiny("gemma3", "auto", CacheOptions(type_k="f16", type_v="int4")).notices == []
