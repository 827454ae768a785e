"""`rope_keys`: rotary embedding as config.json names it, as GGUF keys. No torch.

Older files have `rope_theta` and `rope_scaling`, newer ones `rope_parameters`, some of them one table for each kind of
layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.headers.hfconfig import HFConfig

_PLAIN = ("default", "mrope", "none")
_BASE = 10000.0


def rope_keys(config: HFConfig) -> dict[str, Any]:
    """The keys under `rope.`. Raises ModelError for a scaling that is not known."""
    full, sliding = rope_tables(config)
    keys: dict[str, Any] = {}
    keys["rope.freq_base"] = _number(full, "rope_theta", config.number("rope_theta") or _BASE)
    if sliding is not None:
        keys["rope.freq_base_swa"] = _number(sliding, "rope_theta", keys["rope.freq_base"])
    if (part := _part(config, full)) is not None and not config.get("kv_lora_rank"):
        keys["rope.dimension_count"] = part
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


def rotary_dim(config: HFConfig) -> int | None:
    """The dims of a head that RoPE turns, None = all."""
    return _part(config, rope_tables(config)[0])


def _part(config: HFConfig, table: Mapping[str, Any]) -> int | None:
    factor = config.number("partial_rotary_factor", config.number("rotary_pct"))
    if table.get("partial_rotary_factor") is not None:
        factor = _number(table, "partial_rotary_factor")
    if factor is None and config.has("rotary_dim"):
        return config.count("rotary_dim")
    if factor is None or factor == 1 or table.get("rope_type") == "proportional":
        return None
    heads = config.count("num_attention_heads", "heads")
    if not 0 < factor < 1:
        raise ModelError(f"partial_rotary_factor in config.json has the value {factor:g}, out of range")
    return int(factor * config.count("head_dim", default=config.count("hidden_size") // max(1, heads)))


def _scaling(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    kind = table.get("rope_type", table.get("type", "default"))
    if kind in _PLAIN or kind in ("llama3", "proportional"):  # the last two are factors in a tensor of their own
        sections = table.get("mrope_section")
        return {"rope.dimension_sections": [*sections, 0, 0, 0, 0][:4]} if isinstance(sections, list) else {}
    factor = _number(table, "factor")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": factor}
    if kind == "dynamic":  # beyond the context that the model is trained for, which kv does not exceed
        return {}
    if kind in ("longrope", "su"):
        return _longrope(config, table)
    if kind == "yarn":
        return _yarn(config, table, factor)
    raise ModelError(f"rope_scaling in config.json is of the type {str(kind)[:40]!r}, which kv does not know")


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


def _yarn(config: HFConfig, table: Mapping[str, Any], factor: float) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": _original(config, table),
    }
    for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if table.get(name) is not None:
            keys[f"rope.scaling.{key}"] = _number(table, name)
    if table.get("attention_factor") is not None:
        keys["rope.scaling.attn_factor"] = _number(table, "attention_factor")
    if table.get("mscale_all_dim") not in (None, 0):
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * _number(table, "mscale_all_dim")
    return keys


def _longrope(config: HFConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """The factors themselves are tensors."""
    original, context = max(2, _original(config, table)), config.count("max_position_embeddings")
    stretched = math.sqrt(1 + math.log(max(1.0, context / original)) / math.log(original))
    attention = _number(table, "attention_factor", stretched)
    return {"rope.scaling.original_context_length": original, "rope.scaling.attn_factor": attention}
