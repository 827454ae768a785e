"""Rows on their way from one product to the next: float16, with one kernel between two products.

A product of many rows reads float16 and is summed in float32. Rows behind a norm fit into float16 as they are. Others,
which may be of any size, are divided by their largest element; the product is multiplied by it again, as it is stored
or added to the residual stream. Rows that packed weights are multiplied with as they are decoded are woven (woven.py).
`pdl`: see `language.SERIAL`.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.formats import GROUP
from kvcli.kernels.gpu.language import ACTS, SERIAL, glu, summed, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.gpu.woven import BLOCK, SCALED, place, width, woven_row

COLUMNS = 1024  # of a row that a program scales
GATED = 2048  # of a row that a program gates, where rows are few


class HalfRows(NamedTuple):
    """`values` float16 [T, n], to be multiplied by `scales` float32 [T], None = by one; `woven`: [T, width(n)].
    `blocks`, in place of `scales`, of woven rows: float32 [T, m], of each SCALED blocks."""

    values: torch.Tensor
    scales: torch.Tensor | None = None
    woven: bool = False
    blocks: torch.Tensor | None = None


def _pad(n: int) -> int:
    """Elements of a program's row, of which n are there."""
    return max(128, triton.next_power_of_2(n))


def _warps(pad: int) -> int:
    """Of a program that holds a row of so many elements in registers."""
    return max(1, min(16, pad // 512))


@triton.jit
def _store(v, row, values, N: tl.constexpr, PAD: tl.constexpr, WOVEN: tl.constexpr):
    """Write a row of N elements, 0 behind them; float16."""
    i = tl.arange(0, PAD)
    if WOVEN:
        WIDTH: tl.constexpr = tl.cdiv(N, 128) * 128
        tl.store(values + row * WIDTH + i, woven_row(v, PAD), mask=i < WIDTH)
    else:
        tl.store(values + row * N + i, v, mask=i < N)


@triton.jit
def _normed(x, weight, row, eps, N: tl.constexpr, PAD: tl.constexpr, PDL: tl.constexpr):
    i = tl.arange(0, PAD)
    wait_for_previous(PDL)
    v = tl.load(x + row * N + i, mask=i < N, other=0.0)
    return v * tl.rsqrt(tl.sum(v * v, 0) / N + eps) * tl.load(weight + i, mask=i < N, other=0.0)


@triton.jit
def _norm(x, weight, out, eps, N: tl.constexpr, PAD: tl.constexpr, WOVEN: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v = _normed(x, weight, row, eps, N, PAD, PDL)
    _store(tl.clamp(v, -LARGEST_HALF, LARGEST_HALF).to(tl.float16), row, out, N, PAD, WOVEN)


@triton.jit
def _rms_norm(x, weight, out, eps, N: tl.constexpr, PAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    tl.store(out + row * N + i, _normed(x, weight, row, eps, N, PAD, 0), mask=i < N)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, woven: bool = False, pdl: int = SERIAL) -> HalfRows:
    """`pointwise.rms_norm` of x float32 [T, n]."""
    (t, n), pad = x.shape, _pad(x.shape[1])
    out = _empty(t, n, x.device, woven)
    launch(_norm, (t,))(x, weight, out, eps, n, pad, woven, pdl, **launch_options(pdl, _warps(pad)))
    return HalfRows(out, None, woven)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`pointwise.rms_norm` of x float32, in one kernel: float32, too."""
    n, x = x.shape[-1], x.contiguous()
    out, pad = torch.empty_like(x), _pad(n)
    launch(_rms_norm, (x.numel() // n,))(x, weight, out, eps, n, pad, **launch_options(SERIAL, _warps(pad)))
    return out


@triton.jit
def _scale_down(v, row, values, scales, N: tl.constexpr, PAD: tl.constexpr, WOVEN: tl.constexpr):
    """Write a row, divided by its largest element, and that."""
    largest = tl.maximum(tl.max(tl.abs(v), 0), 1e-30)
    _store((v / largest).to(tl.float16), row, values, N, PAD, WOVEN)
    tl.store(scales + row, largest)


@triton.jit
def _halve(x, values, scales, N: tl.constexpr, PAD: tl.constexpr, WOVEN: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    _scale_down(tl.load(x + row * N + i, mask=i < N, other=0.0), row, values, scales, N, PAD, WOVEN)


@triton.jit
def _weave(x, blocks, out, scales, N: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
           PDL: tl.constexpr):  # fmt: skip
    """Rows of N elements, woven, or with BACK woven ones as they were. BLOCK: such as are scaled by blocks of so many
    columns; then each by one number; 0 = they are not."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    if BACK:
        WIDTH: tl.constexpr = tl.cdiv(N, 128) * 128
        v = tl.load(x + row * WIDTH + place(i), mask=i < N, other=0.0)
        if BLOCK > 0:
            each = tl.load(blocks + row * tl.cdiv(N, BLOCK) + i // BLOCK, mask=i < N, other=0.0)
            largest = tl.max(each, 0)
            v = (v.to(tl.float32) * (each / largest)).to(tl.float16)
            tl.store(scales + row, largest)
        _store(v, row, out, N, PAD, False)
    else:
        _store(tl.load(x + row * N + i, mask=i < N, other=0.0), row, out, N, PAD, True)


@triton.jit
def _gated(x, by, row, i, N: tl.constexpr, ACT: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
           SCALED: tl.constexpr):  # fmt: skip
    """Elements i of a row of N, 0 behind it. x: parts of rows of 2 N, runs of RUN gates, each with what they gate
    behind it; SCALED: times `by`."""
    at, apart = row * (2 * N) + i // RUN * (2 * RUN) + i % RUN, tl.num_programs(0).to(tl.int64) * (2 * N)
    gates, others = summed(x, at, i < N, apart, PARTS), summed(x, at + RUN, i < N, apart, PARTS)
    if SCALED:
        scale = tl.load(by + row)
        gates, others = gates * scale, others * scale
    return glu(gates, others, ACT)


@triton.jit
def _gate(x, by, values, scales, N: tl.constexpr, PAD: tl.constexpr, ACT: tl.constexpr, RUN: tl.constexpr,
          PARTS: tl.constexpr, SCALED: tl.constexpr, WOVEN: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    v = _gated(x, by, row, tl.arange(0, PAD), N, ACT, RUN, PARTS, SCALED)
    _scale_down(v, row, values, scales, N, PAD, WOVEN)


@triton.jit
def _gate_blocks(x, by, values, scales, N: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
                 BLOCK: tl.constexpr, ACT: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
                 SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program: COLUMNS of a row, woven, each BLOCK divided by its largest element, and these. Rows of one program
    each would keep a card waiting for a few multiprocessors."""
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * COLUMNS
    i = first + tl.arange(0, COLUMNS)
    b = first // BLOCK + tl.arange(0, COLUMNS // BLOCK)
    v = tl.reshape(_gated(x, by, row, i, N, ACT, RUN, PARTS, SCALED), (COLUMNS // BLOCK, BLOCK))
    largest = tl.maximum(tl.max(tl.abs(v), 1), 1e-30)
    v = tl.reshape(v / largest[:, None], (COLUMNS,)).to(tl.float16)
    tl.store(values + row * WIDTH + i, woven_row(v, COLUMNS), mask=i < WIDTH)
    tl.store(scales + row * tl.cdiv(N, BLOCK) + b, largest, mask=b < tl.cdiv(N, BLOCK))


def _empty(rows: int, n: int, device: torch.device, woven: bool) -> torch.Tensor:
    return torch.empty(rows, width(n) if woven else n, dtype=torch.float16, device=device)


def halve(x: torch.Tensor, woven: bool = False, pdl: int = SERIAL) -> HalfRows:
    """Float32 rows [T, n] of any size."""
    (t, n), pad = x.shape, _pad(x.shape[1])
    found = HalfRows(_empty(t, n, x.device, woven), torch.empty(t, device=x.device), woven)
    launch(_halve, (t,))(x, found.values, found.scales, n, pad, woven, pdl, **launch_options(pdl, _warps(pad)))
    return found


def weave(rows: HalfRows, n: int, woven: bool = True, pdl: int = SERIAL) -> HalfRows:
    """Rows of n elements, woven or not, as they are wanted; what is no longer woven is no longer scaled by blocks."""
    if rows.woven == woven:
        return rows
    t, pad, device = rows.values.shape[0], _pad(n), rows.values.device
    out, each = _empty(t, n, device, woven), 0 if rows.blocks is None else BLOCK * SCALED.value
    scales = torch.empty(t, device=device) if each else rows.scales
    launch(_weave, (t,))(
        rows.values, out if rows.blocks is None else rows.blocks, out, out if scales is None else scales, n, pad,
        rows.woven, each, pdl, **launch_options(pdl, _warps(pad)),
    )  # fmt: skip
    return HalfRows(out, scales, woven)


def gate(
    x: torch.Tensor, act: str, paired: bool, woven: bool = False, scales: torch.Tensor | None = None,
    pdl: int = SERIAL, blocks: bool = False,
) -> HalfRows:  # fmt: skip
    """`pointwise.glu` of x float32 [T, 2 n], or [parts, T, 2 n], to be summed, times the scales [T] of its rows.
    `paired`: gates and what they gate alternate in runs (`DeviceMatrix`); `blocks`: woven ones are scaled by blocks."""
    parts, (t, n) = x.shape[0] if x.dim() == 3 else 1, (x.shape[-2], x.shape[-1] // 2)
    values, by = _empty(t, n, x.device, woven), x if scales is None else scales
    how = ACTS[act], GROUP if paired else n, parts, scales is not None
    if woven and blocks:
        each = BLOCK * SCALED.value
        found = HalfRows(values, None, woven, torch.empty(t, triton.cdiv(n, each), device=x.device))
        launch(_gate_blocks, (t, triton.cdiv(n, GATED)))(
            x, by, values, found.blocks, n, width(n), GATED, each, *how, pdl, **launch_options(pdl, 4)
        )  # fmt: skip
        return found
    found = HalfRows(values, torch.empty(t, device=x.device), woven)
    launch(_gate, (t,))(
        x, by, values, found.scales, n, _pad(n), *how, woven, pdl, **launch_options(pdl, _warps(_pad(n)))
    )  # fmt: skip
    return found


@triton.jit
def _finish(product, scales, to, n, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ADD: tl.constexpr,
            SCALED: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    v = summed(product + row * n, i, i < n, tl.num_programs(0).to(tl.int64) * n, PARTS)
    if SCALED:
        v *= tl.load(scales + row)
    if ADD:
        v += tl.load(to + row * n + i, mask=i < n, other=0.0)
    tl.store(to + row * n + i, v, mask=i < n)


def finish(
    product: torch.Tensor, scales: torch.Tensor | None, add_to: torch.Tensor | None, pdl: int = SERIAL
) -> torch.Tensor:
    """A product float32 [parts, T, n], summed over its parts, times the scales [T] of its rows, added to `add_to` where
    there is one -> [T, n]."""
    parts, t, n = product.shape
    if parts == 1 and scales is None and add_to is None:
        return product[0]
    to = product[0] if add_to is None else add_to
    launch(_finish, (t, triton.cdiv(n, COLUMNS)))(
        product, product if scales is None else scales, to, n, COLUMNS, parts, add_to is not None,
        scales is not None, pdl, **launch_options(pdl, 4),
    )  # fmt: skip
    return to


@triton.jit
def _settle(product, scales, to, post, weight, out, eps, factor, N: tl.constexpr, PAD: tl.constexpr,
            PARTS: tl.constexpr, SCALED: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr, WOVEN: tl.constexpr,
            PDL: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    if POST:
        w_post = tl.load(post + i, mask=i < N, other=0.0)
    if NORM:
        w = tl.load(weight + i, mask=i < N, other=0.0)
    wait_for_previous(PDL)
    h = tl.load(to + row * N + i, mask=i < N, other=0.0)
    v = summed(product + row * N, i, i < N, tl.num_programs(0).to(tl.int64) * N, PARTS)
    if SCALED:
        v *= tl.load(scales + row)
    if POST:
        v = v * tl.rsqrt(tl.sum(v * v, 0) / N + eps) * w_post
    h += v * factor
    tl.store(to + row * N + i, h, mask=i < N)
    if NORM:
        h = h * tl.rsqrt(tl.sum(h * h, 0) / N + eps) * w
        _store(tl.clamp(h, -LARGEST_HALF, LARGEST_HALF).to(tl.float16), row, out, N, PAD, WOVEN)


def settle(
    product: torch.Tensor, scales: torch.Tensor | None, add_to: torch.Tensor, post: torch.Tensor | None, factor: float,
    norm: torch.Tensor | None, eps: float, woven: bool = False, pdl: int = SERIAL,
) -> HalfRows | None:  # fmt: skip
    """A product float32 [parts, T, n], summed over its parts, times the scales [T] of its rows, with the RMS norm of
    weights `post`, times `factor`, is added to `add_to` [T, n] -> that, with the RMS norm of weights `norm`. None of
    these has to be there."""
    (parts, t, n), pad = product.shape, _pad(product.shape[2])
    out = add_to if norm is None else _empty(t, n, add_to.device, woven)  # something stands for what is not there
    launch(_settle, (t,))(
        product, product if scales is None else scales, add_to, add_to if post is None else post,
        add_to if norm is None else norm, out, eps, factor, n, pad, parts, scales is not None, post is not None,
        norm is not None, woven, pdl, **launch_options(pdl, _warps(pad)),
    )  # fmt: skip
    return None if norm is None else HalfRows(out, None, woven)


def product(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, block: int = 0) -> None:
    """float16 x [T, cols] . weights [n, cols] -> out float32 [T, n], summed in float32; `block` rows at a time, 0 =
    all."""
    for rows, found in zip(x.split(block or len(x)), out.split(block or len(x)), strict=True):
        if x.is_cuda:
            torch.mm(rows, weights.T, out_dtype=torch.float32, out=found)
        else:  # Triton's interpreter
            found.copy_(rows.float() @ weights.float().T)
