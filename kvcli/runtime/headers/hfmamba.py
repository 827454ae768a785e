"""Tensors of Mamba-2 as llama.cpp's converter writes them. No torch."""

from __future__ import annotations

import re

import numpy as np

from kvcli.errors import ModelError
from kvcli.runtime.formats.elements import narrowed, widened
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.presented import Presented


def as_in_files(tensor: Presented, config: HFConfig) -> Presented:
    """Decays are there as logarithms, without their sign; what is one number for each head has a row for each, and the
    norm one for each group."""
    n = tensor.shape[0]
    if tensor.name.endswith(".ssm_a"):
        return tensor.then(lambda values: -np.exp(values).reshape(n, 1), (n, 1))
    if tensor.name.endswith(".ssm_d"):
        return tensor.then(lambda values: values.reshape(n, 1), (n, 1))
    if tensor.name.endswith(".ssm_norm.weight"):
        groups = config.count("mamba_n_groups")
        shape = groups, n // groups
        return tensor.then(lambda values: values.reshape(shape), shape)
    return tensor


_MULTIPLIED = re.compile(r"(?:blk\.\d+\.)?(\w+)\.(weight|bias)")


def multiplied(tensor: Presented, config: HFConfig) -> Presented:
    """A tensor of Falcon-H1 times the multipliers of what it reads and gives, which files have no keys for."""
    found = _MULTIPLIED.fullmatch(tensor.name)
    factor = _multiplier(found[1], found[2] == "bias", config) if found else None
    if factor is None:
        return tensor
    by = np.asarray(factor, np.float32)
    by = by.reshape(-1, *[1] * (len(tensor.shape) - 1)) if by.ndim else by
    return tensor.then(lambda x: narrowed(tensor.type, widened(tensor.type, x) * by))


def _multiplier(name: str, bias: bool, config: HFConfig) -> float | list[float] | None:
    """Of a matrix or of its bias, which does not depend on what is read: one number, or one for each row."""

    def number(of: str) -> float:
        return config.number(f"{of}_multiplier", 1.0) or 1.0

    reads = 1.0 if bias else number("attention_in")
    if name == "attn_k":
        return reads * number("key")
    if name in ("attn_q", "attn_v"):
        return reads
    if name in ("ffn_gate", "ffn_down"):
        return _several(config, "mlp_multipliers", 2)[name == "ffn_down"]
    if name == "ssm_in":
        heads, groups = config.count("mamba_n_heads"), config.count("mamba_n_groups") * config.count("mamba_d_state")
        wide = config.count("mamba_expand", default=2) * config.count("hidden_size")
        inner = config.count("mamba_d_ssm", default=wide)
        parts = zip(_several(config, "ssm_multipliers", 5), (inner, inner, groups, groups, heads), strict=True)
        first = 1.0 if bias else number("ssm_in")
        return [first * each for each, rows in parts for _ in range(rows)]
    others = {"token_embd": "embedding", "output": "lm_head", "attn_output": "attention_out", "ssm_out": "ssm_out"}
    return number(others[name]) if name in others else None


def _several(config: HFConfig, name: str, count: int) -> list[float]:
    found = config.values(name) or [1.0] * count
    if len(found) != count or not all(isinstance(x, (int, float)) for x in found):
        raise ModelError(f"{name} in config.json must be {count} numbers")
    return found
