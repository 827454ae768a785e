"""Products of one token with the experts that it has: their numbers and weights stand in device memory."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu import products
from kvcli.kernels.gpu.experts import DeviceExperts
from kvcli.kernels.gpu.formats import GROUP, PLAIN, constants
from kvcli.kernels.gpu.language import ACTS, LEADING, SERIAL, glu, store_activations, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.matvec import (
    GATED,
    STORE,
    inverse_rms,
    load_plain,
    load_rows,
    load_squares,
    load_vector,
    walk_packed,
    walk_plain,
)
from kvcli.kernels.gpu.products import TWO_PLANES_BYTES, Activations, Norm, Tiles


@triton.jit
def finish_expert(y, n, pid, slot, N, K, eps, expert, BIAS, X_SQUARES, OUT, CODES, SCALES, SUMS, VALUES,
                  ROLE: tl.constexpr, USED: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
                  ACT: tl.constexpr, KEEP: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """The rows n of a product with the slot's expert: stored, or gates and gated in runs of 32, which go on as its part
    of the next product's vector."""
    if PARTS > 0:
        y = y * inverse_rms(load_squares(X_SQUARES, PARTS), K, eps)
    if BIASED:
        y += tl.load(BIAS + expert * N + n, mask=n < N, other=0.0)
    if ROLE == 0:
        tl.store(OUT + slot * N + n, y, mask=n < N)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BN // 64, 2, 32)), (0, 2, 1)))
        v = tl.reshape(glu(gate, up, ACT), (BN // 2,))
        F = N // 2
        there = (F - pid * (BN // 2)) // 32
        store_activations(v, slot * F + pid * (BN // 2), USED * F, there, CODES, SCALES, SUMS, VALUES, BN // 64, KEEP)


@triton.jit
def experts_packed(W, W_HIGH, W_SCALES, W_SUPERS, TABLE, XCODES, XSCALES, XSUMS, IDS, BIAS, X_SQUARES, OUT, CODES,
                   SCALES, SUMS, VALUES, N, eps, G: tl.constexpr, CODING: tl.constexpr, WORDS: tl.constexpr,
                   KIND: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr, UNIT: tl.constexpr,
                   PLANES: tl.constexpr, ROLE: tl.constexpr, USED: tl.constexpr, EACH: tl.constexpr,
                   PARTS: tl.constexpr, BIASED: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr,
                   BN: tl.constexpr, BG: tl.constexpr, RC: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """Rows [pid * BN, + BN) of the matrix of a slot's expert. EACH: each slot has a vector of its own, side by side."""
    pid, slot = tl.program_id(0), tl.program_id(1)
    g = tl.arange(0, BG)
    wait_for_previous(PDL)
    expert = tl.load(IDS + slot)
    first, last = expert * N + pid * BN, expert * N + N - 1
    n = tl.minimum(first + tl.arange(0, RC), last)
    w0, w1, w2, high, s, d = load_rows(W, W_HIGH, W_SCALES, W_SUPERS, n, g, G, CODING, WORDS, KIND, SPAN)
    mine, plane = slot * EACH, G * 8 * (USED if EACH else 1)
    xa, xb, ya, yb, xd, s0, s1 = load_vector(
        XCODES + mine * (G * 8), XSCALES + mine * G, XSUMS + mine * (G * 2), g, plane, G, PLANES
    )
    y = walk_packed(W, W_HIGH, W_SCALES, W_SUPERS, TABLE, first, last, w0, w1, w2, high, s, d, g, xa, xb, ya, yb, xd,
                    s0, s1, G, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, PLANES, BN, BG, RC, N, 0)  # fmt: skip
    finish_expert(y, pid * BN + tl.arange(0, BN), pid, slot, N, G * 32, eps, expert, BIAS, X_SQUARES, OUT, CODES,
                  SCALES, SUMS, VALUES, ROLE, USED, PARTS, BIASED, ACT, KEEP, BN)  # fmt: skip


@triton.jit
def experts_plain(W, X, IDS, BIAS, X_SQUARES, OUT, CODES, SCALES, SUMS, VALUES, N, eps, K: tl.constexpr,
                  ROLE: tl.constexpr, USED: tl.constexpr, EACH: tl.constexpr, PARTS: tl.constexpr,
                  BIASED: tl.constexpr, ACT: tl.constexpr, KEEP: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                  RC: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """The same for matrices of floats, with the vector in float32."""
    pid, slot = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BK)
    wait_for_previous(PDL)
    expert = tl.load(IDS + slot)
    first, last = expert * N + pid * BN, expert * N + N - 1
    w = load_plain(W, tl.minimum(first + tl.arange(0, RC), last), k, K)
    x = tl.load(X + slot * EACH * K + k, mask=k < K, other=0.0)
    y = walk_plain(W, first, last, w, k, x, K, BN, RC)
    finish_expert(y, pid * BN + tl.arange(0, BN), pid, slot, N, K, eps, expert, BIAS, X_SQUARES, OUT, CODES, SCALES,
                  SUMS, VALUES, ROLE, USED, PARTS, BIASED, ACT, KEEP, BN)  # fmt: skip


def matvec_experts(
    weights: DeviceExperts,
    ids: torch.Tensor,
    x: Activations,
    *,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
    into: Activations | None = None,
    act: str = "silu",
    pdl: int = SERIAL,
    chosen: Tiles | None = None,
    planes: int = 0,
) -> None:
    """Products with the experts `ids` int32 [used]: of one vector, or of `used` vectors that stand side by side in x.

    Into `out` float32 [used, rows]; or `into` becomes the activated gates times what they gate, side by side; the
    matrices are paired then. `norm`, `pdl`, `planes`: as in `matvec`.
    """
    m, used, rows = weights.matrix, ids.numel(), weights.rows
    role = GATED if into is not None else STORE
    t = chosen or products.tiles(replace(m, rows=rows), role)
    spare = x.scales
    common = {
        "ROLE": role, "USED": used, "EACH": int(x.codes.shape[1] != m.cols), "PARTS": norm.parts if norm else 0,
        "BIASED": weights.bias is not None, "ACT": ACTS[act], "KEEP": into is not None and into.keep, "BN": t.bn,
        "RC": t.rc, "PDL": LEADING if pdl else SERIAL, "num_warps": t.warps, "launch_pdl": pdl != SERIAL,
    }  # fmt: skip
    tensors = (
        ids, spare if weights.bias is None else weights.bias, norm.squares if norm else spare,
        spare if out is None else out, *(into or x).arrays, rows, norm.eps if norm else 0.0,
    )  # fmt: skip
    grid = (triton.cdiv(rows, t.bn), used)
    if m.format.kind == PLAIN:
        launch(experts_plain, grid)(m.codes, x.values, *tensors, K=m.cols, BK=t.bg, **common)
    else:
        launch(experts_packed, grid)(
            *m.arrays, m.table, x.codes.view(torch.int32), x.scales, x.sums, *tensors, G=m.groups,
            **constants(m.format), PLANES=planes or _planes(weights, role, used), BG=t.bg, **common,
        )  # fmt: skip


def _planes(weights: DeviceExperts, role: int, used: int) -> int:
    """As `planes_of`; two for the vectors that have the outliers."""
    return 2 if role == STORE or weights.matrix.nbytes // weights.experts * used <= TWO_PLANES_BYTES else 1


@triton.jit
def add_experts_kernel(Y, WEIGHTS, SHARED, GATE, H, NEXT, CODES, SCALES, SUMS, VALUES, SQUARES, N, ADD: tl.constexpr,
                       USED: tl.constexpr, WITH_SHARED: tl.constexpr, WITH_GATE: tl.constexpr, KEEP: tl.constexpr,
                       PDL: tl.constexpr):  # fmt: skip
    """32 elements of the weighted sum of Y: H is these, or where ADD they are added and make the next vector."""
    pid = tl.program_id(0)
    n = pid * 32 + tl.arange(0, 32)
    v = tl.zeros((32,), tl.float32)
    h, following = v, v
    if ADD:  # neither is written by the kernel before this one
        h = tl.load(H + n)
        following = tl.load(NEXT + n)
    wait_for_previous(PDL)
    for j in tl.static_range(USED):
        v += tl.load(WEIGHTS + j) * tl.load(Y + j * N + n)
    if WITH_SHARED:
        beside = tl.load(SHARED + n)
        if WITH_GATE:
            beside = beside / (1.0 + tl.exp(-tl.load(GATE)))
        v += beside
    h += v
    tl.store(H + n, h)
    if ADD:
        tl.store(SQUARES + pid, tl.sum(h * h, 0))
        store_activations(h * following, pid * 32, N, 1, CODES, SCALES, SUMS, VALUES, 1, KEEP)


def add_experts(
    y: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor, into: Activations,
    squares: torch.Tensor, shared: torch.Tensor | None, gate: torch.Tensor | None, pdl: int = SERIAL,
) -> None:  # fmt: skip
    """residual += the sum of y [used, d] by `weights`, and `shared` * sigmoid(`gate`), without what is None; `into`
    becomes residual * next_norm."""
    _add(y, weights, residual, (next_norm, *into.arrays, squares), into.keep, shared, gate, pdl)


def mix_experts(
    y: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, shared: torch.Tensor | None, gate: torch.Tensor | None,
    pdl: int = SERIAL,
) -> None:  # fmt: skip
    """`out` becomes that sum."""
    _add(y, weights, out, (), False, shared, gate, pdl)


def _add(
    y: torch.Tensor, weights: torch.Tensor, h: torch.Tensor, further: tuple[torch.Tensor, ...], keep: bool,
    shared: torch.Tensor | None, gate: torch.Tensor | None, pdl: int,
) -> None:  # fmt: skip
    used, d = y.shape
    launch(add_experts_kernel, (d // GROUP,))(
        y, weights, y if shared is None else shared, y if gate is None else gate, h, *(further or (y,) * 6), d,
        ADD=bool(further), USED=used, WITH_SHARED=shared is not None, WITH_GATE=gate is not None, KEEP=keep,
        PDL=LEADING if pdl else SERIAL, num_warps=1, launch_pdl=pdl != SERIAL,
    )  # fmt: skip
