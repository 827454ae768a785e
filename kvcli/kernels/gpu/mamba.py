"""Mamba-2 (arXiv 2405.21060) on a GPU: row by row, or in chunks (chunks.py)."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.chunks import Heads, Within, across, dot, softplus, store_between, store_factors
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.legs import Legs, ends_of, load_state, rows_of, state_at
from kvcli.kernels.gpu.states import DELTA_COLUMNS, IN_CHUNKS, Carrying, convolved, legs_of, new_rows
from kvcli.kernels.gpu.tiles import bound
from kvcli.kernels.states import MambaLayer


@triton.jit
def _mamba_rows(x, mixed, decays, time_bias, table, offset, out, n, LDX: tl.constexpr, GROUPS: tl.constexpr,
                HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """Some columns of one head's matrix, row after row; see reference/mamba.py."""
    head = tl.program_id(0)
    i, j = tl.arange(0, PAD), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    in_k, in_v = i < DK, j < DV
    inner: tl.constexpr = HEADS * DV
    channels: tl.constexpr = inner + 2 * GROUPS * DK
    at = head.to(tl.int64) * (DK * DV) + i[:, None] * DV + j[None, :]
    both = in_k[:, None] & in_v[None, :]
    decay, bias = tl.load(decays + head), tl.load(time_bias + head)
    for leg in range(bound(tl.program_id(2)), n, bound(tl.num_programs(2))):
        lo, hi = rows_of(table, leg)
        if hi > lo:
            source, target = ends_of(table, leg)
            tl.debug_barrier()  # it may be what the leg before it has left
            state = load_state(source, offset, at, both)
            for t in range(lo, hi):
                row = mixed + t * channels
                keys = row + inner + head // (HEADS // GROUPS) * DK + i
                k = tl.load(keys, mask=in_k, other=0.0)
                q = tl.load(keys + GROUPS * DK, mask=in_k, other=0.0)
                step = softplus(tl.load(x + t * LDX + inner + channels + head) + bias)
                v = tl.load(row + head * DV + j, mask=in_v, other=0.0) * step
                state = state * tl.exp(decay * step) + k[:, None] * v[None, :]
                tl.store(out + t * inner + head * DV + j, tl.sum(state * q[:, None], 0), mask=in_v)
            if target != 0:
                tl.store(state_at(target, offset) + at, state, mask=both)


@triton.jit
def _mamba_within(x, mixed, decays, time_bias, chunks, between, of_rows, factors, LDX: tl.constexpr,
                  CHANNELS: tl.constexpr, KEYS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
                  PK: tl.constexpr, PV: tl.constexpr, Q_AT: tl.constexpr, K_AT: tl.constexpr, TILED: tl.constexpr,
                  SIZE: tl.constexpr, EACH: tl.constexpr):  # fmt: skip
    """Of one chunk and head; see `Within`."""
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lo, hi = tl.load(chunks + 2 * chunk), tl.load(chunks + 2 * chunk + 1)
    if hi > lo:
        i, e = tl.arange(0, SIZE), tl.arange(0, EACH)
        there = i < (hi - lo).to(tl.int32)
        row, cell = i[:, None] * CHANNELS + e[None, :], (chunk * HEADS + head) * SIZE
        at = mixed + lo * CHANNELS + head // (HEADS // KEYS) * DK
        products = tl.zeros([SIZE, SIZE], tl.float32)
        for first in range(0, PK, EACH):
            mask = there[:, None] & (first + e < DK)[None, :]
            q = tl.load(at + Q_AT + first + row, mask=mask, other=0.0)
            k = tl.load(at + K_AT + first + row, mask=mask, other=0.0)
            products += dot(q, tl.trans(k))
        time = x + lo * LDX + HEADS * DV + CHANNELS + head
        step = softplus(tl.load(time + i * LDX, mask=there, other=0.0) + tl.load(time_bias + head))
        g = tl.cumsum(tl.where(there, tl.load(decays + head) * step, 0.0), 0)
        store_between(between, cell, i, products, g, SIZE)
        store_factors(factors, cell, i, tl.zeros_like(g) + 1.0, tl.zeros_like(g) + 1.0, g, SIZE)
        values = mixed + lo * CHANNELS + head * DV
        for first in range(0, PV, EACH):
            v = tl.load(values + first + row, mask=there[:, None] & (first + e < DV)[None, :], other=0.0)
            tl.store(of_rows + cell * PV + first + i[:, None] * PV + e[None, :], v * step[:, None])


@triton.jit
def _gate_groups(x, mixed, y, skip, norm, eps, LDX: tl.constexpr, CHANNELS: tl.constexpr, DV: tl.constexpr,
                 INNER: tl.constexpr, EACH: tl.constexpr, PAD: tl.constexpr, NORMED: tl.constexpr):  # fmt: skip
    """A group of y [T, INNER], in place: with what skips the state, times SiLU of the gates that x begins with; NORMED:
    its RMS norm."""
    row, j = tl.program_id(0).to(tl.int64), tl.arange(0, PAD)
    there, column = j < EACH, tl.program_id(1) * EACH + j
    v = tl.load(y + row * INNER + column, mask=there, other=0.0)
    taken = tl.load(mixed + row * CHANNELS + column, mask=there, other=0.0)
    v += tl.load(skip + column // DV, mask=there, other=0.0) * taken
    z = tl.load(x + row * LDX + column, mask=there, other=0.0)
    v *= z / (1.0 + tl.exp(-z))
    if NORMED:
        v *= tl.rsqrt(tl.sum(v * v, 0) / EACH + eps) * tl.load(norm + column, mask=there, other=0.0)
    tl.store(y + row * INNER + column, v, mask=there)


def mamba(x: torch.Tensor, layer: MambaLayer, carried: Carrying) -> torch.Tensor:
    """See `reference.mamba.mamba`; x in one piece."""
    t, inner, c, legs = x.shape[0], layer.inner, layer.channels, legs_of(carried, x.device)
    mixed, out = convolved(x[:, inner:], layer.conv, layer.conv_bias, legs, False), new_rows(legs, t, inner)
    behind = replace(legs, offset=legs.offset + 4 * (layer.conv.shape[1] - 1) * c)  # matrices stand behind channels
    if t >= IN_CHUNKS and not legs.apart:
        _chunks(x, mixed, layer, behind, out)
    else:
        width = min(DELTA_COLUMNS, triton.next_power_of_2(layer.dim))
        launch(_mamba_rows, (layer.heads, triton.cdiv(layer.dim, width), legs.at_once))(
            x, mixed, layer.decay, layer.time_bias, legs.table, behind.offset, out, len(legs.table), LDX=x.stride(0),
            GROUPS=layer.groups, HEADS=layer.heads, DK=layer.state, DV=layer.dim,
            PAD=triton.next_power_of_2(layer.state), WIDTH=width, num_warps=1,
        )  # fmt: skip
    each = inner // layer.groups
    launch(_gate_groups, (t, layer.groups))(
        x, mixed, out, layer.skip, out if layer.norm is None else layer.norm, layer.eps, LDX=x.stride(0), CHANNELS=c,
        DV=layer.dim, INNER=inner, EACH=each, PAD=triton.next_power_of_2(each), NORMED=layer.norm is not None,
        num_warps=8 if each > 1024 else 1,
    )  # fmt: skip
    return out


def _chunks(x: torch.Tensor, mixed: torch.Tensor, layer: MambaLayer, legs: Legs, out: torch.Tensor) -> None:
    """What heads find of many rows, and the matrices behind each leg."""
    keys, queries = layer.inner, layer.inner + layer.groups * layer.state
    heads = Heads(
        layer.channels, layer.groups, layer.heads, layer.state, layer.dim, queries, keys, tiled=False
    )  # fmt: skip
    within = Within.empty(heads, len(legs.chunks), False, x.device)
    launch(_mamba_within, (len(legs.chunks), layer.heads))(
        x, mixed, layer.decay, layer.time_bias, legs.chunks, within.between, within.of_rows, within.factors,
        LDX=x.stride(0), **dict(heads.sizes()), num_warps=4, num_stages=1,
    )  # fmt: skip
    across(mixed, heads, within, legs, out)
