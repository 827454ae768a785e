"""Tiny models of dense families."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from tinyshapes import (
    CONTEXT,
    EVEN,
    EXPERT_KEYS,
    GRANITE,
    GRANITE_KEYS,
    HYBRID,
    HYBRID_KEYS,
    LLAMA3,
    MINISTRAL,
    SLIDING,
    WINDOW,
    YARN,
    YARN_KEYS,
    Family,
    Variant,
    slides,
    tied,
)

# Some tokens have no row; the scale of scores is 1 whatever the config says.
_GEMMA3N = {"vocab_size_per_layer_input": 300, "laurel_rank": 6, "query_pre_attn_scalar": 256, **SLIDING}
_GEMMA4 = {"global_head_dim": 24, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 400, **SLIDING}
_GEMMA = {"query_pre_attn_scalar": 16, **SLIDING}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5],
    "long_factor": [1.0, 2.0, 8.0],
    "partial_rotary_factor": 0.75,
}
_LONG_KEYS = {
    "rope.scaling.original_context_length": 40,
    "rope.scaling.attn_factor": (1 + np.log(CONTEXT / 40) / np.log(40)) ** 0.5,
}
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


def _above(*shares: float) -> list[float]:
    """In standard deviations, as float32."""
    return [float(np.float32(NormalDist().inv_cdf(x) if x else -np.inf)) for x in shares]


FAMILIES = {
    "llama": Family(settings=EVEN, halves=True),
    "internlm2": Family("llama", EVEN, halves=True),
    "mistral3": Family("ministral3", halves=True),
    "qwen2": Family(),
    "qwen2vl": Family("qwen2_5_vl_text", EVEN),
    "qwen3": Family(),
    "qwen3vl": Family("qwen3_vl_text"),
    "gemma": Family(one_more=True),
    "gemma2": Family(settings=_GEMMA, one_more=True),
    "gemma3": Family("gemma3_text", _GEMMA, one_more=True),
    "gemma3n": Family("gemma3n_text", _GEMMA3N),
    "gemma4": Family("gemma4_text", _GEMMA4),
    "phi3": Family(settings=EVEN),
    "smollm3": Family(settings=EVEN, halves=True),
    "granite": Family(settings=EVEN, halves=True),
    "olmo2": Family(settings=EVEN),
    "glm4": Family(),
    "starcoder2": Family(settings=EVEN),
    "nemotron": Family(settings=EVEN, one_more=True),
    "stablelm": Family(settings=EVEN),
    "exaone": Family("llama", EVEN),
    "exaone4": Family(),
    "chatglm": Family("glm", EVEN),
    "ernie4_5": Family(),
    "command-r": Family("cohere", EVEN),
    "cohere2": Family(settings=EVEN | SLIDING),
    "hunyuan-dense": Family("hunyuan_v1_dense"),
    "seed_oss": Family(),
    "arcee": Family(halves=True),
}

VARIANTS = {
    "llama": Variant("llama", tied(True)),
    "llama-untied": Variant("llama", tied(False)),
    "llama-padded": Variant("llama", tied(True), padding=13),
    "llama-untied-padded": Variant("llama", tied(False), padding=13),
    "llama-biased": Variant("llama", tied(True, attention_bias=True, mlp_bias=True)),
    "llama-llama3-rope": Variant("llama", {"rope_scaling": LLAMA3}),
    "llama-linear-rope": Variant(
        "llama", {"rope_scaling": _LINEAR}, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    ),
    "llama-yarn": Variant("llama", {"rope_scaling": YARN}, YARN_KEYS),
    "llama-yarn-factor": Variant(
        "llama",
        {"rope_scaling": YARN | {"attention_factor": 1.4, "beta_fast": 4.0, "beta_slow": 0.5}},
        YARN_KEYS
        | {
            "rope.scaling.yarn_attn_factor": 1.4,
            "rope.scaling.yarn_beta_fast": 4.0,
            "rope.scaling.yarn_beta_slow": 0.5,
        },
    ),
    # Mistral 7B v0.1 and its like: every layer has the same window.
    "llama-sliding": Variant("llama", tied(False, **SLIDING), {"attention.sliding_window": WINDOW}, kind="mistral"),
    "mistral3": Variant(
        "mistral3",
        tied(True, rope_parameters=MINISTRAL),
        YARN_KEYS
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.8}
        | {"attention.temperature_scale": 0.3},
    ),
    "internlm2": Variant("internlm2", tied(False)),
    "qwen2": Variant("qwen2", tied(True)),
    "qwen2vl": Variant(
        "qwen2vl",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        {"rope.dimension_sections": [2, 1, 1, 0]},
    ),
    "qwen3": Variant("qwen3", tied(True)),
    "qwen3-untied": Variant("qwen3", tied(False)),
    "qwen3vl": Variant(
        "qwen3vl",
        {"rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "gemma": Variant("gemma", tied(True)),
    "gemma2": Variant(
        "gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "attention.sliding_window": WINDOW},
    ),
    "gemma3": Variant(
        "gemma3",
        {"layer_types": slides(True, False, True)},
        HYBRID_KEYS,
    ),
    # As files in circulation are: neither the pattern nor the local RoPE base is named.
    "gemma3-bare": Variant(
        "gemma3",
        {"num_hidden_layers": 6, "layer_types": slides(True, True, True, True, True, False)},
        {"attention.sliding_window": WINDOW},
    ),
    # Four streams, gates of some layers mostly closed; three, of which layers see another one.
    "gemma3n": Variant(
        "gemma3n",
        {
            "num_hidden_layers": 6,
            "layer_types": slides(True, True, False, True, True, False),
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
            "layer_types": slides(True, True, False),
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
            "layer_types": slides(True, True, False, True, True, False),
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
            "layer_types": slides(True, True, False),
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
        },
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [True, True, False]},
    ),
    # The one with experts has a dense part beside them, and keys as values.
    "gemma4-experts": Variant(
        "gemma4",
        {
            "layer_types": slides(True, False, False),
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        _GEMMA4_KEYS
        | EXPERT_KEYS
        | {"attention.sliding_window_pattern": [True, False, False], "attention.head_count_kv": [2, 1, 1]}
        | {"expert_feed_forward_length": 24},
    ),
    "phi3": Variant("phi3", tied(False, **SLIDING), {"attention.sliding_window": WINDOW}),
    # Phi-4 mini: part of each head is turned, by other factors in a long context.
    "phi3-long": Variant("phi3", tied(True, rope_scaling=LONG, original_max_position_embeddings=40), _LONG_KEYS),
    "smollm3": Variant("smollm3", tied(True, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])),
    "granite": Variant("granite", tied(True, **GRANITE), GRANITE_KEYS),
    "granite-biased": Variant("granite", tied(False, attention_bias=True, **GRANITE), GRANITE_KEYS),
    "olmo2": Variant("olmo2", tied(False)),
    # OLMo 3: layers that slide have plain RoPE.
    "olmo2-sliding": Variant("olmo2", HYBRID | tied(False, rope_scaling=YARN), HYBRID_KEYS | YARN_KEYS, kind="olmo3"),
    "glm4": Variant("glm4", tied(False, attention_bias=True)),
    "starcoder2": Variant("starcoder2", tied(True)),
    "nemotron": Variant("nemotron", tied(False), {"rope.scaling.type": "none"}),
    "stablelm": Variant(
        "stablelm", tied(False, use_qkv_bias=True, use_parallel_residual=False), {"use_parallel_residual": False}
    ),
    "exaone": Variant("exaone", tied(False, rope_scaling=LLAMA3)),
    "chatglm": Variant("chatglm", tied(False, attention_bias=True)),
    "ernie4_5": Variant("ernie4_5", tied(True)),
    "command-r": Variant("command-r", tied(True, logit_scale=0.4), {"logit_scale": 0.4, "rope.scaling.type": "none"}),
    "exaone4": Variant("exaone4", HYBRID | tied(True), HYBRID_KEYS),
    "exaone4-full": Variant(
        "exaone4", tied(False, sliding_window=None, layer_types=slides(False, False, False), rope_scaling=LLAMA3)
    ),
    "cohere2": Variant(
        "cohere2",
        tied(True, layer_types=slides(True, False, True), logit_scale=0.4),
        HYBRID_KEYS | {"logit_scale": 0.4, "rope.scaling.type": "none"},
    ),
    "hunyuan-dense": Variant("hunyuan-dense", tied(True)),
    "seed_oss": Variant("seed_oss", tied(False)),
    "arcee": Variant("arcee", tied(False)),
}
