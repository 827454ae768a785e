"""Keys of a GGUF file that change what is computed: obeyed as transformers has it, or refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from kernelcases import one_thread

from kvcli.errors import ModelError
from kvcli.routing import CHOSEN, SIGMOID, SOFTMAX, Routing
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import FULL, SLIDING, Experts, ModelConfig
from kvcli.runtime.headers.anygguf import config_from_gguf_any
from kvcli.runtime.model.archs import RUNNABLE, from_gguf

SHAPES = {"token_embd.weight": (10, 16)}
LLAMA = {
    "embedding_length": 16, "feed_forward_length": 16, "attention.head_count": 2, "block_count": 3,
    "context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip

LAYER_NORM = {"attention.layer_norm_rms_epsilon": None, "attention.layer_norm_epsilon": 1e-5}
LATENTS = {
    "attention.kv_lora_rank": 8, "rope.dimension_count": 4, "attention.key_length": 12, "attention.value_length": 8,
    "attention.key_length_mla": 10, "attention.value_length_mla": 6,
}  # fmt: skip
CONVOLUTIONS: dict[str, Any] = {"shortconv.l_cache": 3, "attention.head_count_kv": [0, 1, 0]}
MAMBA = {"ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 96}
MAMBA |= {"ssm.conv_kernel": 4, "attention.head_count_kv": [0, 2, 0]}
DELTA = {
    "ssm.state_size": 4, "ssm.inner_size": 8, "ssm.group_count": 1, "ssm.time_step_rank": 2, "ssm.conv_kernel": 4,
    "full_attention_interval": 3,
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), CONVOLUTIONS),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), DELTA),
    "deepseek2": LATENTS,
    "mistral4": LATENTS,
    "gemma3": {"attention.sliding_window": 8},
    "gemma3n": {
        "attention.sliding_window": 8,
        "altup.num_inputs": 4,
        "altup.active_idx": 0,
        "activation_sparsity_scale": [float("-inf"), 1.5, 0.0],
    },
    "gemma4": {"attention.sliding_window": 8},
    "gpt-oss": {"attention.sliding_window": 8},
    **dict.fromkeys(("starcoder2", "nemotron", "stablelm"), LAYER_NORM),
    "command-r": LAYER_NORM | {"logit_scale": 0.1},
    "cohere2": LAYER_NORM | {"attention.sliding_window": 8, "logit_scale": 0.1},
    "granite": {"logit_scale": 8.0},
    "granitemoe": {"logit_scale": 8.0},
    "granitehybrid": MAMBA | {"logit_scale": 8.0},
    "falcon-h1": MAMBA | {"attention.head_count_kv": 2},
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), MAMBA | {"feed_forward_length": [0, 0, 16]}),
}


def config_of(arch: str = "llama", shapes: dict[str, tuple[int, ...]] = SHAPES, **changed: Any) -> ModelConfig:
    """The config of a small file with these keys (a dot is written as two underscores)."""
    keys = LLAMA | NEEDED.get(arch, {})
    keys |= {key.replace("__", "."): value for key, value in changed.items()}
    keys = {f"{arch}.{key}": value for key, value in keys.items() if value is not None}
    return from_gguf({"general.architecture": arch, **keys}, shapes)


def logits(name: str, **changed: Any) -> torch.Tensor:
    """Of the tiny model of that name, with keys changed, on the reference kernels."""
    arch = tiny.VARIANTS[name].arch
    loaded = Loaded(
        tiny.make(name).path, "reference", {f"{arch}.{k.replace('__', '.')}": v for k, v in changed.items()}
    )
    with one_thread():
        return loaded.run(Sequence(loaded.pool), IDS)


@torch.inference_mode()
def expected(name: str, change: Any = None, **options: Any) -> torch.Tensor:
    """Of the same weights in transformers, after `change` of the model."""
    model = copy.deepcopy(tiny.make(name).reference)
    if change is not None:
        change(model)
    return model(torch.tensor([IDS]), **options).logits[0]


def _scaled_attention(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.11


def _scaled_embedding(model: Any) -> None:
    model.model.embed_tokens.weight *= 2.5


def _halved_frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq /= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, keys, change, options",
    [
        ("llama-untied", {"rope__scaling__factor": 2.0}, _halved_frequencies, {}),
        ("llama-untied", {"rope__scale_linear": 2.0}, _halved_frequencies, {}),
        ("llama-untied", {"rope__scale_linear": 2.0, "rope__scaling__type": "linear"}, _halved_frequencies, {}),
        ("llama-llama3-rope", {"rope__scaling__factor": 2.0}, _halved_frequencies, {}),
        ("llama-untied", {"rope__scaling__factor": 2.0, "rope__scaling__type": "none"}, None, {}),
        ("llama-untied", {"attention__scale": 0.11}, _scaled_attention, {}),
        ("gemma3", {"attention__scale": 0.11}, _scaled_attention, {}),
        ("llama-untied", {"embedding_scale": 2.5}, _scaled_embedding, {}),
        ("gemma3", {"attn_logit_softcapping": 1.5}, None, {"softcap": 1.5}),
        ("llama-sliding", {"rope__freq_base_swa": 1e4}, None, {}),
    ],
)
def test_keys_that_are_obeyed(name: str, keys: dict[str, Any], change: Any, options: dict[str, Any]) -> None:
    wanted = expected(name, change, **options)
    assert (logits(name, **keys) - wanted).abs().max() <= 1e-4
    if change or options:
        assert (tiny.make(name).logits(IDS) - wanted).abs().max() > 0.01, "the key changes something"


def test_a_soft_cap_of_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' llama has none: it gets the attention of its gemma3, which takes one."""
    from transformers.models.gemma3 import modeling_gemma3
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", modeling_gemma3.eager_attention_forward)
    wanted = expected("llama-untied", softcap=1.5)
    assert (logits("llama-untied", attn_logit_softcapping=1.5) - wanted).abs().max() <= 1e-4
    assert (logits("llama-untied") - wanted).abs().max() > 0.01


@pytest.mark.parametrize(
    "window, pattern, kinds",
    [
        (None, None, [FULL] * 3),
        (0, None, [FULL] * 3),
        (8, None, [SLIDING] * 3),
        (8, 3, [SLIDING, SLIDING, FULL]),
        (8, 0, [SLIDING] * 3),
        (8, 1, [FULL] * 3),
        (8, [True, False, True], [SLIDING, FULL, SLIDING]),
        (None, [True, False, True], [FULL] * 3),
    ],
)
def test_windows_of_llama(window: int | None, pattern: Any, kinds: list[str]) -> None:
    keys = {"attention__sliding_window": window, "attention__sliding_window_pattern": pattern}
    given = {key: value for key, value in keys.items() if value is not None}
    config = config_of(**given)
    assert [layer.kind for layer in config.layers] == kinds
    assert [layer.window for layer in config.layers] == [8 if kind == SLIDING else 0 for kind in kinds]
    metadata = {"general.architecture": "novel"}
    metadata |= {f"novel.{key.replace('__', '.')}": value for key, value in (LLAMA | given).items()}
    planned = config_from_gguf_any(metadata, SHAPES)  # the reader of what kv does not run sees the same windows
    assert [(layer.kind, layer.window) for layer in planned.layers] == [(x.kind, x.window) for x in config.layers]


def test_experts() -> None:
    keys = {"expert_count": 8, "expert_used_count": 2}
    assert config_of("qwen3moe", **keys).experts == Experts(Routing(8, 2, SOFTMAX, True), 16)
    assert config_of("llama", expert_count=0).experts is None
    wide = SHAPES | {"blk.1.ffn_down_exps.weight": (8, 16, 12), "blk.1.ffn_down_shexp.weight": (16, 20)}
    more = {"leading_dense_block_count": 1, "expert_weights_norm": False, "expert_weights_scale": 2.5}
    groups = {"expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 3}
    routing = Routing(8, 2, CHOSEN, False, 2.5, 4, 2)
    assert config_of("glm4moe", wide, **keys, **more, **groups).experts == Experts(routing, 12, 20, 1)
    shared = config_of("glm4moe", **keys, expert_feed_forward_length=12, expert_shared_count=2)
    assert shared.experts == Experts(Routing(8, 2, SIGMOID, True), 12, 24)
    for bad in ({"expert_used_count": 9}, {"expert_group_count": 3}, {"expert_gating_func": 7}):
        with pytest.raises(ModelError, match=next(iter(bad))):
            config_of("qwen3moe", **keys | bad)
    with pytest.raises(ModelError, match="cannot be in 1 groups"):
        config_of("qwen3moe", **keys | {"expert_used_count": 3, "expert_group_count": 4, "expert_group_used_count": 1})


def test_layers_that_predict_further_tokens_are_not_run() -> None:
    ahead = config_of("glm4moe", block_count=4, nextn_predict_layers=1)
    assert ahead == replace(config_of("glm4moe", block_count=3), ahead=ahead.layers[:1])
    with pytest.raises(ModelError, match=r"nextn_predict_layers is 3, as many as there are"):
        config_of("glm4moe", nextn_predict_layers=3)


def test_rope_of_windows() -> None:
    two = config_of(attention__sliding_window=8, attention__sliding_window_pattern=3, rope__freq_base_swa=5e5)
    assert [layer.rope and layer.rope.base for layer in two.layers] == [5e5, 5e5, 1e4]
    assert [layer.kind for layer in config_of("gemma3", block_count=6).layers] == [SLIDING] * 5 + [FULL]


def test_sizes_by_layer() -> None:
    keys = {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, True, False]}
    keys |= {"attention__key_length_swa": 4, "attention__value_length_swa": 6, "rope__dimension_count_swa": 2}
    found = config_of(**keys, attention__head_count_kv=[2, 1, 2], feed_forward_length=[16, 8, 24])
    rows = [(x.kv_heads, x.dim_k, x.dim_v, x.rope and x.rope.dim, x.d_ff) for x in found.layers]
    assert rows == [(2, 4, 6, 2, 16), (1, 4, 6, 2, 8), (2, 8, 8, 8, 24)] and found.d_ff == 24
    shared = config_of(
        **keys | {"block_count": 4, "attention__shared_kv_layers": 2, "attention__sliding_window_pattern": 2}
    )
    assert [x.shares_kv_with for x in shared.layers] == [None, None, 0, 1]
    with pytest.raises(ModelError, match="head_count_kv must have 3 whole numbers"):
        config_of(attention__head_count_kv=[2, 1])
    with pytest.raises(ModelError, match="layer 2 shares the cache of an earlier full layer, and there is none"):
        config_of(**keys, attention__shared_kv_layers=1)


REFUSED = {
    "attention__clamp_kqv": (8.0, 0.0), "attention__max_alibi_bias": (8.0, 0.0), "attention__causal": (False, True),
    "use_parallel_residual": (True, False),
    "rope__scaling__yarn_ext_factor": (1.0, -1.0), "rope__scaling__alpha": (50.0, 1.0),
    "attention__q_lora_rank": (32, 0),
    "attention__value_scale": (2.0, 1.0),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arch", "key"), [(x, y) for x in RUNNABLE for y in REFUSED if NEEDED.get(x) is not LATENTS or "lora" not in y]
)
def test_keys_that_are_refused_by_name(arch: str, key: str) -> None:
    bad, neutral = REFUSED[key]
    assert config_of(arch, **{key: neutral}) == config_of(arch)
    with pytest.raises(ModelError, match=f"kv's {arch} cannot obey {arch}.{key.replace('__', '.')} = "):
        config_of(arch, **{key: bad})


@pytest.mark.parametrize(
    "arch, key, bad",
    [
        ("llama", "logit_scale", 0.5),
        ("llama", "rope__dimension_sections", [2, 1, 1, 0]),
        ("llama", "attention__temperature_scale", 0.1),
        ("gemma3", "embedding_scale", 3.0),
        ("gemma3", "expert_count", 8),
    ],
)
def test_keys_that_only_some_families_obey(arch: str, key: str, bad: Any) -> None:
    with pytest.raises(ModelError, match=f"kv's {arch} cannot obey {arch}.{key.replace('__', '.')} = "):
        config_of(arch, **{key: bad})


@pytest.mark.parametrize("key", ["rope.new_kind", "attention.sparse_blocks", "attention.indexer.top_k"])
def test_unknown_keys_of_attention_and_rope_are_refused(key: str) -> None:
    with pytest.raises(ModelError, match=f"llama.{key} = 7"):
        config_of(**{key: 7})
    with pytest.raises(ModelError, match=key):
        config_of(**{key: 0})  # what 0 means here nobody knows


def test_keys_that_describe_the_file_are_no_reason_to_refuse_it() -> None:
    described = {
        "vocab_size": 10, "tensor_data_layout": "Meta AI original pth", "rope__scaling__finetuned": False,
        "rope__scaling__original_context_length": 64, "expert_used_count": 0, "some_note": "a word",
    }  # fmt: skip
    assert config_of(**described) == config_of()
    other = {"general.architecture": "llama", **{f"llama.{k}": v for k, v in LLAMA.items()}, "clip.attention.x": 1}
    assert from_gguf(other, SHAPES) == config_of()


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    "keys, what",
    [
        ({"rope__scaling__type": "su"}, "llama.rope.scaling.type = su"),
        ({"rope__scaling__type": "longrope", "rope__scale_linear": 4.0}, "no tensor rope_factors_long.weight"),
        (YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "llama.rope.scaling.yarn_ext_factor = 0.5"),
        (
            YARN | {"attention__sliding_window": 8, "rope__freq_base_swa": 5e5},
            "cannot scale two kinds of RoPE by yarn",
        ),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, "rope.scale_linear is 2, and .*factor is 4"),
        ({"attention__sliding_window": -1}, "llama.attention.sliding_window must be 0 or more, not '-1'"),
        ({"attention__sliding_window": 2.5}, "must be a whole number up to"),
        ({"attention__sliding_window": 4, "attention__sliding_window_pattern": [True]}, "must name 3 layers, not 1"),
        ({"attention__head_count": [2, 2, 4]}, "llama.attention.head_count differs between the layers"),
        ({"rope__freq_base": "x"}, "llama.rope.freq_base must be a positive number, not 'x'"),
        ({"context_length": float("inf")}, "must be a whole number"),
    ],
)
def test_odd_values(keys: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        config_of(**keys)


def test_values_that_amount_to_the_default() -> None:
    plain = config_of()
    for keys in (
        {"rope__scaling__type": "yarn"},  # of no factor: nothing is scaled
        {"rope__scaling__factor": 0.0},
        {"rope__scaling__factor": 1.0, "rope__scaling__type": "linear"},
        {"attention__head_count": [2, 2, 2]},
        {"attention__scale": 0.0},
        {"embedding_scale": 1.0},
    ):
        assert config_of(**keys) == plain
