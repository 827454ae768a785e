"""Gated delta networks over many rows on a GPU: by products of chunks of 64 rows (arXiv 2406.06484, 2412.06464).

Within a chunk the changes u of all rows solve (1 + L) u = beta (v - e^g S'k), where g are the decays added up, S is the
state before the chunk, and L[i, j] = beta_i (k_i . k_j) e^(g_i - g_j) below the diagonal. The inverse of 1 + L does
not depend on S: so one kernel, of all chunks at once, makes it and multiplies both parts of the right side, and another
goes from chunk to chunk (chunks.py).
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.chunks import Heads, Within, across, dot, key_head_of, softplus, store_between, store_factors
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.legs import Legs
from kvcli.kernels.states import DeltaLayer


@triton.jit
def _inverse(below, i, SIZE: tl.constexpr):
    """Of 1 + L, row by row; below [j, i] = L[i, j], 0 but for j < i."""
    found = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for r in range(1, SIZE):
        row = tl.sum(tl.where(i[None, :] == r, below, 0.0), 1)
        change = tl.sum(row[:, None] * found, 0)
        found = tl.where(i[:, None] == r, found - change[None, :], found)
    return found


@triton.jit
def _delta_within(x, mixed, decays, time_bias, chunks, between, of_rows, of_state, factors, LDX: tl.constexpr,
                  CHANNELS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
                  PK: tl.constexpr, PV: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, TILED: tl.constexpr,
                  SIZE: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Of one chunk and value head; see `Within`."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lo, hi = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if hi > lo:
        key_head = key_head_of(head, KEYS, HEADS, TILED)
        i, e = tl.arange(0, SIZE), tl.arange(0, EACH)
        there = i < (hi - lo).to(tl.int32)
        row, cell = i[:, None] * CHANNELS + e[None, :], (chunk * HEADS + head) * SIZE
        of_queries = mixed + lo * CHANNELS + Q_AT + key_head * DK
        of_keys = mixed + lo * CHANNELS + K_AT + key_head * DK
        of_q, of_k = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
        queries, keys = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        for first in range(0, PK, EACH):
            mask = there[:, None] & (first + e < DK)[None, :]
            q = tl.load(of_queries + first + row, mask=mask, other=0.0)
            k = tl.load(of_keys + first + row, mask=mask, other=0.0)
            of_q, of_k = of_q + tl.sum(q * q, 1), of_k + tl.sum(k * k, 1)
            queries, keys = queries + dot(q, tl.trans(k)), keys + dot(k, tl.trans(k))
        of_q, of_k = tl.rsqrt(of_q + 1e-6) * DK**-0.5, tl.rsqrt(of_k + 1e-6)
        gates = x + lo * LDX + CHANNELS + HEADS * DV + head
        beta = tl.where(there, 1.0 / (1.0 + tl.exp(-tl.load(gates + i * LDX, mask=there, other=0.0))), 0.0)
        step = tl.load(gates + HEADS + i * LDX, mask=there, other=0.0) + tl.load(time_bias + head)
        g = tl.cumsum(tl.where(there, tl.load(decays + head) * softplus(step), 0.0), 0)
        store_between(between, cell, i, queries * of_q[:, None] * of_k[None, :], g, SIZE)
        store_factors(factors, cell, i, of_q, of_k, g, SIZE)
        below = keys * of_k[:, None] * (of_k * beta)[None, :] * tl.exp(tl.minimum(g[None, :] - g[:, None], 0.0))
        inverse = _inverse(tl.where(i[:, None] < i[None, :], below, 0.0), i, SIZE)
        for first in range(0, PK, EACH):
            k = tl.load(of_keys + first + row, mask=there[:, None] & (first + e < DK)[None, :], other=0.0)
            found = dot(inverse, k * (of_k * beta * tl.exp(g))[:, None])
            tl.store(of_state + cell * PK + first + i[:, None] * PK + e[None, :], found)
        values = mixed + lo * CHANNELS + 2 * KEYS * DK + head * DV
        for first in range(0, PV, EACH):
            v = tl.load(values + first + row, mask=there[:, None] & (first + e < DV)[None, :], other=0.0)
            found = dot(inverse, v * beta[:, None])
            tl.store(of_rows + cell * PV + first + i[:, None] * PV + e[None, :], found)


def delta(x: torch.Tensor, mixed: torch.Tensor, layer: DeltaLayer, legs: Legs, out: torch.Tensor) -> None:
    """What heads give, before their norms, into out [T, value_heads * dim_v], and the matrices behind each leg: of
    projections x [T, ...] and their mixed channels [T, channels]; see `DeltaLayer`. `legs`: with the offset of the
    matrices."""
    heads = Heads(
        layer.channels, layer.key_heads, layer.value_heads, layer.dim_k, layer.dim_v, 0, layer.key_heads * layer.dim_k,
        layer.tiled,
    )  # fmt: skip
    within = Within.empty(heads, len(legs.chunks), True, x.device)
    launch(_delta_within, (len(legs.chunks), heads.heads))(
        x, mixed, layer.decay, layer.time_bias, legs.chunks, within.between, within.of_rows, within.of_state,
        within.factors, LDX=x.stride(0), **dict(heads.sizes()), num_warps=4, num_stages=1,
    )  # fmt: skip
    across(mixed, heads, within, legs, out)
