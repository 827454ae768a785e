"""Tensors of gated delta networks (Qwen3.5) as llama.cpp's converter writes them. No torch."""

from __future__ import annotations

import re

import numpy as np

from kvcli.runtime.headers import families
from kvcli.runtime.headers.hfconfig import HFConfig
from kvcli.runtime.headers.presented import Presented
from kvcli.runtime.model.mixerkeys import delta_nets, neighbouring_delta_nets

_OF_VALUES = re.compile(r"\.(attn_qkv|attn_gate|ssm_(?:beta|alpha|conv1d|a|dt|out))(?:\.(?:weight|bias))?$")


def is_delta(config: HFConfig) -> bool:
    """Whether layers of the family are gated delta networks."""
    return families.of_gguf(families.gguf_name(config.model_type)).mixers in (delta_nets, neighbouring_delta_nets)


def with_signs(tensor: Presented) -> Presented:
    """Norms of the residual stream and of heads multiply by 1 + w in folders; decays are there as logarithms, without
    their sign."""
    if tensor.name.endswith("norm.weight") and not tensor.name.endswith("ssm_norm.weight"):
        return tensor.then(lambda values: values + np.float32(1))
    return tensor.then(lambda values: -np.exp(values)) if tensor.name.endswith(".ssm_a") else tensor


def as_in_files(tensor: Presented, config: HFConfig) -> Presented:
    """Besides, value heads that share a key head are neighbours in folders, while files have the first one of each key
    head, then the second ones, but for those of Qwen3-Next."""
    tensor, family = with_signs(tensor), families.of_gguf(families.gguf_name(config.model_type))
    found = _OF_VALUES.search(tensor.name)
    if found is None or family.mixers is neighbouring_delta_nets:
        return tensor
    keys, values = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    dim = config.count("linear_value_head_dim") if found[1] in _WIDE else 1
    first = 2 * keys * config.count("linear_key_head_dim") if found[1] in ("attn_qkv", "ssm_conv1d") else 0
    axis = 1 if found[1] == "ssm_out" else 0
    return tensor.then(lambda x: _tiled(x, axis, first, keys, values // keys, dim))


_WIDE = ("attn_qkv", "attn_gate", "ssm_conv1d", "ssm_out")  # which have all elements of a head


def _tiled(x: np.ndarray, axis: int, first: int, keys: int, share: int, dim: int) -> np.ndarray:
    """x with what stands from `first` on along an axis, [keys, share, dim], as [share, keys, dim]."""
    rows = np.moveaxis(x, axis, 0)
    heads = rows[first:].reshape(keys, share, dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows[first:].shape)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([rows[:first], heads]), 0, axis))
