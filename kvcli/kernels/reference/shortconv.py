"""Short convolutions in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcli.kernels.states import Carried


def convolve(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, source: torch.Tensor | None, target: torch.Tensor
) -> torch.Tensor:
    """A causal convolution of each column by itself: y[t] = sum over k of weight[:, k] * x[t - K + 1 + k], + bias.

    x [T, D], weight [D, K], bias [D] or None -> [T, D]. `source`, flat [(K - 1) * D]: the rows before x, zeros where it
    is None; `target` gets those before the row that follows x.
    """
    t, kernel = x.shape[0], weight.shape[1]
    past = x.new_zeros(kernel - 1, x.shape[1]) if source is None else source.view(kernel - 1, -1)
    rows = torch.cat([past, x])
    y = rows[:t] * weight[:, 0]
    for k in range(1, kernel):
        y = y + rows[k : k + t] * weight[:, k]
    target.view(kernel - 1, -1).copy_(rows[t:])
    return y if bias is None else y + bias


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Sequence[Carried]
) -> torch.Tensor:
    """The gated short convolution of LFM2 (arXiv 2511.23404): of projections b, c, z, side by side in x [T, 3D], rows
    b * z are convolved and multiplied by c -> [T, D].

    weight [D, K], bias [D] or None: see `convolve`. States are the last K - 1 rows of b * z, float32 [(K - 1) * D].
    """
    b, c, z = x.chunk(3, dim=1)
    rows = b * z
    found = [convolve(rows[e.lo : e.hi], weight, bias, e.source, e.target) for e in carried]
    return c * torch.cat(found)
