"""What stands in a layer in the place of attention and keeps a state: its weights, and how a step runs through it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvcli.kernels import Backend, DeltaLayer, MambaLayer, QuantTensor
from kvcli.runtime.config import DeltaNet, Mamba, ModelConfig, ShortConv
from kvcli.runtime.model.weights import Weights


@dataclass(frozen=True)
class ShortConvolution:
    """The gated short convolution of LFM2: see `short_conv` of the kernels. `index`: among layers that have a state;
    `bias` [3 * d_model] is added to the projections, `conv_bias` [d_model] behind the convolution."""

    index: int
    projections: tuple[Any, ...]
    bias: torch.Tensor | None
    weight: torch.Tensor
    conv_bias: torch.Tensor | None

    def mix(self, ops: Backend, projected: torch.Tensor, carried: Sequence[Any]) -> torch.Tensor:
        """Projections of rows -> what the last product of the layer reads, [T, d_model]; the states go on."""
        if self.bias is not None:
            ops.add_(projected, self.bias)
        return self.again(ops, projected, carried)

    def again(self, ops: Backend, projected: torch.Tensor, carried: Sequence[Any]) -> torch.Tensor:
        """The same of rows as `mix` has left them."""
        return ops.short_conv(projected, self.weight, self.conv_bias, carried)


@dataclass(frozen=True)
class DeltaNetwork:
    """A gated delta network: see `DeltaLayer`."""

    index: int
    projections: tuple[Any, ...]
    how: DeltaLayer

    def mix(self, ops: Backend, projected: torch.Tensor, carried: Sequence[Any]) -> torch.Tensor:
        """Projections of rows -> what the last product of the layer reads, [T, value_heads * dim_v]."""
        return ops.delta_net(projected, self.how, carried)

    again = mix


@dataclass(frozen=True)
class StateSpace:
    """Mamba-2: see `MambaLayer`."""

    index: int
    projections: tuple[Any, ...]
    how: MambaLayer

    def mix(self, ops: Backend, projected: torch.Tensor, carried: Sequence[Any]) -> torch.Tensor:
        """Projections of rows -> what the last product of the layer reads, [T, heads * dim]."""
        return ops.mamba(projected, self.how, carried)

    again = mix


Mixing = ShortConvolution | DeltaNetwork | StateSpace


def load_mixer(config: ModelConfig, layer: int, weights: Weights, ops: Backend) -> tuple[Mixing, str, int]:
    """That of a layer; the name of its last matrix, and the columns of this. Raises ModelError for missing or misshapen
    tensors."""
    mixer, index = config.layers[layer].mixer, sum(x.state_bytes > 0 for x in config.layers[:layer])
    if isinstance(mixer, DeltaNet):
        return _delta_network(config, mixer, layer, index, weights, ops), f"blk.{layer}.ssm_out", _inner(mixer)
    if isinstance(mixer, Mamba):
        inner = mixer.heads * mixer.dim
        return _state_space(config, mixer, layer, index, weights, ops), f"blk.{layer}.ssm_out", inner
    assert isinstance(mixer, ShortConv)
    return (
        _short_convolution(config, mixer, layer, index, weights, ops),
        f"blk.{layer}.shortconv.out_proj",
        config.d_model,
    )


def _inner(mixer: DeltaNet) -> int:
    return mixer.value_heads * mixer.dim_v


def _short_convolution(
    config: ModelConfig, mixer: ShortConv, layer: int, index: int, weights: Weights, ops: Backend
) -> ShortConvolution:
    name, d = f"blk.{layer}.shortconv.{{}}".format, config.d_model

    def bias(of: str, size: int) -> torch.Tensor | None:
        full = f"{name(of)}.bias"
        return weights.vector(full, size).to(ops.device) if full in weights else None

    projections = ops.place((weights.matrix(f"{name('in_proj')}.weight", 3 * d, d),))
    conv = weights.vector(f"{name('conv')}.weight", d, mixer.kernel).to(ops.device)
    return ShortConvolution(index, projections, bias("in_proj", 3 * d), conv, bias("conv", d))


def _delta_network(
    config: ModelConfig, mixer: DeltaNet, layer: int, index: int, weights: Weights, ops: Backend
) -> DeltaNetwork:
    name, d, heads, inner = f"blk.{layer}.{{}}".format, config.d_model, mixer.value_heads, _inner(mixer)
    channels = 2 * mixer.key_heads * mixer.dim_k + inner
    rows = {"attn_qkv": channels, "attn_gate": inner, "ssm_beta": heads, "ssm_alpha": heads}
    found = _by_key_head(mixer, name, d, weights)
    projections = tuple(found.get(x) or weights.matrix(f"{name(x)}.weight", n, d) for x, n in rows.items())

    def vector(of: str, *shape: int) -> torch.Tensor:
        return weights.vector(name(of), *shape).to(ops.device)

    how = DeltaLayer(
        mixer.key_heads, heads, mixer.dim_k, mixer.dim_v, vector("ssm_conv1d.weight", channels, mixer.kernel),
        vector("ssm_a", heads), vector("ssm_dt.bias", heads), vector("ssm_norm.weight", mixer.dim_v), config.norm_eps,
        mixer.tiled,
    )  # fmt: skip
    return DeltaNetwork(index, ops.place(projections), how)


def _by_key_head(mixer: DeltaNet, name: Callable[[str], str], d: int, weights: Weights) -> dict[str, QuantTensor]:
    """Projections that files have as one matrix, head of keys by head of keys: channels and gates of the output, and
    what betas and decays are made of."""
    keys, share = mixer.key_heads, mixer.value_heads // mixer.key_heads
    values, found = share * mixer.dim_v, dict[str, QuantTensor]()

    def cut(of: str, sizes: list[int], ends: tuple[int, int]) -> tuple[QuantTensor, ...]:
        """Of parts of each head, the first ones and those behind them."""
        whole = weights.matrix(f"{name(of)}.weight", keys * sum(sizes), d)

        def rows(x: torch.Tensor, which: slice) -> torch.Tensor:
            parts = x.unflatten(0, (keys, -1)).split(sizes, 1)
            return torch.cat([part.flatten(0, 1) for part in parts[which]])

        return tuple(whole.with_rows(partial(rows, which=x)) for x in (slice(ends[0]), slice(*ends)))

    if f"{name('ssm_in')}.weight" in weights:
        sizes = [mixer.dim_k, mixer.dim_k, values, values]
        found["attn_qkv"], found["attn_gate"] = cut("ssm_in", sizes, (3, 4))
    if f"{name('ssm_ba')}.weight" in weights:
        found["ssm_beta"], found["ssm_alpha"] = cut("ssm_ba", [share, share], (1, 2))
    return found


def _state_space(
    config: ModelConfig, mixer: Mamba, layer: int, index: int, weights: Weights, ops: Backend
) -> StateSpace:
    name, inner, heads = f"blk.{layer}.{{}}".format, mixer.heads * mixer.dim, mixer.heads
    rows = inner + mixer.channels + heads
    projections = ops.place((weights.matrix(name("ssm_in.weight"), rows, config.d_model),))

    def vector(of: str, *shape: int) -> torch.Tensor:
        return weights.vector(name(of), *shape).to(ops.device)

    bias, norm = "ssm_conv1d.bias", "ssm_norm.weight"
    shape = mixer.groups, inner // mixer.groups
    normed = not mixer.norm_optional or name(norm) in weights
    how = MambaLayer(
        heads, mixer.dim, mixer.groups, mixer.state, vector("ssm_conv1d.weight", mixer.channels, mixer.kernel),
        vector(bias, mixer.channels) if name(bias) in weights else None, vector("ssm_a", heads, 1).flatten(),
        vector("ssm_dt.bias", heads), vector("ssm_d", heads, 1).flatten(),
        vector(norm, *shape).flatten() if normed else None, config.norm_eps,
    )  # fmt: skip
    return StateSpace(index, projections, how)
