"""Gated delta networks (arXiv 2412.06464) in plain torch: row by row, and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcli.kernels.reference.experts import sigmoid
from kvcli.kernels.reference.pointwise import activate, rms_norm
from kvcli.kernels.reference.shortconv import convolve
from kvcli.kernels.reference.sums import exp, sqrt, total
from kvcli.kernels.states import Carried, DeltaLayer

LEAST = 1e-6  # added to a square before its root


def delta_net(x: torch.Tensor, layer: DeltaLayer, carried: Sequence[Carried]) -> torch.Tensor:
    """What stands between the projections of a layer and its last one: see `DeltaLayer` -> [T, value_heads * dim_v]."""
    c, n, heads = layer.channels, layer.value_heads * layer.dim_v, layer.value_heads
    found = []
    for each in carried:
        rows = x[each.lo : each.hi]
        past, left = (None if s is None else layer.parts(s) for s in (each.source, each.target))
        assert left is not None
        mixed = activate(convolve(rows[:, :c], layer.conv, None, None if past is None else past[0], left[0]), "silu")
        q, k, v = heads_of(mixed, layer)
        z, b, a = rows[:, c : c + n], rows[:, c + n : c + n + heads], rows[:, c + n + heads : c + n + 2 * heads]
        decays = layer.decay * softplus(a + layer.time_bias)
        state = torch.zeros_like(left[1]) if past is None else past[1].clone()
        out = by_row(q, k, v, decays, sigmoid(b), state)
        left[1].copy_(state)
        normed = rms_norm(out, layer.norm, layer.eps)
        found.append(normed.flatten(1) * activate(z, "silu"))
    return torch.cat(found)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """ln(1 + e^x); x itself where that is the same in float32."""
    return torch.where(x > 20, x, torch.log1p(exp(x.clamp(max=20))))


def heads_of(mixed: torch.Tensor, layer: DeltaLayer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys of unit length, queries divided by the root of dim_k, and values, from mixed channels [T, C]:
    each [T, value_heads, dim]. Value head h has the query and key of head h mod key_heads, or neighbours share one."""
    n = layer.key_heads * layer.dim_k
    q, k = (_unit(mixed[:, i * n : (i + 1) * n].unflatten(1, (-1, layer.dim_k))) for i in range(2))
    which = torch.arange(layer.value_heads, device=mixed.device)
    which = which % layer.key_heads if layer.tiled else which // (layer.value_heads // layer.key_heads)
    return q[:, which] * layer.dim_k**-0.5, k[:, which], mixed[:, 2 * n :].unflatten(1, (-1, layer.dim_v))


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * (1.0 / sqrt(total(x * x) + LEAST))[..., None]


def by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, betas: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    """The delta rule, row by row: S = e^decay S, S += beta k (v - S'k)', out = S'q, of each head.

    q, k [T, H, dim_k], v [T, H, dim_v], decays (at most 0) and betas [T, H]; `state` [H, dim_k, dim_v] is changed.
    """
    found = []
    factors = exp(decays)
    for t in range(q.shape[0]):
        state *= factors[t, :, None, None]
        change = (v[t] - total((state * k[t, :, :, None]).transpose(1, 2))) * betas[t, :, None]
        state += k[t, :, :, None] * change[:, None]
        found.append(total((state * q[t, :, :, None]).transpose(1, 2)))
    return torch.stack(found)


def by_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decays: torch.Tensor, betas: torch.Tensor, state: torch.Tensor,
    size: int = 64,
) -> torch.Tensor:  # fmt: skip
    """The same by products of chunks of `size` rows (arXiv 2406.06484, 2412.06464).

    Within a chunk the changes u of all rows solve (1 + L) u = beta (v - e^g S'k), where g are the decays added up and
    L[i, j] = beta_i (k_i . k_j) e^(g_i - g_j) below the diagonal.
    """
    found = []
    for start in range(0, q.shape[0], size):
        qs, ks, vs = (x[start : start + size].transpose(0, 1) for x in (q, k, v))  # [H, n, dim]
        g = decays[start : start + size].T.cumsum(1)
        b = betas[start : start + size].T[..., None]
        between = (g[:, :, None] - g[:, None]).tril().exp().tril()
        system = torch.eye(g.shape[1], device=q.device) + (b * (ks @ ks.mT) * between).tril(-1)
        wanted = b * (vs - g.exp()[..., None] * (ks @ state))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        found.append((g.exp()[..., None] * (qs @ state) + ((qs @ ks.mT) * between) @ change).transpose(0, 1))
        state *= g[:, -1].exp()[:, None, None]
        state += (ks * (g[:, -1:] - g).exp()[..., None]).mT @ change
    return torch.cat(found)
