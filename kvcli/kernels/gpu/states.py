"""Layers that keep a state, on a GPU: short convolutions and gated delta networks."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.states import Carried, DeltaLayer

COLUMNS = 512  # of a row that a program convolves
DELTA_COLUMNS = 8  # of a head's matrix that a program of one warp has in registers


@triton.jit
def _input(x, source, row, columns, there, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr):
    """What is convolved, of a row counted from the first one of x: b * z, or what the state has of earlier rows."""
    row = row + tl.zeros_like(columns)
    at, now = row.to(tl.int64) * (3 * D) + columns, there & (row >= 0)
    found = tl.load(x + at, mask=now, other=0.0) * tl.load(x + at + 2 * D, mask=now, other=0.0)
    if not FRESH:
        found += tl.load(source + (row + KERNEL - 1) * D + columns, mask=there & (row < 0), other=0.0)
    return found


@triton.jit
def _short_conv(x, weight, bias, source, out, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
                BIASED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    row = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    total = tl.zeros([WIDTH], tl.float32)
    for k in tl.static_range(KERNEL):
        tap = tl.load(weight + columns * KERNEL + k, mask=there, other=0.0)
        total += tap * _input(x, source, row - (KERNEL - 1 - k), columns, there, D, KERNEL, FRESH)
    if BIASED:
        total += tl.load(bias + columns, mask=there, other=0.0)
    c = tl.load(x + row.to(tl.int64) * (3 * D) + D + columns, mask=there, other=0.0)
    tl.store(out + row.to(tl.int64) * D + columns, c * total, mask=there)


@triton.jit
def _short_conv_state(x, source, target, rows, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
                      WIDTH: tl.constexpr):  # fmt: skip
    """The state behind `rows` rows of x. It may take the place of the one before: each column is one thread's, which
    moves its rows from the oldest on."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    for k in tl.static_range(KERNEL - 1):
        found = _input(x, source, rows - (KERNEL - 1) + k, columns, there, D, KERNEL, FRESH)
        tl.store(target + k * D + columns, found, mask=there)


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Sequence[Carried]
) -> torch.Tensor:
    """See `reference.shortconv.short_conv`; x in one piece."""
    d, kernel = weight.shape
    out, blocks = torch.empty(x.shape[0], d, device=x.device), triton.cdiv(d, COLUMNS)
    for each in carried:
        rows, given = x[each.lo : each.hi], each.target if each.source is None else each.source
        fresh, n = each.source is None, each.hi - each.lo
        launch(_short_conv, (n, blocks))(
            rows, weight, weight if bias is None else bias, given, out[each.lo : each.hi], D=d, KERNEL=kernel,
            FRESH=fresh, BIASED=bias is not None, WIDTH=COLUMNS, num_warps=4,
        )  # fmt: skip
        launch(_short_conv_state, (blocks,))(
            rows, given, each.target, n, D=d, KERNEL=kernel, FRESH=fresh, WIDTH=COLUMNS, num_warps=4
        )
    return out


@triton.jit
def _conv_silu(x, weight, source, out, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
               WIDTH: tl.constexpr):  # fmt: skip
    """A row of x [T, LDX], its first D columns convolved and activated: out [T, D]."""
    row = tl.program_id(0)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    total = tl.zeros([WIDTH], tl.float32)
    for k in tl.static_range(KERNEL):
        tap = tl.load(weight + columns * KERNEL + k, mask=there, other=0.0)
        total += tap * _channel(x, source, row - (KERNEL - 1 - k), columns, there, LDX, D, KERNEL, FRESH)
    tl.store(out + row.to(tl.int64) * D + columns, total / (1.0 + tl.exp(-total)), mask=there)


@triton.jit
def _channel(x, source, row, columns, there, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr,
             FRESH: tl.constexpr):  # fmt: skip
    """Of a row counted from the first one of x, or what the state has of earlier rows."""
    row = row + tl.zeros_like(columns)
    found = tl.load(x + row.to(tl.int64) * LDX + columns, mask=there & (row >= 0), other=0.0)
    if not FRESH:
        found += tl.load(source + (row + KERNEL - 1) * D + columns, mask=there & (row < 0), other=0.0)
    return found


@triton.jit
def _conv_state(x, source, target, rows, LDX: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, FRESH: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    """The rows before the one that follows x; see `_short_conv_state`."""
    columns = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = columns < D
    for k in tl.static_range(KERNEL - 1):
        found = _channel(x, source, rows - (KERNEL - 1) + k, columns, there, LDX, D, KERNEL, FRESH)
        tl.store(target + k * D + columns, found, mask=there)


@triton.jit
def _delta(x, mixed, decays, time_bias, source, target, out, rows, LDX: tl.constexpr, KEYS: tl.constexpr,
           HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PAD: tl.constexpr, WIDTH: tl.constexpr,
           TILED: tl.constexpr, FRESH: tl.constexpr):  # fmt: skip
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
    if FRESH:
        state = tl.zeros([PAD, WIDTH], tl.float32)
    else:
        state = tl.load(source + at, mask=both, other=0.0)
    decay, bias = tl.load(decays + head), tl.load(time_bias + head)
    for t in range(rows):
        row = mixed + tl.cast(t, tl.int64) * channels
        gates = x + tl.cast(t, tl.int64) * LDX + channels + HEADS * DV + head
        q = tl.load(row + key_head * DK + i, mask=in_k, other=0.0)
        k = tl.load(row + KEYS * DK + key_head * DK + i, mask=in_k, other=0.0)
        v = tl.load(row + 2 * KEYS * DK + head * DV + j, mask=in_v, other=0.0)
        q = q * (tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * DK**-0.5)
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gates)))
        step = tl.load(gates + HEADS) + bias
        state = state * tl.exp(decay * tl.where(step > 20.0, step, tl.log(1.0 + tl.exp(tl.minimum(step, 20.0)))))
        change = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * change[None, :]
        tl.store(out + (tl.cast(t, tl.int64) * HEADS + head) * DV + j, tl.sum(state * q[:, None], 0), mask=in_v)
    tl.store(target + at, state, mask=both)


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


def delta_net(x: torch.Tensor, layer: DeltaLayer, carried: Sequence[Carried]) -> torch.Tensor:
    """See `reference.deltanet.delta_net`; x in one piece. Rows follow each other, and programs share out the columns of
    the heads' matrices, which stay in registers."""
    t, width = x.shape
    c, heads, dv, kernel = layer.channels, layer.value_heads, layer.dim_v, layer.conv.shape[1]
    mixed, out = torch.empty(t, c, device=x.device), torch.empty(t, heads * dv, device=x.device)
    blocks, pad = triton.cdiv(c, COLUMNS), triton.next_power_of_2(layer.dim_k)
    columns = min(DELTA_COLUMNS, triton.next_power_of_2(dv))
    for e in carried:
        rows, fresh, n = x[e.lo : e.hi], e.source is None, e.hi - e.lo
        left = layer.parts(e.target)
        past = left if e.source is None else layer.parts(e.source)
        sizes = {"LDX": width, "D": c, "KERNEL": kernel, "FRESH": fresh, "WIDTH": COLUMNS}
        launch(_conv_silu, (n, blocks))(rows, layer.conv, past[0], mixed[e.lo : e.hi], **sizes, num_warps=4)
        launch(_conv_state, (blocks,))(rows, past[0], left[0], n, **sizes, num_warps=4)
        launch(_delta, (heads, triton.cdiv(dv, columns)))(
            rows, mixed[e.lo : e.hi], layer.decay, layer.time_bias, past[1], left[1], out[e.lo : e.hi], n, LDX=width,
            KEYS=layer.key_heads, HEADS=heads, DK=layer.dim_k, DV=dv, PAD=pad, WIDTH=columns, TILED=layer.tiled,
            FRESH=fresh, num_warps=1,
        )  # fmt: skip
    launch(_gate_heads, (t, heads))(
        x,
        out,
        layer.norm,
        layer.eps,
        LDX=width,
        FIRST=c,
        HEADS=heads,
        DV=dv,
        PAD=triton.next_power_of_2(dv),
        num_warps=1,
    )
    return out
