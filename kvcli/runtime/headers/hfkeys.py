"""`metadata_of`: the keys of a config.json as those that a GGUF file of the same model has. No torch.

One reader of shapes and one description of each architecture then serve both kinds of files. The keys are those that
llama.cpp's converter writes; which layers slide is always written out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

from kvcli.errors import ModelError
from kvcli.runtime.config import LAYER
from kvcli.runtime.headers import families
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.hflayers import (
    STATE_ONLY,
    adjusted,
    has_both,
    kinds_of,
    no_rope_layers,
    says_otherwise,
    window_of,
    without,
)
from kvcli.runtime.headers.hfrope import rope_keys
from kvcli.runtime.headers.hfstatekeys import state_keys
from kvcli.runtime.headers.shapes import Given

# Numbers that GGUF files keep under another name, as they are.
_RENAMED = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
}
_GATING = {"softmax": 1, "sigmoid": 2}  # expert_gating_func
_SIGMOID = (
    "llama4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v3",
    "kimi_k2",
    "dots1",
    "minimax_m2",
    "bailing_moe_v2",
    "lfm2_moe",
    "nemotron_h_moe",
)  # where no key says it


def config_of(data: Mapping[str, Any]) -> HFConfig:
    """The sizes in a parsed config.json."""
    return HFConfig(data, None)


def metadata_of(data: Mapping[str, Any], given: Given | None = None) -> dict[str, Any]:
    """The keys of a parsed config.json, `given` standing in for sizes that are missing.

    Raises ModelError that names a key which is missing, odd, or not understood although it may change the shape.
    """
    config = HFConfig(data, given)
    arch = families.gguf_name(config.model_type)
    keys = {**_sizes(config), **_layers(config), **_experts(config), **_numbers(config), **rope_keys(config)}
    config.refuse_unread()
    name = data.get("_name_or_path")
    named = {"general.name": name} if isinstance(name, str) and name else {}
    return {"general.architecture": arch, **named, **{f"{arch}.{key}": value for key, value in keys.items()}}


def _sizes(config: HFConfig) -> dict[str, Any]:
    hidden = config.count("hidden_size", "hidden")
    return {
        "block_count": config.n_layers,
        "embedding_length": hidden,
        "context_length": config.count("max_position_embeddings", default=0),
        "vocab_size": config.count("vocab_size", "vocab"),
        "feed_forward_length": _common(_widths(config, hidden)),
    }


def _widths(config: HFConfig, hidden: int) -> list[int]:
    """The width of each layer's dense feed-forward part."""
    if blocks := config.tables("block_configs"):
        return [0 if without(each.get("ffn")) else _searched_width(config, each["ffn"], hidden) for each in blocks]
    if config.model_type.startswith("nemotron_h"):
        own = "moe_intermediate_size" if config.model_type == "nemotron_h_moe" else "intermediate_size"
        config.seen("intermediate_size")
        width = config.count(own, "ffn")
        return [width if kind == "-" else 0 for kind in kinds_of(config)]
    if config.model_type == "llama4_text":
        config.get("intermediate_size")
        return config.each("intermediate_size_mlp", "ffn", config.count("intermediate_size", default=0))
    widths = config.each("intermediate_size", "ffn", 4 * hidden)
    if config.model_type == "granitemoehybrid" and not config.count("num_experts", default=0):
        return [config.count("shared_expert_intermediate_size")] * config.n_layers
    if config.model_type == "lfm2":
        widths = [adjusted(config, n) for n in widths]
    if config.get("use_double_wide_mlp"):  # of layers that read the rows of others
        first = config.n_layers - config.count("num_kv_shared_layers", default=0)
        widths = [n if i < first else 2 * n for i, n in enumerate(widths)]
    return widths


def _searched_width(config: HFConfig, ffn: Mapping[str, Any], hidden: int) -> int:
    """The width of a layer that a search has given its own (nemotron-nas)."""
    times = ffn.get("ffn_mult")
    if isinstance(times, (int, float)) and 0 < times < 1 << 10:
        return -(-int(2 * times * hidden / 3) // 256) * 256
    return config.within(ffn, "intermediate_size")


def _layers(config: HFConfig) -> dict[str, Any]:
    """What each layer keeps."""
    kinds, window = kinds_of(config), window_of(config)
    keys: dict[str, Any] = state_keys(config, kinds) if not set(kinds).isdisjoint("RK") or has_both(config) else {}
    if config.model_type not in STATE_ONLY:
        keys |= _latent(config) if config.count("kv_lora_rank", default=0) else _rows(config, kinds)
    else:
        keys["attention.head_count"] = 1
    if not set(kinds) <= set("FSC") and not says_otherwise(keys):
        heads = keys.get("attention.head_count_kv", 0)
        each = heads if isinstance(heads, list) else [heads] * config.n_layers
        keys["attention.head_count_kv"] = [n if kind in "FSC" else 0 for n, kind in zip(each, kinds, strict=True)]
    if not set(kinds).isdisjoint("SC"):
        keys["attention.sliding_window"] = window
        keys["attention.sliding_window_pattern"] = [kind in "SC" for kind in kinds]
    elif families.of_gguf(families.gguf_name(config.model_type)).windows.chunked:
        keys["attention.sliding_window"] = 0
    if shared := config.count("num_kv_shared_layers", default=0):
        keys["attention.shared_kv_layers"] = shared
    if config.model_type.startswith("gemma4") and config.get("attention_k_eq_v"):
        keys["attention.keys_as_values"] = True  # as files say by their tensors
    return keys


def _rows(config: HFConfig, kinds: str) -> dict[str, Any]:
    """Heads and their sizes, which may differ between layers."""
    heads = config.each("num_attention_heads_per_layer", default=config.count("num_attention_heads", "heads"))
    dim = config.count("head_dim", "dim_k", config.count("hidden_size", "hidden") // max(1, max(heads)))
    dim_v = config.count("v_head_dim", default=dim)
    layers = [_Rows(*each, dim, dim_v) for each in zip(heads, _kv_heads(config, heads), strict=True)]
    for layer, (rows, kind) in enumerate(zip(layers, kinds, strict=True)):
        layers[layer] = _own(config, layer, kind, rows)
        n, n_kv = layers[layer].heads, layers[layer].kv_heads
        if kind in "FSC" and (not n or not n_kv or n % n_kv):
            raise ModelError(f"{n} query heads are not a multiple of {n_kv} KV heads")
    keys = {
        "attention.head_count": _common([rows.heads for rows in layers]),
        "attention.head_count_kv": _common([rows.kv_heads for rows in layers]),
    }
    full, slides = (_dims(layers, kinds, each) for each in ("F", "SC"))
    dims = full or slides or (dim, dim_v)
    keys |= {"attention.key_length": dims[0], "attention.value_length": dims[1]}
    if slides and slides != dims:
        keys |= {"attention.key_length_swa": slides[0], "attention.value_length_swa": slides[1]}
    return keys


class _Rows(NamedTuple):
    """What one layer keeps of a token."""

    heads: int
    kv_heads: int
    dim_k: int
    dim_v: int


def _own(config: HFConfig, layer: int, kind: str, rows: _Rows) -> _Rows:
    """The rows of a layer with what the file says of its kind, or of it alone."""
    if kind == "S":
        rows = _Rows(
            config.count("swa_num_attention_heads", default=rows.heads),
            config.count("swa_num_key_value_heads", default=rows.kv_heads),
            dim := config.count("swa_head_dim", default=rows.dim_k),
            config.count("swa_v_head_dim", default=dim if config.has("swa_head_dim") else rows.dim_v),
        )
    if config.model_type.startswith("gemma4"):
        config.seen("num_global_key_value_heads", "global_head_dim")
        if kind == "F":
            wide = config.count("global_head_dim", default=512)
            kv_heads = config.count("num_global_key_value_heads", default=rows.kv_heads)
            rows = _Rows(rows.heads, kv_heads if config.get("attention_k_eq_v") else rows.kv_heads, wide, wide)
    table = config.table("per_layer_config")
    own = table.get(str(layer), table.get(f"{layer:02d}"))
    if not isinstance(own, Mapping):
        return rows
    return _Rows(
        config.within(own, "num_attention_heads", rows.heads),
        config.within(own, "num_key_value_heads", rows.kv_heads),
        dim := config.within(own, "head_dim", rows.dim_k),
        config.within(own, "v_head_dim", dim if "head_dim" in own else rows.dim_v),
    )


def _dims(layers: Sequence[_Rows], kinds: str, which: str) -> tuple[int, int] | None:
    """The sizes of keys and values of these layers, None if there are none. GGUF files have one size for each kind."""
    found = {(rows.dim_k, rows.dim_v) for rows, kind in zip(layers, kinds, strict=True) if kind in which}
    if len(found) > 1:
        raise ModelError("head_dim in config.json differs between layers of one kind, which kv cannot plan for")
    return found.pop() if found else None


def _kv_heads(config: HFConfig, heads: list[int]) -> list[int]:
    """KV heads of each layer; without the key as many as query heads."""
    config.seen("num_key_value_heads")
    one = [1] * config.n_layers
    if blocks := config.tables("block_configs"):
        parts = [None if without(each.get("attention")) else each["attention"] for each in blocks]
        groups = [0 if part is None else config.within(part, "n_heads_in_group") for part in parts]
        return [head // group if group else 0 for head, group in zip(heads, groups, strict=True)]
    if config.get("multi_query_attention") is False:  # chatglm
        return heads
    if config.model_type in ("falcon", "RefinedWebModel") and not config.get("new_decoder_architecture"):
        return one if config.get("multi_query", True) else heads
    if config.get("multi_query") is True and not config.has("num_key_value_heads"):
        return one
    if config.get("num_key_value_heads") is None and (config.given is None or config.given.kv_heads is None):
        return heads
    return config.each("num_key_value_heads", "kv_heads")


def _latent(config: HFConfig) -> dict[str, Any]:
    """Latent attention (MLA): keys and values compressed, and the part of the key that carries RoPE."""
    rank, rope = config.count("kv_lora_rank"), config.count("qk_rope_head_dim", "rope_dim")
    plain = config.count("qk_nope_head_dim", default=0)
    keys = {
        "attention.head_count": config.count("num_attention_heads", "heads"),
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": rank,
        "rope.dimension_count": rope,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": plain + rope,
        "attention.value_length_mla": config.count("v_head_dim", default=plain),
    }
    for name in ("head_dim", "num_key_value_heads"):  # of the attention that is not compressed
        config.get(name)
    if config.get("q_lora_rank"):
        keys["attention.q_lora_rank"] = config.count("q_lora_rank")
    if set(config.values("indexer_types") or ("full",)) != {"full"}:
        raise ModelError("indexer_types in config.json: kv cannot plan for indexers that layers share")
    if config.get("index_head_dim"):
        keys["attention.indexer.key_length"] = config.count("index_head_dim")
    return keys


def _experts(config: HFConfig) -> dict[str, Any]:
    experts = config.count("num_experts", default=0)
    if experts <= 1 or config.model_type == "nemotron_h":
        return {}
    keys: dict[str, Any] = {
        "expert_count": experts,
        "expert_used_count": config.count("num_experts_per_tok", default=1),
    }
    own = "intermediate_size" if config.model_type in ("gpt_oss", "llama4_text") else "moe_intermediate_size"
    width = max(config.each(own, default=0))
    if width:
        keys["expert_feed_forward_length"] = width
    shared = max(config.each("n_shared_experts", default=0), default=0)
    if shared:
        keys["expert_shared_count"] = shared
    if config.get("shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = config.count("shared_expert_intermediate_size")
    elif config.model_type == "llama4_text":
        keys["expert_shared_feed_forward_length"] = width
    elif shared and width:
        keys["expert_shared_feed_forward_length"] = shared * width
    if config.get("interleave_moe_layer_step"):
        keys["interleave_moe_layer_step"] = config.count("interleave_moe_layer_step")
    if config.get("first_k_dense_replace"):
        keys["leading_dense_block_count"] = config.count("first_k_dense_replace")
    elif config.has("mlp_layer_types"):
        keys["leading_dense_block_count"] = _leading(config, "mlp_layer_types", "dense")
    if config.get("norm_topk_prob") is not None:
        keys["expert_weights_norm"] = bool(config.get("norm_topk_prob"))
    if scale := config.number("routed_scaling_factor"):
        keys["expert_weights_scale"] = scale
    for name, key in (("n_group", "expert_group_count"), ("topk_group", "expert_group_used_count")):
        if config.get(name) and config.get("topk_method") != "greedy":
            keys[key] = config.count(name)
    gating = config.get("scoring_func") or ("sigmoid" if config.model_type in _SIGMOID else None)
    if gating in _GATING:
        keys["expert_gating_func"] = _GATING[gating]
    return keys


def _leading(config: HFConfig, name: str, kind: str) -> int:
    """How many layers of that kind come first. Raises ModelError where there are more behind another one."""
    named = config.values(name) or ()
    first = next((i for i, each in enumerate(named) if each != kind), len(named))
    if kind in named[first:] or len(named) != config.n_layers:
        raise ModelError(f"{name} in config.json: the {kind} layers must be the first of {config.n_layers}")
    return first


def _numbers(config: HFConfig) -> dict[str, Any]:
    keys: dict[str, Any] = {key: value for name, key in _RENAMED.items() if (value := config.number(name)) is not None}
    rms, layer = _RENAMED["rms_norm_eps"], _RENAMED["layer_norm_eps"]
    if rms not in keys and config.model_type.startswith("nemotron_h"):
        keys[rms] = keys.pop(layer)
    if rms in keys and families.of_gguf(families.gguf_name(config.model_type)).block.norm == LAYER:
        keys[layer] = keys.pop(rms)  # both have been called norm_eps
    if config.model_type == "falcon_h1":
        keys.pop("embedding_scale", None)  # it is in the matrices, as are others
    if config.model_type.startswith(("gemma3n", "gemma4")):
        keys["embedding_length_per_layer_input"] = config.count("hidden_size_per_layer_input", default=0)
    if config.model_type.startswith("gemma3n"):
        keys |= _streams(config)
    if config.has("use_parallel_residual"):
        keys["use_parallel_residual"] = bool(config.get("use_parallel_residual"))
    scalar = config.number("query_pre_attn_scalar")
    if scalar and not config.model_type.startswith(("gemma3n", "gemma4")):  # which do not look at it
        keys["attention.scale"] = scalar**-0.5
    if config.model_type == "llama4_text":
        tempered = config.get("attn_temperature_tuning", True)
        keys["attention.temperature_scale"] = (config.number("attn_scale") or 0.1) if tempered else 0.0
        keys["attention.temperature_length"] = config.count("floor_scale", default=8192)
    if config.get("no_rope_layers") or config.get("no_rope_layer_interval"):
        no_rope_layers(config)
    return keys


def _streams(config: HFConfig) -> dict[str, Any]:
    """The residual streams of Gemma 3n, and of each layer how far above their mean gates are open."""
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        first = 10 if config.n_layers > 10 else 0
        shares = [0.95] * first + [0.0] * (config.n_layers - first)
    shares = shares if isinstance(shares, list) else [shares] * config.n_layers
    if len(shares) != config.n_layers or not all(isinstance(x, (int, float)) and 0 <= x < 1 for x in shares):
        raise ModelError(f"activation_sparsity_pattern in config.json must be {config.n_layers} numbers from 0 to 1")
    return {
        "altup.num_inputs": config.count("altup_num_inputs"),
        "altup.active_idx": config.count("altup_active_idx"),
        "activation_sparsity_scale": [_deviations(x) for x in shares],
    }


def _deviations(share: float) -> float:
    """How many standard deviations above the mean such a share of Gaussian numbers ends, as a float32."""
    exact = NormalDist().inv_cdf(share) if share > 0 else -math.inf
    return float(struct.unpack("<f", struct.pack("<f", exact))[0])


def _common(values: list[int]) -> int | list[int]:
    """One number where all layers have the same."""
    return values[0] if len(set(values)) == 1 else values
