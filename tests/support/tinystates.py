"""Tiny models of families in which layers keep a state."""

from __future__ import annotations

from typing import Any

from tinyshapes import EVEN, EXPERT_KEYS, EXPERTS, GRANITE, GRANITE_KEYS, Family, Variant, tied

# Six heads of eight.
_LFM2 = EVEN | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
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
_QWEN35_KEYS = {
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 48, "ssm.conv_kernel": 4,
    "full_attention_interval": 2, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
_STATE_KEYS = {
    "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 6, "ssm.inner_size": 96, "ssm.conv_kernel": 4,
}  # fmt: skip
_MAMBA_KEYS = _STATE_KEYS | {"attention.head_count_kv": [0, 2, 0, 2], "rope.scaling.finetuned": False}
# Mamba-2 beside attention, with all of its multipliers; heads are wider than the model.
_FALCON = {
    "num_hidden_layers": 3, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 2, "mamba_norm_before_gate": False, "embedding_multiplier": 2.5, "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.8, 1.1, 0.9, 1.4, 0.7],
    "mlp_multipliers": [0.9, 1.25],
}  # fmt: skip
# transformers has a least time step, which Nemotron H does not obey in tokens that come one by one, nor llama.cpp ever.
_NEMOTRON = {
    "mamba_num_heads": 6, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "time_step_min": 1e-9,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention", "mlp"],
}  # fmt: skip
_NEMOTRON_MOE = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention", "moe"],
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5,
}  # fmt: skip
_NEMOTRON_KEYS = _STATE_KEYS | {"attention.head_count_kv": [0, 0, 2, 0, 0, 0], "rope.scaling.finetuned": False}
_LFM2_KEYS = {"attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3}
# Of models of `make_even` in which layers keep a state: settings and keys.
EVEN_STATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lfm2": ({}, {"attention.head_count_kv": [0, 1]}),
    "qwen35": ({"linear_value_head_dim": 8}, {"ssm.inner_size": 32}),
    "granitehybrid": (
        {"mamba_n_heads": 8, "shared_intermediate_size": 96},
        {"attention.head_count_kv": [0, 1], "ssm.time_step_rank": 8, "ssm.inner_size": 128},
    ),
    "falcon-h1": ({"mamba_n_heads": 8, "mamba_d_ssm": 128}, {"ssm.time_step_rank": 8, "ssm.inner_size": 128}),
    "nemotron_h": (
        {"mamba_num_heads": 8, "layers_block_type": ["linear_attention", "full_attention", "mlp"]},
        {"attention.head_count_kv": [0, 1, 0], "ssm.time_step_rank": 8, "ssm.inner_size": 128}
        | {"feed_forward_length": [0, 0, 96]},
    ),
    "nemotron_h_moe": (
        {"mamba_num_heads": 8, "layers_block_type": ["linear_attention", "full_attention", "moe"]}
        | {"moe_shared_expert_intermediate_size": 64},
        {"attention.head_count_kv": [0, 1, 0], "ssm.time_step_rank": 8, "ssm.inner_size": 128}
        | {"feed_forward_length": [0, 0, 32], "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 64},
    ),
}

FAMILIES = {
    "lfm2": Family(settings=_LFM2),
    "qwen3next": Family(
        "qwen3_next",
        _QWEN35
        | EXPERTS
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        one_more=True,
    ),
    "granitehybrid": Family("granitemoehybrid", EVEN | _MAMBA, halves=True),
    "qwen35": Family("qwen3_5_text", _QWEN35, one_more=True),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        _QWEN35 | EXPERTS | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        one_more=True,
    ),
    "falcon-h1": Family("falcon_h1", _FALCON),
    "nemotron_h": Family(settings=_NEMOTRON),
    "nemotron_h_moe": Family("nemotron_h", _NEMOTRON | EXPERTS | _NEMOTRON_MOE),
    "lfm2moe": Family("lfm2_moe", _LFM2 | EXPERTS | {"moe_intermediate_size": 24, "num_dense_layers": 1}),
}

VARIANTS = {
    "qwen35": Variant("qwen35", tied(False), _QWEN35_KEYS),
    "qwen35-named": Variant(
        "qwen35",
        tied(True, layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"]),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "full_attention_interval"}
        | {"attention.recurrent_layers": [False, True, True, False]},
    ),
    "qwen35moe": Variant(
        "qwen35moe",
        tied(False),
        _QWEN35_KEYS | EXPERT_KEYS | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    "granitehybrid": Variant(
        "granitehybrid",
        tied(True, **GRANITE, **EXPERTS, shared_intermediate_size=40, intermediate_size=24),
        GRANITE_KEYS | _MAMBA_KEYS | EXPERT_KEYS | {"expert_shared_feed_forward_length": 40},
    ),
    "granitehybrid-dense": Variant(
        "granitehybrid",
        tied(False, position_embedding_type="rope", mamba_conv_bias=False, **GRANITE),
        GRANITE_KEYS | _MAMBA_KEYS | {"rope.scaling.finetuned": True},
    ),
    "qwen3next": Variant(
        "qwen3next",
        tied(False, norm_topk_prob=True),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "rope.dimension_sections"}
        | EXPERT_KEYS
        | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
    ),
    # Channels and gates of the output are matrices of their own, as converters have written them since.
    "qwen3next-apart": Variant(
        "qwen3next",
        tied(False, norm_topk_prob=True),
        {k: v for k, v in _QWEN35_KEYS.items() if k != "rope.dimension_sections"}
        | EXPERT_KEYS
        | {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40},
        apart=True,
    ),
    "falcon-h1": Variant("falcon-h1", tied(False), _STATE_KEYS),
    "falcon-h1-normed": Variant("falcon-h1", tied(True, mamba_rms_norm=True, mamba_conv_bias=False), _STATE_KEYS),
    "nemotron_h": Variant("nemotron_h", tied(False), _NEMOTRON_KEYS | {"feed_forward_length": [0, 80, 0, 80, 0, 80]}),
    "nemotron_h_moe": Variant(
        "nemotron_h_moe",
        tied(False, n_group=4, topk_group=2),
        _NEMOTRON_KEYS
        | EXPERT_KEYS
        | {"feed_forward_length": [0, 24, 0, 24, 0, 24], "expert_feed_forward_length": 24, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 40, "expert_weights_norm": True, "expert_weights_scale": 1.5}
        | {"expert_group_count": 4, "expert_group_used_count": 2},
    ),
    # Short convolutions; the second one over four rows, with biases.
    "lfm2": Variant("lfm2", tied(True), _LFM2_KEYS),
    "lfm2-biased": Variant("lfm2", tied(False, conv_bias=True, conv_L_cache=4), _LFM2_KEYS | {"shortconv.l_cache": 4}),
    "lfm2moe": Variant(
        "lfm2moe",
        tied(True),
        _LFM2_KEYS
        | EXPERT_KEYS
        | {"expert_gating_func": 2, "expert_feed_forward_length": 24, "leading_dense_block_count": 1},
    ),
}
