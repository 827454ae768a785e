"""Layers with a state in a config.json, in the keys of a GGUF file. No torch."""

from __future__ import annotations

import math
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.headers import families
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.hflayers import recurrent_layers


def state_keys(config: HFConfig, kinds: str) -> dict[str, Any]:
    """What the constant state of a recurrent layer depends on."""
    hidden = config.count("hidden_size", "hidden")
    if "K" in kinds:
        return {"shortconv.l_cache": config.count("conv_L_cache")}
    if config.has("linear_attn_config"):  # Kimi's delta attention
        table = config.table("linear_attn_config")
        sizes = (config.within(table, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
        return _delta(config, *sizes)
    if config.get("linear_head_dim"):
        sizes = (config.count(f"linear_{name}") for name in ("num_heads", "head_dim", "conv_kernel_dim"))
        return _delta(config, *sizes)
    if config.get("linear_num_value_heads"):  # gated delta networks
        values = config.count("linear_num_value_heads") * config.count("linear_value_head_dim")
        groups, state = config.count("linear_num_key_heads"), config.count("linear_key_head_dim")
        keys = _state(values, state, config.count("linear_conv_kernel_dim"), groups)
        keys["ssm.time_step_rank"] = config.count("linear_num_value_heads")
        if families.of_gguf(families.gguf_name(config.model_type)).mixers:
            keys |= recurrent_layers(kinds)
        return keys
    if config.get("conv1d_width"):
        return _state(config.count("lru_width", default=hidden), 1, config.count("conv1d_width"), 0)
    if config.get("mamba_d_state"):
        inner = config.count("mamba_expand", default=2) * hidden
        if config.get("mamba_d_ssm"):
            inner = config.count("mamba_d_ssm")
        elif config.get("mamba_num_heads") and config.get("mamba_head_dim"):
            inner = config.count("mamba_num_heads") * config.count("mamba_head_dim")
        groups = config.count("mamba_n_groups", default=0)
        keys = _state(inner, config.count("mamba_d_state"), config.count("mamba_d_conv"), groups)
        family = families.of_gguf(families.gguf_name(config.model_type))
        return keys | _mamba(config, family.rope_switch) if family.mixers else keys
    if config.model_type in ("minimax", "minimax_text_01"):  # lightning attention: a matrix for each head
        heads = config.count("num_attention_heads", "heads")
        dim = config.count("head_dim", "dim_k", hidden // heads)
        return _state(heads * dim, dim, 1, 0)
    raise ModelError(
        "config.json has recurrent layers whose constant state kv cannot work out", "the shape can be given by flags"
    )


def _mamba(config: HFConfig, rope_switch: str) -> dict[str, Any]:
    """What kv must know of Mamba-2 to run it. Raises ModelError for what it does not compute."""
    if config.get("mamba_rms_norm") and config.get("mamba_norm_before_gate", True):
        raise ModelError("mamba_norm_before_gate in config.json is true: kv's Mamba-2 has its norm behind the gates")
    limits = config.values("time_step_limit")
    if limits is not None and limits not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise ModelError(f"time_step_limit in config.json is {limits}: kv's Mamba-2 has no such limits")
    heads = config.count("mamba_n_heads", default=config.count("mamba_num_heads", default=0))
    rope = {rope_switch: config.get("position_embedding_type") == "rope"} if rope_switch else {}
    return {"ssm.time_step_rank": heads, **rope}


def _delta(config: HFConfig, heads: int, dim: int, kernel: int) -> dict[str, Any]:
    if heads != config.count("num_attention_heads", "heads"):
        raise ModelError(f"config.json has {heads} heads of linear attention, which kv cannot plan for beside others")
    return {"kda.head_dim": dim, "ssm.conv_kernel": kernel}


def _state(inner: int, state: int, kernel: int, groups: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {"ssm.inner_size": inner, "ssm.state_size": state, "ssm.conv_kernel": kernel}
    return {**sizes, "ssm.group_count": groups} if groups else sizes
