"""The gated delta rule over many rows on a GPU: by products of chunks of 64 rows (arXiv 2406.06484, 2412.06464).

Within a chunk the changes u of all rows solve (1 + L) u = beta (v - e^g S'k), where g are the decays added up, S is the
state before the chunk, and L[i, j] = beta_i (k_i . k_j) e^(g_i - g_j) below the diagonal. The inverse of 1 + L does
not depend on S: so a first kernel, of all chunks at once, makes it and multiplies both parts of the right side, and a
second one goes from chunk to chunk, with some columns of a head's state. Products are of float32 numbers
in three parts, as exact as sums in float32.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.legs import CHUNK, Legs, ends_of, first_chunk, load_state, rows_of, state_at
from kvcli.kernels.states import DeltaLayer

STATE_COLUMNS = 32  # of a head's matrix that a program carries from chunk to chunk
STAGES = 1
COLUMNS = 32  # of queries, keys and values that a chunk multiplies at a time
WARPS = 4, 4
LEAST = 16  # the smallest side of a product


@triton.jit
def softplus(x):
    """ln(1 + e^x); x itself where that is the same in float32."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _dot(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


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
def _delta_within(x, mixed, decays, time_bias, chunks, of_state, of_rows, between, factors, LDX: tl.constexpr,
                  KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr,
                  PV: tl.constexpr, TILED: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Of one chunk and value head, what does not depend on the state: the change is of_rows - of_state . S; queries
    times keys, decayed; and what queries, keys and the state are multiplied by."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lo, hi = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if hi > lo:
        if TILED:
            key_head = head % KEYS
        else:
            key_head = head // (HEADS // KEYS)
        channels: tl.constexpr = 2 * KEYS * DK + HEADS * DV
        i, e = tl.arange(0, SIZE), tl.arange(0, EACH)
        there = i < (hi - lo).to(tl.int32)
        row, cell = i[:, None] * channels + e[None, :], (chunk * HEADS + head) * SIZE
        of_queries = mixed + lo * channels + key_head * DK
        of_keys = of_queries + KEYS * DK
        of_q, of_k = tl.zeros([SIZE], tl.float32), tl.zeros([SIZE], tl.float32)
        queries, keys = tl.zeros([SIZE, SIZE], tl.float32), tl.zeros([SIZE, SIZE], tl.float32)
        for first in range(0, PK, EACH):
            mask = there[:, None] & (first + e < DK)[None, :]
            q = tl.load(of_queries + first + row, mask=mask, other=0.0)
            k = tl.load(of_keys + first + row, mask=mask, other=0.0)
            of_q, of_k = of_q + tl.sum(q * q, 1), of_k + tl.sum(k * k, 1)
            queries, keys = queries + _dot(q, tl.trans(k)), keys + _dot(k, tl.trans(k))
        of_q, of_k = tl.rsqrt(of_q + 1e-6) * DK**-0.5, tl.rsqrt(of_k + 1e-6)
        gates = x + lo * LDX + channels + HEADS * DV + head
        beta = tl.where(there, 1.0 / (1.0 + tl.exp(-tl.load(gates + i * LDX, mask=there, other=0.0))), 0.0)
        step = tl.load(gates + HEADS + i * LDX, mask=there, other=0.0) + tl.load(time_bias + head)
        g = tl.cumsum(tl.where(there, tl.load(decays + head) * softplus(step), 0.0), 0)
        last = tl.sum(tl.where(i == SIZE - 1, g, 0.0), 0)
        decayed = queries * of_q[:, None] * of_k[None, :] * tl.exp(tl.minimum(g[:, None] - g[None, :], 0.0))
        decayed = tl.where(i[:, None] >= i[None, :], decayed, 0.0)
        tl.store(between + cell * SIZE + i[:, None] * SIZE + i[None, :], decayed)
        tl.store(factors + cell * 3 + i, of_q * tl.exp(g))
        tl.store(factors + cell * 3 + SIZE + i, of_k * tl.exp(last - g))
        tl.store(factors + cell * 3 + 2 * SIZE + i, tl.exp(last) + tl.zeros_like(g))
        below = keys * of_k[:, None] * (of_k * beta)[None, :] * tl.exp(tl.minimum(g[None, :] - g[:, None], 0.0))
        inverse = _inverse(tl.where(i[:, None] < i[None, :], below, 0.0), i, SIZE)
        for first in range(0, PK, EACH):
            k = tl.load(of_keys + first + row, mask=there[:, None] & (first + e < DK)[None, :], other=0.0)
            found = _dot(inverse, k * (of_k * beta * tl.exp(g))[:, None])
            tl.store(of_state + cell * PK + first + i[:, None] * PK + e[None, :], found)
        values = mixed + lo * channels + 2 * KEYS * DK + head * DV
        for first in range(0, PV, EACH):
            v = tl.load(values + first + row, mask=there[:, None] & (first + e < DV)[None, :], other=0.0)
            found = _dot(inverse, v * beta[:, None])
            tl.store(of_rows + cell * PV + first + i[:, None] * PV + e[None, :], found)


@triton.jit
def _delta_across(mixed, of_state, of_rows, between, factors, table, offset, out, n, KEYS: tl.constexpr,
                  HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PK: tl.constexpr, PV: tl.constexpr,
                  TILED: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
                  STAGES: tl.constexpr):  # fmt: skip
    """Some columns of one value head's matrix, chunk after chunk of each leg: out [T, HEADS * DV]. They stay where the
    leg leaves them, EACH rows in registers at a time: no other program knows of them."""
    head, column = tl.program_id(1), tl.program_id(0) * WIDTH
    if TILED:
        key_head = head % KEYS
    else:
        key_head = head // (HEADS // KEYS)
    channels: tl.constexpr = 2 * KEYS * DK + HEADS * DV
    i, e, j = tl.arange(0, SIZE), tl.arange(0, EACH), tl.arange(0, WIDTH)
    here = head.to(tl.int64) * (DK * DV) + column + e[:, None] * DV + j[None, :]
    in_v = column + j < DV
    row = i[:, None] * channels + e[None, :]
    for leg in range(n):
        lo, hi = rows_of(table, leg)
        source, target = ends_of(table, leg)
        if target != 0:
            state = state_at(target, offset) + here
            cell = (first_chunk(table, leg) * HEADS + head) * SIZE
            tl.debug_barrier()  # the state before it may be what the leg before it has left
            for a in range(0, PK, EACH):
                mask = (a + e < DK)[:, None] & in_v[None, :]
                tl.store(state + a * DV, load_state(source, offset, here + a * DV, mask), mask=mask)
            for first in range(lo, hi, SIZE):
                there = i < (hi - first).to(tl.int32)
                of_queries = mixed + first * channels + key_head * DK
                change = tl.load(of_rows + cell * PV + column + i[:, None] * PV + j[None, :])
                y = tl.zeros([SIZE, WIDTH], tl.float32)
                tl.debug_barrier()
                for a in tl.range(0, PK, EACH, num_stages=STAGES):
                    s = tl.load(state + a * DV, mask=(a + e < DK)[:, None] & in_v[None, :], other=0.0)
                    change -= _dot(tl.load(of_state + cell * PK + a + i[:, None] * PK + e[None, :]), s)
                    mask = there[:, None] & (a + e < DK)[None, :]
                    y += _dot(tl.load(of_queries + a + row, mask=mask, other=0.0), s)
                y *= tl.load(factors + cell * 3 + i)[:, None]
                y += _dot(tl.load(between + cell * SIZE + i[:, None] * SIZE + i[None, :]), change)
                to = out + first * (HEADS * DV) + head * DV + column
                tl.store(to + i[:, None] * (HEADS * DV) + j[None, :], y, mask=there[:, None] & in_v[None, :])
                change *= tl.load(factors + cell * 3 + SIZE + i)[:, None]
                whole = tl.load(factors + cell * 3 + 2 * SIZE)
                tl.debug_barrier()
                for a in tl.range(0, PK, EACH, num_stages=STAGES):
                    mask = there[:, None] & (a + e < DK)[None, :]
                    k = tl.load(of_queries + KEYS * DK + a + row, mask=mask, other=0.0)
                    mask = (a + e < DK)[:, None] & in_v[None, :]
                    s = tl.load(state + a * DV, mask=mask, other=0.0)
                    tl.store(state + a * DV, s * whole + _dot(tl.trans(k), change), mask=mask)
                cell += HEADS * SIZE


def delta(x: torch.Tensor, mixed: torch.Tensor, layer: DeltaLayer, legs: Legs, out: torch.Tensor) -> None:
    """What heads give, before their norms, into out [T, value_heads * dim_v], and the matrices behind each leg: of
    projections x [T, ...] and their mixed channels [T, channels]; see `DeltaLayer`. `legs`: with the offset of the
    matrices."""
    heads, m = layer.value_heads, len(legs.chunks)
    pk, pv = (max(LEAST, triton.next_power_of_2(n)) for n in (layer.dim_k, layer.dim_v))
    width = min(STATE_COLUMNS, pv)
    of_state, of_rows, between, factors = (
        torch.empty(m, heads, CHUNK, n, device=x.device) for n in (pk, pv, CHUNK, 3)
    )  # fmt: skip
    sizes = {"KEYS": layer.key_heads, "HEADS": heads, "DK": layer.dim_k, "DV": layer.dim_v, "PK": pk, "PV": pv}
    sizes |= {"TILED": layer.tiled, "SIZE": CHUNK, "EACH": min(COLUMNS, pk, pv)}
    launch(_delta_within, (m, heads))(
        x, mixed, layer.decay, layer.time_bias, legs.chunks, of_state, of_rows, between, factors, LDX=x.stride(0),
        **sizes, num_warps=WARPS[0], num_stages=1,
    )  # fmt: skip
    launch(_delta_across, (triton.cdiv(layer.dim_v, width), heads))(
        mixed, of_state, of_rows, between, factors, legs.table, legs.offset, out, len(legs.table), **sizes, WIDTH=width,
        STAGES=STAGES, num_warps=WARPS[1], num_stages=1,
    )  # fmt: skip
