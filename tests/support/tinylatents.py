"""Tiny models of families with attention over latents."""

from __future__ import annotations

from tinyshapes import EXPERT_KEYS, EXPERTS, MINISTRAL, YARN, YARN_KEYS, Family, Variant, tied

_LATENTS = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 16, "head_dim": 8, "moe_intermediate_size": 24, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
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
_LATENT_YARN = YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 0.7}

FAMILIES = {
    "deepseek2": Family("deepseek_v3", EXPERTS | _LATENTS),
    "mistral4": Family(settings=EXPERTS | _LATENTS | {"head_dim": 20}),
}

VARIANTS = {
    # DeepSeek V3: sigmoid routing by groups, queries compressed.
    "deepseek2": Variant(
        "deepseek2",
        tied(False, rope_parameters=_LATENT_YARN, n_group=4, topk_group=2, norm_topk_prob=True),
        EXPERT_KEYS
        | _LATENT_KEYS
        | _GROUPED
        | YARN_KEYS
        | {"attention.q_lora_rank": 24, "rope.scaling.yarn_log_multiplier": 0.07, "expert_weights_norm": True}
        | {"expert_gating_func": 2},
    ),
    # V2: softmax, groups by their best expert.
    "deepseek2-groups": Variant(
        "deepseek2",
        tied(False, topk_method="group_limited_greedy", n_group=4, topk_group=2),
        EXPERT_KEYS | _LATENT_KEYS | _GROUPED | {"attention.q_lora_rank": 24},
        kind="deepseek_v2",
    ),
    # Files of then have one tensor of keys and values.
    "deepseek2-old": Variant(
        "deepseek2", tied(False, topk_method="greedy", q_lora_rank=None), EXPERT_KEYS | _OLD_KEYS, kind="deepseek_v2"
    ),
    "deepseek2-lite": Variant(
        "deepseek2",
        tied(False, topk_method="greedy", q_lora_rank=None, rope_parameters=_LATENT_YARN),
        EXPERT_KEYS | _LATENT_KEYS | YARN_KEYS | {"rope.scaling.yarn_log_multiplier": 0.07},
        kind="deepseek_v2",
    ),
    # GLM-4.7-Flash; files do not say that routing is by sigmoids. In transformers norms of what is compressed add 1e-6
    # whatever the config says.
    "deepseek2-glm": Variant(
        "deepseek2",
        tied(False, mlp_layer_types=["dense", "sparse", "sparse"], norm_topk_prob=True, rms_norm_eps=1e-6),
        EXPERT_KEYS | _LATENT_KEYS | {"attention.q_lora_rank": 24, "expert_weights_norm": True},
        kind="glm4_moe_lite",
    ),
    "mistral4": Variant(
        "mistral4",
        tied(False, rope_parameters=MINISTRAL | {"mscale": 0.8, "partial_rotary_factor": 0.4}, norm_topk_prob=True),
        EXPERT_KEYS
        | _LATENT_KEYS
        | YARN_KEYS
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.08}
        | {"attention.q_lora_rank": 24, "attention.temperature_scale": 0.3, "attention.temperature_length": 16}
        | {"expert_weights_norm": True},
    ),
}
