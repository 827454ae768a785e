"""`Carried`: the state of one sequence and layer along some rows of a step.

Layers that keep a state compute each row from the one before it, and leave the one behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


class Carried(NamedTuple):
    """Rows [lo, hi) of a step, which follow the state `source` (None = zeros, at the start of a sequence) and leave
    `target`: float32, flat. Both may be the same memory. Later rows of the same sequence come later in lists of these,
    and may begin with what these leave."""

    lo: int
    hi: int
    source: torch.Tensor | None
    target: torch.Tensor


@dataclass(frozen=True, eq=False)
class DeltaLayer:
    """A gated delta network (arXiv 2412.06464), between the projections of a layer and its last one.

    Projections of a row lie side by side: `channels` of queries, keys and values of all heads, which go through a
    causal convolution `conv` float32 [channels, K] and SiLU; gates of the output [value_heads * dim_v]; what betas are
    the sigmoid of, and what decays are made of, [value_heads] each: `decay` (negative, [value_heads]) by the softplus
    of it and `time_bias` [value_heads]. What a head gives has an RMS norm with weights `norm` [dim_v], `eps` added to
    its mean, and is multiplied by SiLU of the gates. `tiled`: value head h reads key head h mod key_heads, not
    h // (value_heads / key_heads).

    A state is the last K - 1 rows of channels, and of each head a matrix [dim_k, dim_v].
    """

    key_heads: int
    value_heads: int
    dim_k: int
    dim_v: int
    conv: torch.Tensor
    decay: torch.Tensor
    time_bias: torch.Tensor
    norm: torch.Tensor
    eps: float
    tiled: bool

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dim_k + self.value_heads * self.dim_v

    def parts(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [K - 1, channels] and matrices [value_heads, dim_k, dim_v] of a flat state."""
        n = (self.conv.shape[1] - 1) * self.channels
        return state[:n].view(-1, self.channels), state[n:].view(self.value_heads, self.dim_k, self.dim_v)


@dataclass(frozen=True, eq=False)
class MambaLayer:
    """Mamba-2 (arXiv 2405.21060), between the projections of a layer and its last one.

    Projections of a row lie side by side: gates of the output [heads * dim]; `channels` of what heads take in, and of
    the keys and queries ("B" and "C") of `groups` of neighbouring heads, `state` each, which go through a causal
    convolution `conv` float32 [channels, K] (with `conv_bias` [channels] or without) and SiLU; and time steps [heads].
    The softplus of these, with `time_bias` [heads] added, multiplies what heads take in; times `decay` (negative,
    [heads]) it is the logarithm of what is left of their matrices. To what heads find, `skip` [heads] times what they
    take in is added; the sum is multiplied by SiLU of the gates, and has an RMS norm over each group's part, with `eps`
    added to its mean and weights `norm` [heads * dim]; None = no norm.

    A state is the last K - 1 rows of channels, and of each head a matrix [state, dim].
    """

    heads: int
    dim: int
    groups: int
    state: int
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    decay: torch.Tensor
    time_bias: torch.Tensor
    skip: torch.Tensor
    norm: torch.Tensor | None
    eps: float

    @property
    def inner(self) -> int:
        """Elements of what all heads take in."""
        return self.heads * self.dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    def parts(self, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [K - 1, channels] and matrices [heads, state, dim] of a flat state."""
        n = (self.conv.shape[1] - 1) * self.channels
        return state[:n].view(-1, self.channels), state[n:].view(self.heads, self.state, self.dim)
