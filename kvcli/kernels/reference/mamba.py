"""Mamba-2 (arXiv 2405.21060) in plain torch: row by row, and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcli.kernels.reference.deltanet import softplus
from kvcli.kernels.reference.pointwise import activate, rms_norm
from kvcli.kernels.reference.shortconv import convolve
from kvcli.kernels.reference.sums import exp, total
from kvcli.kernels.states import Carried, MambaLayer


def mamba(x: torch.Tensor, layer: MambaLayer, carried: Sequence[Carried]) -> torch.Tensor:
    """What stands between the projections of a layer and its last one: see `MambaLayer` -> [T, heads * dim]."""
    n, c, found = layer.inner, layer.channels, []
    for each in carried:
        rows = x[each.lo : each.hi]
        past, left = (None if s is None else layer.parts(s) for s in (each.source, each.target))
        assert left is not None
        before = None if past is None else past[0]
        mixed = activate(convolve(rows[:, n : n + c], layer.conv, layer.conv_bias, before, left[0]), "silu")
        taken, keys, queries = heads_of(mixed, layer)
        steps = softplus(rows[:, n + c :] + layer.time_bias)
        state = torch.zeros_like(left[1]) if past is None else past[1].clone()
        out = by_row(queries, keys, taken * steps[..., None], layer.decay * steps, state)
        left[1].copy_(state)
        gated = (out + layer.skip[:, None] * taken).flatten(1) * activate(rows[:, :n], "silu")
        found.append(gated if layer.norm is None else _normed(gated, layer.norm.view(layer.groups, -1), layer.eps))
    return torch.cat(found)


def _normed(x: torch.Tensor, weights: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, groups * n], each group by itself; weights [groups, n]."""
    return (rms_norm(x.unflatten(1, weights.shape), torch.ones(weights.shape[1]), eps) * weights).flatten(1)


def heads_of(mixed: torch.Tensor, layer: MambaLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What heads take in [T, heads, dim], their keys and queries [T, heads, state], from mixed channels."""
    n, each = layer.inner, layer.groups * layer.state
    keys, queries = (
        mixed[:, first : first + each]
        .unflatten(1, (layer.groups, -1))
        .repeat_interleave(layer.heads // layer.groups, 1)
        for first in (n, n + each)
    )
    return mixed[:, :n].unflatten(1, (layer.heads, -1)), keys, queries


def by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """Row by row: S = e^decay S + k v', out = S'q, of each head.

    q, k [T, H, state], v [T, H, dim], decays (at most 0) [T, H]; `state` [H, state, dim] is changed.
    """
    found, factors = [], exp(decays)
    for t in range(q.shape[0]):
        state *= factors[t, :, None, None]
        state += k[t, :, :, None] * v[t, :, None]
        found.append(total((state * q[t, :, :, None]).transpose(1, 2)))
    return torch.stack(found)


def by_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, state: torch.Tensor, size: int = 64
) -> torch.Tensor:
    """The same by products of chunks of `size` rows."""
    found = []
    for start in range(0, q.shape[0], size):
        qs, ks, vs = (x[start : start + size].transpose(0, 1) for x in (q, k, v))  # [H, n, state or dim]
        g = decays[start : start + size].T.cumsum(1)
        between = (g[:, :, None] - g[:, None]).tril().exp().tril()
        found.append((g.exp()[..., None] * (qs @ state) + ((qs @ ks.mT) * between) @ vs).transpose(0, 1))
        state *= g[:, -1].exp()[:, None, None]
        state += (ks * (g[:, -1:] - g).exp()[..., None]).mT @ vs
    return torch.cat(found)
