"""Tiny random models of every architecture: one of transformers, and the GGUF file that a converter would write."""

from __future__ import annotations

import copy
import functools
import re
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import tinyvocab
import torch
from safetensors.torch import save_file

CONTEXT, WINDOW = 512, 20


@dataclass(frozen=True)
class Family:
    """What the tiny models of one architecture have in common.

    `kind`: in transformers, where its name is another. `settings` go to the transformers config. `halves`: transformers
    turns halves of heads where files have neighbours. `one_more`: norm weights are 1 less than in files.
    """

    kind: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    halves: bool = False
    one_more: bool = False


@dataclass(frozen=True)
class Variant:
    """`settings` go to the transformers config, `keys` into the file (after the architecture's name). The embedding has
    `padding` rows more than there are tokens. `kind`: as in Family, of this one. `apart`: each expert of the file is a
    tensor of its own."""

    arch: str
    settings: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    padding: int = 0
    kind: str = ""
    apart: bool = False

    @property
    def family(self) -> Family:
        return FAMILIES[self.arch]


def _slides(*layers: bool) -> list[str]:
    return ["sliding_attention" if slides else "full_attention" for slides in layers]


def _tied(tied: bool, **others: Any) -> dict[str, Any]:
    return {"tie_word_embeddings": tied} | others


_EVEN = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}  # 6 heads of 8 are as wide as the model
_SLIDING = {"sliding_window": WINDOW}
# Some tokens have no row; the scale of scores is 1 whatever the config says.
_GEMMA3N = {"vocab_size_per_layer_input": 300, "laurel_rank": 6, "query_pre_attn_scalar": 256, **_SLIDING}
_GEMMA4 = {"global_head_dim": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 400, **_SLIDING}
_LATENTS = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 16, "head_dim": 8, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
_EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8) | {"num_experts_per_tok": 3}
_EXPERT_KEYS = {"expert_count": 8, "expert_used_count": 3}
# Six heads of eight.
_LFM2 = _EVEN | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
_LFM2 |= {"block_auto_adjust_ff_dim": False}
# Gated delta networks of two key heads and four value heads, with attention in every second layer.
_QWEN35 = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    | {"mrope_section": [2, 1, 1]},
}  # fmt: skip
# Mamba-2 of six heads of sixteen in two groups, with attention in every second layer.
_MAMBA = {
    "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "mamba_n_heads": 6,
    "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "num_local_experts": 0, "shared_intermediate_size": 80,
}  # fmt: skip
_GEMMA = {"query_pre_attn_scalar": 16, **_SLIDING}

FAMILIES = {
    "llama": Family(settings=_EVEN, halves=True),
    "internlm2": Family("llama", _EVEN, halves=True),
    "mistral3": Family("ministral3", halves=True),
    "qwen2": Family(),
    "qwen2vl": Family("qwen2_5_vl_text", _EVEN),
    "qwen3": Family(),
    "qwen3vl": Family("qwen3_vl_text"),
    "gemma": Family(one_more=True),
    "gemma2": Family(settings=_GEMMA, one_more=True),
    "gemma3": Family("gemma3_text", _GEMMA, one_more=True),
    "gemma3n": Family("gemma3n_text", _GEMMA3N),
    "gemma4": Family("gemma4_text", _GEMMA4),
    "gpt-oss": Family("gpt_oss", _EXPERTS | _SLIDING | {"intermediate_size": 24}),
    "llama4": Family("llama4_text", {"num_local_experts": 8, "intermediate_size": 24, "intermediate_size_mlp": 80}),
    "phi3": Family(settings=_EVEN),
    "smollm3": Family(settings=_EVEN, halves=True),
    "granite": Family(settings=_EVEN, halves=True),
    "olmo2": Family(settings=_EVEN),
    "glm4": Family(),
    "starcoder2": Family(settings=_EVEN),
    "nemotron": Family(settings=_EVEN, one_more=True),
    "stablelm": Family(settings=_EVEN),
    "exaone": Family("llama", _EVEN),
    "exaone4": Family(),
    "chatglm": Family("glm", _EVEN),
    "ernie4_5": Family(),
    "command-r": Family("cohere", _EVEN),
    "cohere2": Family(settings=_EVEN | _SLIDING),
    "hunyuan-dense": Family("hunyuan_v1_dense"),
    "seed_oss": Family(),
    "arcee": Family(halves=True),
    "qwen2moe": Family("qwen2_moe", _EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3moe": Family("qwen3_moe", _EXPERTS | {"moe_intermediate_size": 24}),
    "qwen3vlmoe": Family("qwen3_vl_moe_text", _EXPERTS | {"moe_intermediate_size": 20}),
    "granitemoe": Family(settings=_EXPERTS | _EVEN, halves=True),
    "olmoe": Family(settings=_EXPERTS | _EVEN),
    "glm4moe": Family("glm4_moe", _EXPERTS | {"moe_intermediate_size": 24, "first_k_dense_replace": 1}),
    "minimax-m2": Family("minimax_m2", _EXPERTS),
    "hunyuan-moe": Family("hunyuan_v1_moe", _EXPERTS | {"moe_topk": 3}),
    "deepseek2": Family("deepseek_v3", _EXPERTS | _LATENTS),
    "mistral4": Family(settings=_EXPERTS | _LATENTS | {"head_dim": 20}),
    "lfm2": Family(settings=_LFM2),
    "qwen3next": Family(
        "qwen3_next",
        _QWEN35
        | _EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        one_more=True,
    ),
    "granitehybrid": Family("granitemoehybrid", _EVEN | _MAMBA, halves=True),
    "qwen35": Family("qwen3_5_text", _QWEN35, one_more=True),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        _QWEN35 | _EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        one_more=True,
    ),
    "lfm2moe": Family("lfm2_moe", _LFM2 | _EXPERTS | {"moe_intermediate_size": 24, "num_dense_layers": 1}),
}

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
_YARN_KEYS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64}
_MINISTRAL = {
    **_YARN,
    "rope_theta": 1e4,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "llama_4_scaling_beta": 0.3,
    "original_max_position_embeddings": 16,
}
_LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.0, 2.0, 8.0],
    "partial_rotary_factor": 0.75,
}
_LONG_KEYS = {
    "rope.scaling.original_context_length": 40,
    "rope.scaling.attn_factor": (1 + np.log(CONTEXT / 40) / np.log(40)) ** 0.5,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
_GRANITE_KEYS = {"embedding_scale": 3.0, "attention.scale": 0.2, "residual_scale": 0.3, "logit_scale": 2.0}
_GLM_KEYS = {
    "expert_feed_forward_length": 24, "expert_shared_count": 1, "leading_dense_block_count": 1,
    "expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
}  # fmt: skip
_LATENT_KEYS = {
    "attention.head_count_kv": 1, "attention.kv_lora_rank": 32, "attention.key_length": 40,
    "attention.value_length": 32, "attention.key_length_mla": 20, "attention.value_length_mla": 16,
    "expert_feed_forward_length": 24, "expert_shared_count": 2, "leading_dense_block_count": 1,
    "expert_weights_scale": 1.5,
}  # fmt: skip
_OLD_KEYS = {
    "attention.head_count_kv": 4, "attention.kv_lora_rank": 32, "attention.key_length": 20,
    "attention.value_length": 16, "expert_feed_forward_length": 24, "expert_shared_count": 2,
    "leading_dense_block_count": 1, "expert_weights_scale": 1.5,
}  # fmt: skip
_GROUPED = {"expert_group_count": 4, "expert_group_used_count": 2}
_LATENT_YARN = _YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7}
_QWEN35_KEYS = {
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 48, "ssm.conv_kernel": 4,
    "full_attention_interval": 2, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
_MAMBA_KEYS = {
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 96, "ssm.conv_kernel": 4,
    "attention.head_count_kv": [0, 2, 0, 2], "rope.scaling.finetuned": False,
}  # fmt: skip
_LFM2_KEYS = {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}
_HYBRID = {"layer_types": _slides(True, False, True), **_SLIDING}
_HYBRID_KEYS = {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False, True]}

_LLAMA4_KEYS = {
    "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, True, True, False],
    "attention.temperature_scale": 0.3, "attention.temperature_length": 16, "feed_forward_length": 80,
    "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 24, "expert_gating_func": 2,
    "expert_count": 8,
}  # fmt: skip


def _above(*shares: float) -> list[float]:
    """In standard deviations, as float32."""
    return [float(np.float32(NormalDist().inv_cdf(x) if x else -np.inf)) for x in shares]


_GEMMA3N_KEYS = {
    "attention.sliding_window": WINDOW, "rope.freq_base_swa": 1e4, "feed_forward_length": 80,
    "embedding_length_per_layer_input": 8, "altup.num_inputs": 4, "altup.active_idx": 0,
}  # fmt: skip
_GEMMA4_KEYS = {
    "attention.key_length": 24,
    "attention.value_length": 24,
    "attention.key_length_swa": 16,
    "attention.value_length_swa": 16,
    "attention.sliding_window": WINDOW,
    "rope.dimension_count": 24,
    "rope.dimension_count_swa": 16,
    "embedding_length_per_layer_input": 0,
}
_EACH_LAYER = (
    "attention.head_count_kv",
    "attention.recurrent_layers",
    "layer_types",
    "no_rope_layers",
    "attention.sliding_window_pattern",
)
# Of models of `make_even` in which layers keep a state: settings and keys.
_EVEN_STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2": ({}, {"attention.head_count_kv": [0, 1]}),
    "qwen35": ({"linear_value_head_dim": 8}, {"ssm.inner_size": 32}),
    "granitehybrid": (
        {"mamba_n_heads": 8, "shared_intermediate_size": 96},
        {"attention.head_count_kv": [0, 1], "ssm.time_step_rank": 8, "ssm.inner_size": 128},
    ),
}
BORROWED = ("internlm2", "exaone")  # transformers has them as remote code alone; they are llamas by other names
FILES_ALONE = (
    *BORROWED,
    "deepseek2-old",
    "glm4moe-ahead",
    "mixtral-apart",
    "qwen3next-apart",
)  # of which transformers writes no folder that is like the file
_ALWAYS_TIED = ("gemma", "gemma2", "gemma3", "cohere2", "command-r")

VARIANTS = {
    "llama": Variant("llama", _tied(True)),
    "llama-untied": Variant("llama", _tied(False)),
    "llama-padded": Variant("llama", _tied(True), padding=13),
    "llama-untied-padded": Variant("llama", _tied(False), padding=13),
    "llama-biased": Variant("llama", _tied(True, attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": Variant("llama", {"rope_scaling": _LLAMA3}),
    "llama-linear-rope": Variant(
        "llama", {"rope_scaling": _LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    "llama-yarn": Variant("llama", {"rope_scaling": _YARN}, _YARN_KEYS),
    "llama-yarn-factor": Variant(
        "llama",
        {"rope_scaling": _YARN | {"attention_factor": 1.4, "beta_fast": 4.0, "beta_slow": 0.5}},
        _YARN_KEYS
        | {
            "rope.scaling.yarn_attn_factor": 1.4,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 0.5,
        },
    ),
    # Mistral 7B v0.1 and its like: every layer has the same window.
    "llama-sliding": Variant("llama", _tied(False, **_SLIDING), {"attention.sliding_window": WINDOW}, kind="mistral"),
    "mistral3": Variant(
        "mistral3",
        _tied(True, rope_parameters=_MINISTRAL),
        _YARN_KEYS
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.8}
        | {"attention.temperature_scale": 0.3},
    ),
    "internlm2": Variant("internlm2", _tied(False)),
    "qwen2": Variant("qwen2", _tied(True)),
    "qwen2vl": Variant(
        "qwen2vl",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        {"rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen3": Variant("qwen3", _tied(True)),
    "qwen3-untied": Variant("qwen3", _tied(False)),
    "qwen3vl": Variant(
        "qwen3vl",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "gemma": Variant("gemma", _tied(True)),
    "gemma2": Variant(
        "gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention.sliding_window": WINDOW},
    ),
    "gemma3": Variant(
        "gemma3",
        {"layer_types": _slides(True, False, True)},
        _HYBRID_KEYS,
    ),
    # As files in circulation are: neither the pattern nor the local RoPE base is named.
    "gemma3-bare": Variant(
        "gemma3",
        {"num_hidden_layers": 6, "layer_types": _slides(True, True, True, True, True, False)},
        {"attention.sliding_window": WINDOW},
    ),
    # Four streams, gates of some layers mostly closed; three, of which layers see another one.
    "gemma3n": Variant(
        "gemma3n",
        {
            "num_hidden_layers": 6,
            "layer_types": _slides(True, True, False, True, True, False),
            "num_kv_shared_layers": 3,
            "intermediate_size": 80,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 2.0,
            "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.0, 0.0],
        },
        _GEMMA3N_KEYS
        | {
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True, True, False, True, True, False],
            "final_logit_softcapping": 2.0,
            "activation_sparsity_scale": _above(0.95, 0.5, 0.0, 0.8, 0.0, 0.0),
        },
    ),
    "gemma3n-three": Variant(
        "gemma3n",
        {
            "layer_types": _slides(True, True, False),
            "num_kv_shared_layers": 0,
            "intermediate_size": [80, 64, 80],
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
        },
        _GEMMA3N_KEYS
        | {
            "attention.sliding_window_pattern": [True, True, False],
            "feed_forward_length": [80, 64, 80],
            "altup.num_inputs": 3,
            "altup.active_idx": 1,
            "final_logit_softcapping": 30.0,
            "activation_sparsity_scale": _above(0.0, 0.0, 0.0),
        },
    ),
    # The last layers read rows of earlier ones, and each layer has an embedding of tokens of its own.
    "gemma4": Variant(
        "gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": _slides(True, True, False, True, True, False),
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 2.0,
        },
        _GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 3,
            "attention.sliding_window_pattern": [True, True, False, True, True, False],
            "feed_forward_length": [80, 80, 80, 160, 160, 160],
            "embedding_length_per_layer_input": 8,
            "final_logit_softcapping": 2.0,
        },
    ),
    # Layers that see everything have keys that are their values, too.
    "gemma4-keys": Variant(
        "gemma4",
        {
            "layer_types": _slides(True, True, False),
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
        },
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [True, True, False]},
    ),
    # The one with experts has a dense part beside them, and keys as values.
    "gemma4-experts": Variant(
        "gemma4",
        {
            "layer_types": _slides(True, False, False),
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        _GEMMA4_KEYS
        | _EXPERT_KEYS
        | {"attention.sliding_window_pattern": [True, False, False], "attention.head_count_kv": [2, 1, 1]}
        | {"expert_feed_forward_length": 24},
    ),
    # Its ramp of YaRN is not rounded to whole dims.
    "gpt-oss": Variant(
        "gpt-oss",
        _tied(False, rope_parameters=_YARN | {"rope_theta": 1e4, "truncate": False, "beta_fast": 8.0}),
        _EXPERT_KEYS
        | _YARN_KEYS
        | {"attention.sliding_window": WINDOW, "rope.scaling.yarn_beta_fast": 8.0, "expert_feed_forward_length": 24},
    ),
    # Scout: norms of q and k, scaled RoPE. Maverick: neither, and experts in every other layer.
    "llama4": Variant(
        "llama4",
        _tied(False, num_hidden_layers=4, rope_scaling=_LLAMA3 | {"high_freq_factor": 1.0}, num_experts_per_tok=1)
        | {"attention_chunk_size": WINDOW, "floor_scale": 16, "attn_scale": 0.3},
        _LLAMA4_KEYS | {"expert_used_count": 1, "interleave_moe_layer_step": 1},
    ),
    "llama4-interleaved": Variant(
        "llama4",
        _tied(True, num_hidden_layers=5, num_local_experts=128, use_qk_norm=False, interleave_moe_layer_step=2)
        | {"attention_chunk_size": 32, "floor_scale": 16, "attn_scale": 0.3, "num_experts_per_tok": 2},
        _LLAMA4_KEYS
        | {"expert_count": 128, "expert_used_count": 2, "interleave_moe_layer_step": 2, "attention.sliding_window": 32}
        | {"attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "phi3": Variant("phi3", _tied(False, **_SLIDING), {"attention.sliding_window": WINDOW}),
    # Phi-4 mini: part of each head is turned, by other factors in a long context.
    "phi3-long": Variant("phi3", _tied(True, rope_scaling=_LONG, original_max_position_embeddings=40), _LONG_KEYS),
    "smollm3": Variant("smollm3", _tied(True, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])),
    "granite": Variant("granite", _tied(True, **_GRANITE), _GRANITE_KEYS),
    "granite-biased": Variant("granite", _tied(False, attention_bias=True, **_GRANITE), _GRANITE_KEYS),
    "olmo2": Variant("olmo2", _tied(False)),
    # OLMo 3: layers that slide have plain RoPE.
    "olmo2-sliding": Variant(
        "olmo2", _HYBRID | _tied(False, rope_scaling=_YARN), _HYBRID_KEYS | _YARN_KEYS, kind="olmo3"
    ),
    "glm4": Variant("glm4", _tied(False, attention_bias=True)),
    "starcoder2": Variant("starcoder2", _tied(True)),
    "nemotron": Variant("nemotron", _tied(False), {"rope.scaling.type": "none"}),
    "stablelm": Variant(
        "stablelm", _tied(False, use_qkv_bias=True, use_parallel_residual=False), {"use_parallel_residual": False}
    ),
    "exaone": Variant("exaone", _tied(False, rope_scaling=_LLAMA3)),
    "chatglm": Variant("chatglm", _tied(False, attention_bias=True)),
    "ernie4_5": Variant("ernie4_5", _tied(True)),
    "command-r": Variant("command-r", _tied(True, logit_scale=0.4), {"logit_scale": 0.4, "rope.scaling.type": "none"}),
    "exaone4": Variant("exaone4", _HYBRID | _tied(True), _HYBRID_KEYS),
    "exaone4-full": Variant(
        "exaone4", _tied(False, sliding_window=None, layer_types=_slides(False, False, False), rope_scaling=_LLAMA3)
    ),
    "cohere2": Variant(
        "cohere2",
        _tied(True, layer_types=_slides(True, False, True), logit_scale=0.4),
        _HYBRID_KEYS | {"logit_scale": 0.4, "rope.scaling.type": "none"},
    ),
    "hunyuan-dense": Variant("hunyuan-dense", _tied(True)),
    "seed_oss": Variant("seed_oss", _tied(False)),
    "arcee": Variant("arcee", _tied(False)),
    "mixtral": Variant("llama", _tied(False, **_EXPERTS), _EXPERT_KEYS, kind="mixtral"),
    "mixtral-apart": Variant("llama", _tied(True, **_EXPERTS), _EXPERT_KEYS, kind="mixtral", apart=True),
    "qwen2moe": Variant(
        "qwen2moe",
        _tied(True, norm_topk_prob=False),
        _EXPERT_KEYS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": Variant(
        "qwen3moe", _tied(False, norm_topk_prob=True), _EXPERT_KEYS | {"expert_feed_forward_length": 24}
    ),
    "qwen3vlmoe": Variant(
        "qwen3vlmoe",
        _tied(False, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}),
        _EXPERT_KEYS | {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "granitemoe": Variant("granitemoe", _tied(True, **_GRANITE), _EXPERT_KEYS | _GRANITE_KEYS),
    "granitemoe-shared": Variant(
        "granitemoe",
        _tied(True, shared_intermediate_size=40, **_GRANITE),
        _EXPERT_KEYS | _GRANITE_KEYS | {"expert_shared_feed_forward_length": 40},
        kind="granitemoeshared",
    ),
    "olmoe": Variant("olmoe", _tied(False), _EXPERT_KEYS),
    "glm4moe": Variant(
        "glm4moe",
        _tied(False, attention_bias=True, routed_scaling_factor=1.5, n_group=4, topk_group=2),
        _EXPERT_KEYS | _GLM_KEYS | {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    # GLM 4.5: norms of heads, and a layer that predicts the token after the next one.
    "glm4moe-ahead": Variant(
        "glm4moe",
        _tied(False, use_qk_norm=True, num_hidden_layers=2, routed_scaling_factor=1.5),
        _EXPERT_KEYS | _GLM_KEYS | {"nextn_predict_layers": 1, "block_count": 3},
    ),
    "qwen35": Variant("qwen35", _tied(False), _QWEN35_KEYS),
    "qwen35-named": Variant(
        "qwen35",
        _tied(True, layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "full_attention_interval"}
        | {"attention.recurrent_layers": [False, True, True, False]},
    ),
    "qwen35moe": Variant(
        "qwen35moe",
        _tied(False),
        _QWEN35_KEYS | _EXPERT_KEYS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "granitehybrid": Variant(
        "granitehybrid",
        _tied(True, **_GRANITE, **_EXPERTS, shared_intermediate_size=40, intermediate_size=24),
        _GRANITE_KEYS | _MAMBA_KEYS | _EXPERT_KEYS | {"expert_shared_feed_forward_length": 40},
    ),
    "granitehybrid-dense": Variant(
        "granitehybrid",
        _tied(False, position_embedding_type="rope", mamba_conv_bias=False, **_GRANITE),
        _GRANITE_KEYS | _MAMBA_KEYS | {"rope.scaling.finetuned": True},
    ),
    "qwen3next": Variant(
        "qwen3next",
        _tied(False, norm_topk_prob=True),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "rope.dimension_sections"}
        | _EXPERT_KEYS
        | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    # Channels and gates of the output are matrices of their own, as converters have written them since.
    "qwen3next-apart": Variant(
        "qwen3next",
        _tied(False, norm_topk_prob=True),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "rope.dimension_sections"}
        | _EXPERT_KEYS
        | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
        apart=True,
    ),
    # Short convolutions; the second one over four rows, with biases.
    "lfm2": Variant("lfm2", _tied(True), _LFM2_KEYS),
    "lfm2-biased": Variant("lfm2", _tied(False, conv_bias=True, conv_L_cache=4), _LFM2_KEYS | {"shortconv.l_cache": 4}),
    "lfm2moe": Variant(
        "lfm2moe",
        _tied(True),
        _LFM2_KEYS
        | _EXPERT_KEYS
        | {"expert_gating_func": 2, "expert_feed_forward_length": 24, "leading_dense_block_count": 1},
    ),
    "minimax-m2": Variant("minimax-m2", _tied(False), _EXPERT_KEYS | {"expert_gating_func": 2}),
    "hunyuan-moe": Variant("hunyuan-moe", _tied(True), _EXPERT_KEYS),
    # DeepSeek V3: sigmoid routing by groups, queries compressed.
    "deepseek2": Variant(
        "deepseek2",
        _tied(False, rope_parameters=_LATENT_YARN, n_group=4, topk_group=2, norm_topk_prob=True),
        _EXPERT_KEYS
        | _LATENT_KEYS
        | _GROUPED
        | _YARN_KEYS
        | {"attention.q_lora_rank": 24, "rope.scaling.yarn_log_multiplier": 0.07, "expert_weights_norm": True}
        | {"expert_gating_func": 2},
    ),
    # V2: softmax, groups by their best expert.
    "deepseek2-groups": Variant(
        "deepseek2",
        _tied(False, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        _EXPERT_KEYS | _LATENT_KEYS | _GROUPED | {"attention.q_lora_rank": 24},
        kind="deepseek_v2",
    ),
    # Files of then have one tensor of keys and values.
    "deepseek2-old": Variant(
        "deepseek2", _tied(False, topk_method="greedy", q_lora_rank=None), _EXPERT_KEYS | _OLD_KEYS, kind="deepseek_v2"
    ),
    "deepseek2-lite": Variant(
        "deepseek2",
        _tied(False, topk_method="greedy", q_lora_rank=None, rope_parameters=_LATENT_YARN),
        _EXPERT_KEYS | _LATENT_KEYS | _YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.07},
        kind="deepseek_v2",
    ),
    # GLM-4.7-Flash; files do not say that routing is by sigmoids. In transformers norms of what is compressed add 1e-6
    # whatever the config says.
    "deepseek2-glm": Variant(
        "deepseek2",
        _tied(False, mlp_layer_types=["dense", "sparse", "sparse"], norm_topk_prob=True, rms_norm_eps=1e-6),
        _EXPERT_KEYS | _LATENT_KEYS | {"attention.q_lora_rank": 24, "expert_weights_norm": True},
        kind="glm4_moe_lite",
    ),
    "mistral4": Variant(
        "mistral4",
        _tied(False, rope_parameters=_MINISTRAL | {"mscale": 0.8, "partial_rotary_factor": 0.4}, norm_topk_prob=True),
        _EXPERT_KEYS
        | _LATENT_KEYS
        | _YARN_KEYS
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.08}
        | {"attention.q_lora_rank": 24, "attention.temperature_scale": 0.3, "attention.temperature_length": 16}
        | {"expert_weights_norm": True},
    ),
}

# Not among those that every test of architectures runs: DeepSeek V3 with a layer that predicts further tokens.
BESIDE = {
    "deepseek2-ahead": replace(
        VARIANTS["deepseek2"],
        settings=VARIANTS["deepseek2"].settings | {"num_hidden_layers": 2},
        keys=VARIANTS["deepseek2"].keys | {"nextn_predict_layers": 1, "block_count": 3},
    )
}


@dataclass(frozen=True)
class Tiny:
    path: Path
    reference: torch.nn.Module  # the same weights in transformers, float32
    n_tokens: int  # of the vocabulary

    def logits(self, ids: list[int]) -> torch.Tensor:
        """float32 [n, n_tokens], as transformers has them."""
        with torch.inference_mode():
            return self.reference(torch.tensor([ids])).logits[0][:, : self.n_tokens]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-models-")  # removed when the process ends


@functools.cache
def make(name: str) -> Tiny:
    """The variant of that name (a key of VARIANTS, or of BESIDE); its file is written once."""
    return build(BESIDE.get(name) or VARIANTS[name], Path(_folder().name) / f"{name}.gguf")


def build(variant: Variant, path: Path) -> Tiny:
    tokenizer, _ = tinyvocab.byte_level()
    n_tokens = len(tokenizer["tokenizer.ggml.tokens"])
    reference = _reference(variant, n_tokens + variant.padding)
    write(path, variant, reference, tokenizer)
    return Tiny(path, reference, n_tokens)


@functools.cache
def folder(name: str) -> Path:
    """The variant of that name as transformers saves it, with its tokenizer."""
    path, model = Path(_folder().name) / name, make(name).reference
    path.mkdir()
    if isinstance(model, _Headed):
        save_file({key: weight.contiguous() for key, weight in model.state_dict().items()}, path / "model.safetensors")
        model.config.save_pretrained(path)
    else:
        model.save_pretrained(path)
    tinyvocab.byte_level()[1].save(str(path / "tokenizer.json"))
    return path


@functools.cache
def make_even(arch: str, quantized: bool, tokens: int = 64) -> Path:
    """A file of 2 layers, sizes that are multiples of 32, 64 rows of the embedding; matrices but V as Q8_0, or F32.

    All else is as in the variant of that name. The vocabulary has `tokens` names and no more: there is no tokenizer.
    """
    known = VARIANTS[arch]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 2, "head_dim": 64 if arch == "gemma3" else 32}
    sizes |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "shared_intermediate_size": 64}
    settings = _of_two(known.family.settings | known.settings) | _tied(arch in _ALWAYS_TIED, **sizes)
    settings |= _EVEN_STATES.get(known.arch, ({}, {}))[0]
    keys = {key: value for key, value in _of_two(known.keys).items() if not key.endswith("feed_forward_length")}
    keys |= _EVEN_STATES.get(known.arch, ({}, {}))[1]
    variant = Variant(known.arch, settings, keys, kind=known.kind)
    path = Path(_folder().name) / f"{arch}-even-{quantized}-{tokens}.gguf"
    names = {"tokenizer.ggml.tokens": [f"<{i}>" for i in range(tokens)]}
    write(path, variant, _reference(variant, 64), names, quantized)
    return path


def _of_two(values: dict[str, Any]) -> dict[str, Any]:
    """Of what is listed for each layer, the first two."""
    return {key: value[:2] if key in _EACH_LAYER else value for key, value in values.items()}


class _Headed(torch.nn.Module):
    """A text model that transformers has no head for, with one."""

    def __init__(self, config: Any) -> None:
        from transformers import AutoModel

        super().__init__()
        self.config = config
        self.model = AutoModel.from_config(config, attn_implementation="eager", dtype=torch.float32)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.lm_head(self.model(ids).last_hidden_state))


def _reference(variant: Variant, vocab_size: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    family = variant.family
    settings: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": CONTEXT, "hidden_size": 48}
    settings |= {"intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "vocab_size": vocab_size}
    settings |= copy.deepcopy(family.settings | variant.settings)  # transformers adds to what it is given
    config = AutoConfig.for_model(variant.kind or family.kind or variant.arch, **settings)
    if type(config) in AutoModelForCausalLM._model_mapping:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    else:
        model = _Headed(config)
    model.eval()
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.named_parameters():  # larger than transformers' own, or layers would do next to nothing
        scale = 0.2 if weight.dim() == 1 else 1.5 * weight.shape[-1] ** -0.5
        mean = 1.0 if weight.dim() == 1 and name.endswith("weight") and not family.one_more else 0.0
        weight.data = mean + scale * torch.randn(weight.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5 + float(torch.rand(1, generator=generator)))
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            buffer.data = 0.3 * torch.randn(buffer.shape, generator=generator)
    if variant.padding:
        model.get_output_embeddings().weight.data[-variant.padding :] *= 50  # they would win every draw
    return model


def write(path: Path, variant: Variant, model: Any, tokenizer: dict[str, Any], quantized: bool = False) -> None:
    writer = gguf.GGUFWriter(path, variant.arch)
    sizes = _sizes(model)
    norms = {"rms_norm_eps": "layer_norm_rms"}
    norms |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), "layer_norm")
    if variant.arch in ("lfm2", "lfm2moe"):
        norms["norm_eps"] = "layer_norm_rms"
    keys: dict[str, Any] = {
        "context_length": CONTEXT,
        "embedding_length": sizes.hidden_size,
        "feed_forward_length": sizes.intermediate_size,
        "block_count": sizes.num_hidden_layers,
        "attention.head_count": sizes.num_attention_heads,
        "attention.head_count_kv": sizes.num_key_value_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "rope.freq_base": float(_rope(sizes)["rope_theta"]),
        "rope.dimension_count": getattr(sizes, "qk_rope_head_dim", 0)
        or int(sizes.head_dim * (_rope(sizes).get("partial_rotary_factor") or 1)),
    }
    keys |= {f"attention.{key}_epsilon": getattr(sizes, x) for x, key in norms.items() if hasattr(sizes, x)}
    for key, value in {f"{variant.arch}.{key}": v for key, v in (keys | variant.keys).items()}.items():
        _add(writer, key, value)
    for key, value in tokenizer.items():
        _add(writer, key, value)
    tensors = _tensors(variant, model)
    if variant.apart:
        tensors = [x for name, weight in tensors for x in _of_key_heads(name, weight)]
        tensors = [(name.replace("_exps.", f".{i}."), each) for name, x in tensors for i, each in _experts_of(name, x)]
    for name, weight in tensors:
        values = np.ascontiguousarray(weight.numpy(), dtype=np.float32)
        if (
            quantized
            and weight.dim() > 1
            and not any(x in name for x in ("attn_v", "gate_inp", "conv", "ssm_norm"))
            and (name.endswith(".weight"))
        ):
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _experts_of(name: str, weight: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return list(enumerate(weight)) if "_exps." in name else [(0, weight)]


def _sizes(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.allow_global_per_layer_attribute_access = True  # of those that differ, too
    return config


def _rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders: dict[type, Any] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        np.float64: writer.add_float32,
        list: writer.add_array,
    }
    adders[type(value)](key, value)


def _tensors(variant: Variant, model: Any) -> list[tuple[str, torch.Tensor]]:
    """Names and values as in GGUF files: llama's q and k rows in interleaved order, gemma's norms with their 1."""
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == variant.arch)
    sizes = _sizes(model)
    names = gguf.get_tensor_name_map(arch, sizes.num_hidden_layers)
    found: list[tuple[str, torch.Tensor]] = []
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and getattr(sizes, "tie_word_embeddings", False):
            continue
        for part, heads in (("q", sizes.num_attention_heads), ("k", sizes.num_key_value_heads)):
            if variant.family.halves and f".{part}_proj." in name:
                weight = _interleaved(weight, heads)
        if variant.family.one_more and name.endswith("norm.weight") and "linear_attn" not in name:
            weight = weight + 1
        if "linear_attn" in name:
            tiled = variant.arch != "qwen3next"
            name, weight = _of_delta(name, weight, sizes.linear_value_head_dim, tiled)
        if ".mamba." in name:
            name, weight = _of_mamba(name, weight)
        if found_stream := re.fullmatch(r"(model\.altup\w+)\.0\.weight", name):
            streams = [x for key, x in model.state_dict().items() if key.startswith(f"{found_stream[1]}.")]
            name, weight = f"{found_stream[1]}.weight", torch.stack(streams)
        elif name.startswith("model.altup"):
            continue
        if name.endswith("expert_bias"):
            name += ".bias"
        if name.endswith("conv.conv.weight"):
            weight = weight.squeeze(1)
        if name.endswith(("layer_scalar", "correct_output_scale")) or re.search(
            r"\d\.experts\.(gate_up|down)_proj$", name
        ):
            name += ".weight"
        if (
            experts := _of_clamped(name, weight)
            if variant.arch == "gpt-oss"
            else _of_experts(variant.arch, name, weight, not getattr(sizes, "num_local_experts", 1))
        ):
            found += experts
            continue
        if name.endswith("kv_b_proj.weight") and "attention.key_length_mla" in variant.keys:
            found += _of_heads(name, weight, sizes)
            continue
        known = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, f"GGUF has no name for {name}"
        found.append((known, weight))
    if variant.keys.get("nextn_predict_layers"):
        found += _of_next(variant, sizes)
    scaling = variant.settings.get("rope_scaling", {})
    if scaling.get("rope_type") == "llama3":
        frequencies, dim = model.model.rotary_emb.inv_freq.double(), sizes.head_dim
        plain = _rope(sizes)["rope_theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        assert (plain / frequencies).max() > 7.9, "no frequency is scaled"
        found.append(("rope_freqs.weight", (plain / frequencies).float()))
    if variant.arch == "gemma4":
        found.append(("rope_freqs.weight", torch.tensor([1.0] * 3 + [1e30] * 9)))
    if scaling is _LONG:
        found += [(f"rope_factors_{x}.weight", torch.tensor(_LONG[f"{x}_factor"])) for x in ("long", "short")]
    return found


def next_layer(variant: Variant) -> tuple[Any, dict[str, torch.Tensor]]:
    """What the layer of a variant that predicts further tokens is made of: a model of transformers with one layer more,
    whose last one it is, with the norm behind it; and, by their names in files, what stands before it."""
    n = variant.settings["num_hidden_layers"]
    n_tokens = len(tinyvocab.byte_level()[0]["tokenizer.ggml.tokens"])
    model = _reference(replace(variant, settings=variant.settings | {"num_hidden_layers": n + 1}), n_tokens)
    d, generator = _sizes(model).hidden_size, torch.Generator().manual_seed(9)
    norms = {x: 1 + 0.2 * torch.randn(d, generator=generator) for x in ("enorm", "hnorm")}
    return model, norms | {"eh_proj": 1.5 * (2 * d) ** -0.5 * torch.randn(d, 2 * d, generator=generator)}


def _of_next(variant: Variant, sizes: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of that layer."""
    model, before = next_layer(variant)
    prefix = f"blk.{sizes.num_hidden_layers}."
    keys = {key: value for key, value in variant.keys.items() if key != "nextn_predict_layers"}
    block = [each for each in _tensors(replace(variant, keys=keys), model) if each[0].startswith(prefix)]
    norm = ("shared_head_norm", model.model.norm.weight.data)
    return [*block, *((f"{prefix}nextn.{part}.weight", x) for part, x in (*before.items(), norm))]


def _of_heads(name: str, weight: torch.Tensor, sizes: Any) -> list[tuple[str, torch.Tensor]]:
    """The matrices of each head, as files have had them since 2025."""
    layer = name.split(".")[2]
    keys, values = weight.unflatten(0, (sizes.num_attention_heads, -1)).split(
        [sizes.qk_nope_head_dim, sizes.v_head_dim], 1
    )
    return [(f"blk.{layer}.attn_k_b.weight", keys.mT.contiguous()), (f"blk.{layer}.attn_v_b.weight", values)]


def _of_delta(name: str, weight: torch.Tensor, dim: int, tiled: bool) -> tuple[str, torch.Tensor]:
    """Of a gated delta network: value heads 0 and 2, which read the first key head and the second one, stand before 1
    and 3."""
    part, order = name.rpartition("linear_attn.")[2], torch.tensor([0, 2, 1, 3])
    wide = torch.cat([h * dim + torch.arange(dim) for h in order])
    if not tiled:  # neighbours stay neighbours
        pass
    elif part in ("in_proj_qkv.weight", "conv1d.weight"):
        weight = torch.cat([weight[:32], weight[32:][wide]])
    elif part == "in_proj_z.weight":
        weight = weight[wide]
    elif part == "out_proj.weight":
        weight = weight[:, wide]
    elif part != "norm.weight":
        weight = weight[order]
    if part == "conv1d.weight":
        weight = weight.squeeze(1)
    if part == "A_log":
        weight = -weight.exp()
    return name.replace("dt_bias", "dt_proj.bias"), weight


def _of_key_heads(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Of queries, keys, values and gates of two key heads, each kind by itself; any other tensor as it is."""
    if not name.endswith(".ssm_in.weight") or len(weight) != 128:
        return [(name, weight)]
    *channels, gates = (x.flatten(0, 1) for x in weight.unflatten(0, (2, -1)).split([8, 8, 24, 24], 1))
    return [(name.replace("ssm_in", "attn_qkv"), torch.cat(channels)), (name.replace("ssm_in", "attn_gate"), gates)]


def _of_mamba(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Of Mamba-2."""
    part = name.rpartition("mamba.")[2]
    if part in ("A_log", "D"):
        weight = (-weight.exp() if part == "A_log" else weight)[:, None]
    elif part == "norm.weight":
        weight = weight.view(2, -1)
    elif part == "conv1d.weight":
        weight = weight.squeeze(1)
    return name.replace("dt_bias", "dt_proj.bias"), weight


_ROUTER = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}  # of Gemma 4


def _of_experts(arch: str, name: str, weight: torch.Tensor, alone: bool = False) -> list[tuple[str, torch.Tensor]]:
    """Names and values of what files have of a tensor of experts; nothing of any other."""
    if (found := re.fullmatch(r"model\.layers\.(\d+)\.router\.(.+)", name)) and found[2] in _ROUTER:
        return [(f"blk.{found[1]}.{_ROUTER[found[2]]}", weight)]
    if not (
        found := re.fullmatch(r"model\.layers\.(\d+)\.(?:mlp|feed_forward|block_sparse_moe|shared_mlp)\.(.+)", name)
    ):
        return []
    block, part = f"blk.{found[1]}.", found[2]
    kind = "_exps" if part.startswith("experts") else "" if alone else "_shexp"
    if re.fullmatch(r"(gate|router|gate\.wg)\.weight", part):
        return [(block + "ffn_gate_inp.weight", weight)]
    if part.endswith("e_score_correction_bias"):
        return [(block + "exp_probs_b.bias", weight)]
    if part == "shared_expert_gate.weight":
        return [(block + "ffn_gate_inp_shexp.weight", weight[0])]
    if arch == "llama4" and part.startswith("experts."):
        weight = weight.mT
    if part in ("experts.gate_up_proj", "input_linear.weight"):
        halves = zip(("gate", "up"), weight.chunk(2, dim=-2), strict=True)
        return [(f"{block}ffn_{each}{kind}.weight", half) for each, half in halves]
    if part in ("experts.down_proj", "output_linear.weight"):
        return [(f"{block}ffn_down{kind}.weight", weight)]
    if shared := re.fullmatch(r"(?:shared_experts?|shared_mlp)\.(gate|up|down)_proj\.weight", part):
        return [(f"{block}ffn_{shared[1]}_shexp.weight", weight)]
    return []


def _of_clamped(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """The same of gpt-oss, whose matrices transformers has as columns, gates and what they gate in turn."""
    if found := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.sinks", name):
        return [(f"blk.{found[1]}.attn_sinks.weight", weight)]
    if not (found := re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)):
        return []
    block, end = f"blk.{found[1]}.ffn_{{}}_exps.".format, "bias" if found[3] else "weight"
    rows = weight if found[3] else weight.mT
    if found[2] == "down":
        return [(block("down") + end, rows)]
    pick = (lambda x, i: x[:, i::2]) if found[3] else (lambda x, i: x[:, i::2, :])
    return [(block(part) + end, pick(rows, i)) for i, part in enumerate(("gate", "up"))]


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
