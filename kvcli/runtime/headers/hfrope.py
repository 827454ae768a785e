"""`rope_keys`: rotary embedding as config.json names it, as GGUF keys. No torch.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, some of them one table for each kind of
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.runtime.headers.hfconfig import HFConfig

if TYPE_CHECKING:
    import numpy as np

_PLAIN = ("default", "mrope", "none")
_BASE = 10000.0


def rope_keys(config: HFConfig) -> dict[str, Any]:
    """The keys under `rope.`. Raises ModelError for a scaling that is not known."""
    full, sliding = rope_tables(config)
    keys: dict[str, Any] = {}
    keys["rope.freq_base"] = _number(full, "rope_theta", config.number("rope_theta") or _BASE)
    if sliding is not None:
        keys["rope.freq_base_swa"] = _number(sliding, "rope_theta", keys["rope.freq_base"])
    if full.get("rope_type") == "proportional":
        keys["rope.dimension_count"], keys["rope.dimension_count_swa"] = wide_dim(config), config.count("head_dim")
    elif not config.get("kv_lora_rank"):
        keys["rope.dimension_count"] = rotary_dim(config)
    return keys | _scaling(config, full)


def rope_tables(config: HFConfig) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """The parameters of RoPE where layers see everything, and where they slide (None = the same)."""
    table = config.table("rope_parameters") or config.table("rope_scaling")
    full, sliding = table.get("full_attention"), table.get("sliding_attention")
    if isinstance(full, Mapping):
        return full, sliding if isinstance(sliding, Mapping) else None
    for name in ("rope_local_base_freq", "swa_rope_theta"):
        if config.has(name):
            return table, {"rope_theta": config.number(name)}
    return table, None


def wide_dim(config: HFConfig) -> int:
    """The head dim of Gemma 4's layers that see everything."""
    own = (config.within(each, "head_dim", 0) for each in config.table("per_layer_config").values())
    return max(own, default=0) or config.count("global_head_dim", default=512)


def rotary_dim(config: HFConfig) -> int:
    """The dims of a head that RoPE turns."""
    table, heads = rope_tables(config)[0], config.count("num_attention_heads", "heads", 1)
    dim = config.count("head_dim", "dim_k", config.count("hidden_size", "hidden") // max(1, heads))
    factor = config.number("partial_rotary_factor", config.number("rotary_pct"))
    if table.get("partial_rotary_factor") is not None:
        factor = _number(table, "partial_rotary_factor")
    if factor is None:
        return config.count("rotary_dim", default=dim)
    if not 0 < factor <= 1:
        raise ModelError(f"partial_rotary_factor in config.json has the value {factor:g}, out of range")
    return int(factor * dim)


def _scaling(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in _PLAIN or kind in ("llama3", "proportional"):  # the last two are factors in a tensor of their own
        sections = table.get("mrope_section")
        return {"rope.dimension_sections": [*sections, 0, 0, 0, 0][:4]} if isinstance(sections, list) else {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": _number(table, "factor")}
    if kind == "dynamic":
        return _dynamic(config, table)
    if kind in ("longrope", "su"):
        return _longrope(config, table)
    if kind == "yarn":
        return _yarn(config, table)
    raise ModelError(f"rope_scaling in config.json is of the type {str(kind)[:40]!r}, which kv does not know")


def _dynamic(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """Hunyuan's has a larger base throughout; that of others grows beyond the training context."""
    if table.get("alpha") is None:
        factor, context = _number(table, "factor"), config.count("max_position_embeddings")
        keys = {"type": "dynamic", "factor": factor, "original_context_length": context}
        return {f"rope.scaling.{key}": value for key, value in keys.items()}
    dim = rotary_dim(config)
    base = _number(table, "rope_theta", config.number("rope_theta") or _BASE)
    return {"rope.freq_base": base * _number(table, "alpha") ** (dim / max(1, dim - 2))}


def _number(table: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = table.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e30:
        raise ModelError(f"rope_scaling in config.json has no positive number {name}")
    return float(value)


def _original(config: HFConfig, table: Mapping[str, Any]) -> int:
    """The context before it was stretched."""
    whole = config.count("original_max_position_embeddings", default=config.count("max_position_embeddings"))
    return config.within(table, "original_max_position_embeddings", whole)


def _yarn(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": _number(table, "factor"),
        "rope.scaling.original_context_length": _original(config, table),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if table.get(name) is not None:
            keys[f"rope.scaling.{key}"] = _number(table, name)
    if table.get("attention_factor") is not None:
        keys["rope.scaling.yarn_attn_factor"] = _number(table, "attention_factor")
    if table.get("mscale_all_dim") not in (None, 0):
        of_scores = _number(table, "mscale_all_dim")
        latent = 0.1 if config.get("kv_lora_rank") else 1.0  # as llama.cpp has it
        keys["rope.scaling.yarn_log_multiplier"] = latent * of_scores
        if config.get("kv_lora_rank") and table.get("mscale") != of_scores:  # angles have one of their own
            log, known = 0.1 * math.log(keys["rope.scaling.factor"]), table.get("mscale")
            own = (1 + log * _number(table, "mscale")) / (1 + log * of_scores) if known else 1 + log
            keys.setdefault("rope.scaling.yarn_attn_factor", own)
    if table.get("llama_4_scaling_beta") not in (None, 0):
        keys["attention.temperature_scale"] = _number(table, "llama_4_scaling_beta")
        if config.get("kv_lora_rank"):
            keys["attention.temperature_length"] = keys["rope.scaling.original_context_length"]
    return keys


def _longrope(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """The factors themselves are tensors."""
    original, context = max(2, _original(config, table)), config.count("max_position_embeddings")
    stretched = math.sqrt(1 + math.log(max(1.0, context / original)) / math.log(original))
    attention = _number(table, "attention_factor", stretched)
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": attention}


def factor_tensors(config: HFConfig) -> dict[str, np.ndarray]:
    """What frequencies are divided by, float32 [dim / 2], by the name of the tensor that GGUF files have it in."""
    import numpy as np

    table, _ = rope_tables(config)
    kind = table.get("rope_type", table.get("type"))
    if kind == "llama3":
        return {"rope_freqs": _llama3(config, table).astype(np.float32)}
    if kind == "proportional":  # dims beyond a part of the head do not turn
        half, turned = wide_dim(config) // 2, int(wide_dim(config) * _number(table, "partial_rotary_factor") / 2)
        return {"rope_freqs": np.repeat(np.array([1.0, 1e30], np.float32), (turned, half - turned))}
    if kind not in ("longrope", "su"):
        return {}
    return {f"rope_factors_{name}": _listed(table, f"{name}_factor").astype(np.float32) for name in ("long", "short")}


def _listed(table: Mapping[str, Any], name: str) -> np.ndarray:
    import numpy as np

    values = table.get(name)
    if not isinstance(values, list) or not all(isinstance(x, (int, float)) and 0 < x < 1e30 for x in values):
        raise ModelError(f"rope_scaling in config.json lacks {name}, a list of positive numbers")
    return np.array(values, np.float64)


def _llama3(config: HFConfig, table: Mapping[str, Any]) -> np.ndarray:
    """Long waves are stretched by the factor, short ones not, and those between in part (arXiv 2407.21783)."""
    import numpy as np

    factor, low, high = (_number(table, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high < low:
        raise ModelError("rope_scaling in config.json: high_freq_factor must not be less than low_freq_factor")
    dim = rotary_dim(config)
    base = _number(table, "rope_theta", config.number("rope_theta") or _BASE)
    waves = 2 * math.pi * base ** (np.arange(0, dim, 2) / dim)
    turns = _original(config, table) / waves  # within the original context
    kept = np.clip((turns - low) / (high - low), 0, 1) if high > low else (turns > high) * 1.0
    return 1 / ((1 - kept) / factor + kept)
