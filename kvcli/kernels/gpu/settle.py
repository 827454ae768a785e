"""One token between two products, where the norm before the second cannot be folded into them (see matvec.py): a sum
with the residual stream and any norm; an activation with a bias; norms over all heads."""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvcli.kernels.gpu.formats import GROUP
from kvcli.kernels.gpu.language import SERIAL, store_activations, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.products import Activations

ACTS = {"silu": 0, "gelu": 1, "relu2": 2}
NO_NORM, RMS_NORM, LAYER_NORM, UNCHANGED = 0, 1, 2, 3  # what becomes of the next product's vector


@dataclass(frozen=True)
class NextNorm:
    """The norm of a residual stream on its way to the next product: `kind` as above; UNCHANGED leaves the vector."""

    kind: int
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@triton.jit
def _normed(v, i, K: tl.constexpr, eps, WEIGHT, BIAS, CENTRED: tl.constexpr, BIASED: tl.constexpr):
    if CENTRED:
        v = tl.where(i < K, v - tl.sum(v, 0) / K, 0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / K + eps) * tl.load(WEIGHT + i, mask=i < K, other=0.0)
    if BIASED:
        v += tl.load(BIAS + i, mask=i < K, other=0.0)
    return v


@triton.jit
def settle_kernel(Y, H, BIAS, POST, NEXT, NEXT_BIAS, CODES, SCALES, SUMS, VALUES, eps, scale, K: tl.constexpr,
                  PAD: tl.constexpr, FIRST: tl.constexpr, BIASED: tl.constexpr, POSTED: tl.constexpr,
                  NEXT_BIASED: tl.constexpr, NEXT_NORM: tl.constexpr, KEEP: tl.constexpr,
                  PDL: tl.constexpr):  # fmt: skip
    """One program, the whole vector: H = Y where FIRST, else H += scale * norm(Y + bias); then the next one."""
    wait_for_previous(PDL)
    i = tl.arange(0, PAD)
    v = tl.load(Y + i, mask=i < K, other=0.0)
    if BIASED:
        v += tl.load(BIAS + i, mask=i < K, other=0.0)
    if POSTED:
        v = _normed(v, i, K, eps, POST, POST, False, False)
    if not FIRST:
        v = tl.load(H + i, mask=i < K, other=0.0) + v * scale
    tl.store(H + i, v, mask=i < K)
    if NEXT_NORM != 3:
        if NEXT_NORM != 0:
            v = _normed(v, i, K, eps, NEXT, NEXT_BIAS, NEXT_NORM == 2, NEXT_BIASED)
        store_activations(v, 0, K, K // 32, CODES, SCALES, SUMS, VALUES, PAD // 32, KEEP)


def settle(
    y: torch.Tensor,
    residual: torch.Tensor,
    following: NextNorm,
    into: Activations,
    eps: float,
    *,
    bias: torch.Tensor | None = None,
    post: torch.Tensor | None = None,
    scale: float = 1.0,
    first: bool = False,
    pdl: int = SERIAL,
) -> None:
    """residual = y where it is the `first`, else residual += scale * post norm of (y + bias); `into` becomes the next
    product's vector. float32 [K], K a multiple of 32."""
    k = y.shape[-1]
    pad = max(GROUP, triton.next_power_of_2(k))
    spare = (y if x is None else x for x in (bias, post, following.weight, following.bias))
    launch(settle_kernel, (1,))(
        y, residual, *spare, *into.arrays, eps, scale, K=k, PAD=pad, FIRST=first, BIASED=bias is not None,
        POSTED=post is not None, NEXT_BIASED=following.bias is not None, NEXT_NORM=following.kind,
        KEEP=into.keep, PDL=pdl, num_warps=max(1, min(16, pad // 256)), launch_pdl=pdl != SERIAL,
    )  # fmt: skip


@triton.jit
def activate_kernel(Y, BIAS, CODES, SCALES, SUMS, VALUES, N, GATED: tl.constexpr, RUN: tl.constexpr, ACT: tl.constexpr,
                    BIASED: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """32 elements of the activated vector; gates and what they gate alternate in runs of RUN."""
    wait_for_previous(PDL)
    first = tl.program_id(0) * 32
    i = first + tl.arange(0, 32)
    at = i
    if GATED:
        at = i // RUN * (2 * RUN) + i % RUN
    x = tl.load(Y + at)
    if BIASED:
        x += tl.load(BIAS + i)
    if ACT == 2:
        x = tl.maximum(x, 0.0)
        x = x * x
    else:
        inner = x  # of the sigmoid; see `pointwise.activate`
        if ACT == 1:
            inner = (x + x * x * x * 0.044715) * 1.5957691216057308
        x = x / (1.0 + tl.exp(-inner))
    if GATED:
        up = tl.load(Y + at + RUN)
        if BIASED:
            up += tl.load(BIAS + N + i)
        x = x * up
    store_activations(x, first, N, 1, CODES, SCALES, SUMS, VALUES, 1, KEEP)


def activate(
    y: torch.Tensor, bias: torch.Tensor | None, act: str, run: int, into: Activations, pdl: int = SERIAL
) -> None:
    """y float32 [n], or with `run` > 0 [2 n]: gates and what they gate, in runs of so many -> the activated vector [n].

    `bias` [n], or [2 n]: of all gates, then of what they gate. n is a multiple of 32.
    """
    n = y.shape[-1] // (2 if run else 1)
    launch(activate_kernel, (n // GROUP,))(
        y, y if bias is None else bias, *into.arrays, n, GATED=run > 0, RUN=run or 1, ACT=ACTS[act],
        BIASED=bias is not None, KEEP=into.keep, PDL=pdl, num_warps=1, launch_pdl=pdl != SERIAL,
    )  # fmt: skip


@triton.jit
def _norm_heads(qkv, q_norm, k_norm, eps, WIDTH, N_Q, N_K, PAD: tl.constexpr):
    """All queries (program 0) or keys (1) of a row, in place."""
    row = qkv + tl.program_id(0).to(tl.int64) * WIDTH
    i = tl.arange(0, PAD)
    at, weight, n = row, q_norm, N_Q
    if tl.program_id(1) == 1:
        at, weight, n = row + N_Q, k_norm, N_K
    v = tl.load(at + i, mask=i < n, other=0.0)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / n + eps) * tl.load(weight + i, mask=i < n, other=0.0)
    tl.store(at + i, v, mask=i < n)


def norm_heads_together(qkv: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float) -> None:
    """RMS norms over all heads of q and of k, in place: qkv float32 [T, n_q + n_k + ...], weights [n_q], [n_k]."""
    n_q, n_k = q_norm.numel(), k_norm.numel()
    pad = triton.next_power_of_2(max(n_q, n_k))
    launch(_norm_heads, (qkv.shape[0], 2))(
        qkv, q_norm, k_norm, eps, qkv.shape[1], n_q, n_k, pad, num_warps=max(1, min(16, pad // 512))
    )
