"""Tiny models of families with mixtures of experts."""

from __future__ import annotations

from tinyshapes import (
    EVEN,
    EXPERT_KEYS,
    EXPERTS,
    GRANITE,
    GRANITE_KEYS,
    LLAMA3,
    SLIDING,
    WINDOW,
    YARN,
    YARN_KEYS,
    Family,
    Variant,
    tied,
)

_GLM_KEYS = {
    "expert_feed_forward_length": 24, "expert_shared_count": 1, "leading_dense_block_count": 1,
    "expert_gating_func": 2, "expert_weights_scale": 1.5, "expert_weights_norm": True,
}  # fmt: skip
_LLAMA4_KEYS = {
    "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, True, True, False],
    "attention.temperature_scale": 0.3, "attention.temperature_length": 16, "feed_forward_length": 80,
    "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 24, "expert_gating_func": 2,
    "expert_count": 8,
}  # fmt: skip

FAMILIES = {
    "gpt-oss": Family("gpt_oss", EXPERTS | SLIDING | {"intermediate_size": 24}),
    "llama4": Family("llama4_text", {"num_local_experts": 8, "intermediate_size": 24, "intermediate_size_mlp": 80}),
    "qwen2moe": Family("qwen2_moe", EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
    "qwen3moe": Family("qwen3_moe", EXPERTS | {"moe_intermediate_size": 24}),
    "qwen3vlmoe": Family("qwen3_vl_moe_text", EXPERTS | {"moe_intermediate_size": 20}),
    "granitemoe": Family(settings=EXPERTS | EVEN, halves=True),
    "olmoe": Family(settings=EXPERTS | EVEN),
    "glm4moe": Family("glm4_moe", EXPERTS | {"moe_intermediate_size": 24, "first_k_dense_replace": 1}),
    "minimax-m2": Family("minimax_m2", EXPERTS),
    "hunyuan-moe": Family("hunyuan_v1_moe", EXPERTS | {"moe_topk": 3}),
}

VARIANTS = {
    # Its ramp of YaRN is not rounded to whole dims.
    "gpt-oss": Variant(
        "gpt-oss",
        tied(False, rope_parameters=YARN | {"rope_theta": 1e4, "truncate": False, "beta_fast": 8.0}),
        EXPERT_KEYS
        | YARN_KEYS
        | {"attention.sliding_window": WINDOW, "rope.scaling.yarn_beta_fast": 8.0, "expert_feed_forward_length": 24},
    ),
    # Scout: norms of q and k, scaled RoPE. Maverick: neither, and experts in every other layer.
    "llama4": Variant(
        "llama4",
        tied(False, num_hidden_layers=4, rope_scaling=LLAMA3 | {"high_freq_factor": 1.0}, num_experts_per_tok=1)
        | {"attention_chunk_size": WINDOW, "floor_scale": 16, "attn_scale": 0.3},
        _LLAMA4_KEYS | {"expert_used_count": 1, "interleave_moe_layer_step": 1},
    ),
    "llama4-interleaved": Variant(
        "llama4",
        tied(True, num_hidden_layers=5, num_local_experts=128, use_qk_norm=False, interleave_moe_layer_step=2)
        | {"attention_chunk_size": 32, "floor_scale": 16, "attn_scale": 0.3, "num_experts_per_tok": 2},
        _LLAMA4_KEYS
        | {"expert_count": 128, "expert_used_count": 2, "interleave_moe_layer_step": 2, "attention.sliding_window": 32}
        | {"attention.sliding_window_pattern": [True, True, True, False, True]},
    ),
    "mixtral": Variant("llama", tied(False, **EXPERTS), EXPERT_KEYS, kind="mixtral"),
    "mixtral-apart": Variant("llama", tied(True, **EXPERTS), EXPERT_KEYS, kind="mixtral", apart=True),
    "qwen2moe": Variant(
        "qwen2moe",
        tied(True, norm_topk_prob=False),
        EXPERT_KEYS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "qwen3moe": Variant("qwen3moe", tied(False, norm_topk_prob=True), EXPERT_KEYS | {"expert_feed_forward_length": 24}),
    "qwen3vlmoe": Variant(
        "qwen3vlmoe",
        tied(False, rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2]}),
        EXPERT_KEYS | {"rope.dimension_sections": [4, 2, 2, 0], "n_deepstack_layers": 3},
    ),
    "granitemoe": Variant("granitemoe", tied(True, **GRANITE), EXPERT_KEYS | GRANITE_KEYS),
    "granitemoe-shared": Variant(
        "granitemoe",
        tied(True, shared_intermediate_size=40, **GRANITE),
        EXPERT_KEYS | GRANITE_KEYS | {"expert_shared_feed_forward_length": 40},
        kind="granitemoeshared",
    ),
    "olmoe": Variant("olmoe", tied(False), EXPERT_KEYS),
    "glm4moe": Variant(
        "glm4moe",
        tied(False, attention_bias=True, routed_scaling_factor=1.5, n_group=4, topk_group=2),
        EXPERT_KEYS | _GLM_KEYS | {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    # GLM 4.5: norms of heads, and a layer that predicts the token after the next one.
    "glm4moe-ahead": Variant(
        "glm4moe",
        tied(False, use_qk_norm=True, num_hidden_layers=2, routed_scaling_factor=1.5),
        EXPERT_KEYS | _GLM_KEYS | {"nextn_predict_layers": 1, "block_count": 3},
    ),
    "minimax-m2": Variant("minimax-m2", tied(False), EXPERT_KEYS | {"expert_gating_func": 2}),
    "hunyuan-moe": Variant("hunyuan-moe", tied(True), EXPERT_KEYS),
}
