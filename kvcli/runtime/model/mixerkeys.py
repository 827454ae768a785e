"""Which layers of a GGUF file keep a state, from its keys. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvcli.errors import ModelError
from kvcli.runtime.config import MAX_CONV, MAX_HEAD, DeltaNet, Mamba, Mixer, ShortConv
from kvcli.runtime.formats.ggufkeys import Keys

MixerReader = Callable[[Keys, int], list[Mixer | None]]  # of so many layers; None = it has attention


def short_convs(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """Short convolutions where layers have no heads of keys."""
    kernel = keys.integer("shortconv.l_cache", limit=MAX_CONV)
    heads = keys.each("attention.head_count_kv", n_layers, limit=4096, zero=True)
    return [None if n else ShortConv(kernel) for n in heads]


def mambas(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """Mamba-2 where layers have no heads of keys."""
    mixer, rows = _mamba(keys), keys.each("attention.head_count_kv", n_layers, limit=4096, zero=True)
    return [None if n else mixer for n in rows]


def mambas_alone(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """The same, of layers without a feed-forward part."""
    widths = keys.each("feed_forward_length", n_layers, limit=1 << 22, zero=True)
    return [None if width else mixer for mixer, width in zip(mambas(keys, n_layers), widths, strict=True)]


def mambas_beside(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """Mamba-2 beside attention in every layer, whose heads may lack their norm."""
    return [replace(_mamba(keys), norm_optional=True)] * n_layers


def _mamba(keys: Keys) -> Mamba:
    """Time steps have the rank of heads."""
    heads, groups = (keys.integer(f"ssm.{x}", limit=4096) for x in ("time_step_rank", "group_count"))
    inner, kernel = keys.integer("ssm.inner_size", limit=1 << 20), keys.integer("ssm.conv_kernel", limit=MAX_CONV)
    if inner % heads or heads % groups or inner // heads > MAX_HEAD:
        raise ModelError(
            f"{keys.arch}.ssm.inner_size is {inner}, of {heads} heads in {groups} groups",
            "the file is damaged; convert it again",
        )
    return Mamba(heads, inner // heads, groups, keys.integer("ssm.state_size", limit=1024), kernel)


def delta_nets(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """Gated delta networks in all layers but one in so many, or but those that are named; layers that predict further
    tokens have attention. llama.cpp's keys are those of Mamba: the state size is that of a key head, groups are key
    heads, and time steps have the rank of value heads."""
    dim_k = keys.integer("ssm.state_size", limit=MAX_HEAD)
    key_heads, value_heads = (keys.integer(f"ssm.{x}", limit=4096) for x in ("group_count", "time_step_rank"))
    inner, kernel = keys.integer("ssm.inner_size", limit=1 << 20), keys.integer("ssm.conv_kernel", limit=MAX_CONV)
    if inner % value_heads or value_heads % key_heads or inner // value_heads > MAX_HEAD:
        raise ModelError(
            f"{keys.arch}.ssm.inner_size is {inner}, of {value_heads} value heads and {key_heads} key heads",
            "the file is damaged; convert it again",
        )
    mixer = DeltaNet(key_heads, value_heads, dim_k, inner // value_heads, kernel)
    named = keys.get("attention.recurrent_layers")
    every = keys.integer("full_attention_interval", 4, limit=4096)
    n_run = n_layers - keys.integer("nextn_predict_layers", 0, limit=n_layers, zero=True)
    recurrent = [(i + 1) % every != 0 for i in range(n_run)]
    if named is not None:
        if not isinstance(named, (list, tuple)) or len(named) not in (n_run, n_layers):
            raise ModelError(f"the GGUF key {keys.arch}.attention.recurrent_layers must name {n_layers} layers")
        recurrent = [bool(each) for each in named[:n_run]]
    return [mixer if each else None for each in (*recurrent, *[False] * (n_layers - n_run))]


def neighbouring_delta_nets(keys: Keys, n_layers: int) -> list[Mixer | None]:
    """The same, where neighbouring value heads share a key head."""
    found = delta_nets(keys, n_layers)
    return [replace(each, tiled=False) if isinstance(each, DeltaNet) else None for each in found]
