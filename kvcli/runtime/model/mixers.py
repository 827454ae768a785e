"""What stands in a layer in the place of attention and keeps a state: its weights, and how a step runs through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcli.kernels import Backend, Carried
from kvcli.runtime.config import ModelConfig, ShortConv
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

    def compute(self, ops: Backend, x: Any, carried: Sequence[Carried]) -> torch.Tensor:
        """x [T, d_model], normed -> what the last product of the layer reads, [T, d_model]; the states go on."""
        projected = ops.matmul(x, self.projections)
        if self.bias is not None:
            ops.add_(projected, self.bias)
        return ops.short_conv(projected, self.weight, self.conv_bias, carried)


Mixing = ShortConvolution


def load_mixer(config: ModelConfig, layer: int, weights: Weights, ops: Backend) -> tuple[Mixing, str, int]:
    """That of a layer; the name of its last matrix, and the columns of this. Raises ModelError for missing or misshapen
    tensors."""
    mixer, index = config.layers[layer].mixer, sum(x.state_bytes > 0 for x in config.layers[:layer])
    assert isinstance(mixer, ShortConv)
    name, d = f"blk.{layer}.shortconv.{{}}".format, config.d_model

    def bias(of: str, size: int) -> torch.Tensor | None:
        full = f"{name(of)}.bias"
        return weights.vector(full, size).to(ops.device) if full in weights else None

    projections = ops.place((weights.matrix(f"{name('in_proj')}.weight", 3 * d, d),))
    conv = weights.vector(f"{name('conv')}.weight", d, mixer.kernel).to(ops.device)
    return ShortConvolution(index, projections, bias("in_proj", 3 * d), conv, bias("conv", d)), name("out_proj"), d
