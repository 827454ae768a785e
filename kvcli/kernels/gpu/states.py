"""Layers that keep a state, on a GPU: causal convolutions of all rows at once, and gated delta networks row by row or
in chunks (deltachunks.py)."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu import deltachunks
from kvcli.kernels.gpu.chunks import softplus
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.legs import BoundLegs, Legs, ends_of, load_state, rows_of, start_of, state_at
from kvcli.kernels.gpu.tiles import bound
from kvcli.kernels.states import Carried, DeltaLayer

COLUMNS = 128  # of a row that a program convolves
ROWS = 8  # that it convolves at most
DELTA_COLUMNS = 8  # of a head's matrix that a program of one warp has in registers
IN_CHUNKS = 16  # rows of a step that is computed in chunks

Carrying = Sequence[Carried] | Sequence[BoundLegs]


@triton.jit
def _input(x, origin, offset, since, row, columns, there, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr,
           GATED: tl.constexpr):  # fmt: skip
    """What is convolved, of rows counted as those of x: a part of x, or b * z where it has b, c and z side by side;
    before row `since` what the state at `origin` has, zeros where that is 0."""
    row = (row + tl.zeros_like(columns)).to(tl.int64)
    at, now = x + row * LDX + columns, there & (row >= since)
    found = tl.load(at, mask=now, other=0.0)
    if GATED:
        found *= tl.load(at + 2 * D, mask=now, other=0.0)
    return found + load_state(origin, offset, (row - since + KERNEL - 1) * D + columns, there & (row < since))


@triton.jit
def _convolve(x, weight, bias, table, offset, out, n, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr,
              GATED: tl.constexpr, BIASED: tl.constexpr, APART: tl.constexpr, ROWS: tl.constexpr,
              WIDTH: tl.constexpr):  # fmt: skip
    """Some rows and columns of x [T, LDX] -> out [T, D]; of what is no leg's row, nothing."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)[None, :]
    start, stop = 0, n
    if APART:  # see `Legs`
        start, stop = first, tl.minimum(first + ROWS, n)
    for leg in range(bound(start), bound(stop)):
        lo, hi = rows_of(table, leg)
        if (lo < first + ROWS) & (hi > first):
            since, origin = start_of(table, leg)
            there = (row >= lo) & (row < hi) & (columns < D)
            total = tl.zeros([ROWS, WIDTH], tl.float32)
            for k in tl.static_range(KERNEL):
                tap = tl.load(weight + columns * KERNEL + k, mask=columns < D, other=0.0)
                before = row - (KERNEL - 1 - k)
                total += tap * _input(x, origin, offset, since, before, columns, there, LDX, D, KERNEL, GATED)
            if BIASED:
                total += tl.load(bias + columns, mask=columns < D, other=0.0)
            if GATED:
                total *= tl.load(x + row.to(tl.int64) * LDX + D + columns, mask=there, other=0.0)
            else:
                total = total / (1.0 + tl.exp(-total))
            tl.store(out + row.to(tl.int64) * D + columns, total, mask=there)


@triton.jit
def _leave(x, table, offset, n, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, GATED: tl.constexpr,
           WIDTH: tl.constexpr):  # fmt: skip
    """The rows before the one that follows each leg. They may take the place of those before the first one: each column
    is one thread's, which moves its rows from the oldest on, and the leg that does so is the last of its sequence."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    for leg in range(bound(tl.program_id(1)), n, bound(tl.num_programs(1))):
        _, hi = rows_of(table, leg)
        _, target = ends_of(table, leg)
        if target != 0:
            since, origin = start_of(table, leg)
            for k in tl.static_range(KERNEL - 1):
                found = _input(x, origin, offset, since, hi - (KERNEL - 1) + k, columns, there, LDX, D, KERNEL, GATED)
                tl.store(state_at(target, offset) + k * D + columns, found, mask=there)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, legs: Legs, gated: bool
) -> torch.Tensor:
    """x [T, LDX] -> [T, D], and the states behind each leg; weight [D, K]. `gated`: see `_input`, else SiLU of it."""
    (d, kernel), t = weight.shape, x.shape[0]
    out, n = new_rows(legs, t, d), len(legs.table)
    sizes = {"LDX": x.stride(0), "D": d, "KERNEL": kernel, "GATED": gated}
    rows = 1 if legs.apart else min(ROWS, triton.next_power_of_2(t))
    launch(_convolve, (triton.cdiv(t, rows), triton.cdiv(d, COLUMNS)))(
        x, weight, weight if bias is None else bias, legs.table, legs.offset, out, n, **sizes, BIASED=bias is not None,
        APART=legs.apart, ROWS=rows, WIDTH=COLUMNS, num_warps=4,
    )  # fmt: skip
    launch(_leave, (triton.cdiv(d, COLUMNS), legs.at_once))(
        x, legs.table, legs.offset, n, **sizes, WIDTH=COLUMNS, num_warps=4
    )
    return out


def new_rows(legs: Legs, *shape: int) -> torch.Tensor:
    """For something of each row; rows of graphs may be spare, which nothing writes."""
    make = torch.zeros if legs.rows > 1 else torch.empty
    return make(*shape, device=legs.table.device)


def legs_of(carried: Carrying, device: torch.device) -> Legs:
    first = carried[0]
    return first.legs if isinstance(first, BoundLegs) else Legs.of(carried, device)  # type: ignore[arg-type]


def short_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Carrying) -> torch.Tensor:
    """See `reference.shortconv.short_conv`; x in one piece."""
    return convolved(x, weight, bias, legs_of(carried, x.device), True)


@triton.jit
def _delta(x, mixed, decays, time_bias, table, offset, out, n, LDX: tl.constexpr, KEYS: tl.constexpr,
           HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, WIDTH: tl.constexpr,
           TILED: tl.constexpr):  # fmt: skip
    """Some columns of one value head's matrix, row after row; see reference/deltanet.py."""
    head = tl.program_id(0)
    i, j = tl.arange(0, PAD), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    in_k, in_v = i < DK, j < DV
    if TILED:
        key_head = head % KEYS
    else:
        key_head = head // (HEADS // KEYS)
    channels: tl.constexpr = 2 * KEYS * DK + HEADS * DV
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
                gates = x + t * LDX + channels + HEADS * DV + head
                q = tl.load(row + key_head * DK + i, mask=in_k, other=0.0)
                k = tl.load(row + KEYS * DK + key_head * DK + i, mask=in_k, other=0.0)
                v = tl.load(row + 2 * KEYS * DK + head * DV + j, mask=in_v, other=0.0)
                q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5)
                k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
                beta = 1.0 / (1.0 + tl.exp(-tl.load(gates)))
                state = state * tl.exp(decay * softplus(tl.load(gates + HEADS) + bias))
                change = (v - tl.sum(state * k[:, None], 0)) * beta
                state += k[:, None] * change[None, :]
                tl.store(out + (t * HEADS + head) * DV + j, tl.sum(state * q[:, None], 0), mask=in_v)
            if target != 0:
                tl.store(state_at(target, offset) + at, state, mask=both)


@triton.jit
def _gate_heads(x, y, norm, eps, LDX: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr, DV: tl.constexpr,
          PAD: tl.constexpr):  # fmt: skip
    """A head of y [T, HEADS * DV], in place: its RMS norm, times SiLU of the gates that x has from column FIRST on."""
    row, head, j = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    there, at = j < DV, y + (row * HEADS + head) * DV + j
    v = tl.load(at, mask=there, other=0.0)
    z = tl.load(x + row * LDX + FIRST + head * DV + j, mask=there, other=0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / DV + eps) * tl.load(norm + j, mask=there, other=0.0)
    tl.store(at, v * (z / (1.0 + tl.exp(-z))), mask=there)


def delta_net(x: torch.Tensor, layer: DeltaLayer, carried: Carrying) -> torch.Tensor:
    """See `reference.deltanet.delta_net`; x in one piece. Few rows follow each other, and programs share out the
    columns of the heads' matrices, which stay in registers."""
    t, c, heads, dv = x.shape[0], layer.channels, layer.value_heads, layer.dim_v
    legs = legs_of(carried, x.device)
    mixed = convolved(x, layer.conv, None, legs, False)
    behind = replace(legs, offset=legs.offset + 4 * (layer.conv.shape[1] - 1) * c)  # matrices stand behind channels
    out = new_rows(legs, t, heads * dv)
    if t >= IN_CHUNKS and not legs.apart:
        deltachunks.delta(x, mixed, layer, behind, out)
    else:
        columns = min(DELTA_COLUMNS, triton.next_power_of_2(dv))
        launch(_delta, (heads, triton.cdiv(dv, columns), legs.at_once))(
            x, mixed, layer.decay, layer.time_bias, legs.table, behind.offset, out, len(legs.table), LDX=x.stride(0),
            KEYS=layer.key_heads, HEADS=heads, DK=layer.dim_k, DV=dv, PAD=triton.next_power_of_2(layer.dim_k),
            WIDTH=columns, TILED=layer.tiled, num_warps=1,
        )  # fmt: skip
    launch(_gate_heads, (t, heads))(
        x, out, layer.norm, layer.eps, LDX=x.stride(0), FIRST=c, HEADS=heads, DV=dv, PAD=triton.next_power_of_2(dv),
        num_warps=1,
    )  # fmt: skip
    return out
