"""Experts on a GPU: which of them rows have, products of many rows, and weighted sums.

Rows are sorted by expert on the device. A program of a grouped product has some rows of one expert's matrix and a tile
of the rows of x that have this expert; weights are decoded on their way to the tensor cores. The grid has as many tiles
as there can be, so that the host need not know how many there are. One token's products: expertvec.py.
"""

# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvcli.errors import ModelError
from kvcli.kernels.gpu.formats import GROUP, PLAIN, DeviceMatrix, constants, repack
from kvcli.kernels.gpu.language import SERIAL, fence_copies, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.wide import COLUMNS, HalfRows, weave
from kvcli.kernels.gpu.woven import woven_dot
from kvcli.kernels.reference.experts import LEAST_SUM, ExpertMatrices
from kvcli.kernels.reference.matmul import QuantTensor
from kvcli.routing import GATINGS, Routing

ROWS = 64  # of a matrix that a program has
STEP = 4  # groups of columns at a time
TILES = (16, 32, 64, 128)  # rows of x that a program has; with as many stages as fit into 99 KiB of shared memory
_LEAST_SUM = tl.constexpr(LEAST_SUM)


@dataclass(frozen=True)
class DeviceExperts:
    """Matrices [rows, cols] of experts, one behind the other; `bias` float32 [experts, rows], in their order, is added
    to products."""

    matrix: DeviceMatrix
    experts: int
    bias: torch.Tensor | None

    @property
    def rows(self) -> int:
        return self.matrix.rows // self.experts

    @property
    def woven(self) -> bool:
        """Whether they are multiplied with woven rows."""
        return self.matrix.format.kind != PLAIN


def place_experts(weights: ExpertMatrices, device: torch.device, paired: bool) -> DeviceExperts:
    """Repack on the device; `paired`: as in `DeviceMatrix`, where rows allow it. Raises ModelError for matrices of
    different types."""
    parts, bias = weights.parts, weights.bias
    if len(kinds := {w.type for w in parts}) > 1:
        raise ModelError(f"gates of experts and what they gate are stored as {' and '.join(kinds)}", "use `device=cpu`")
    paired = paired and parts[0].rows % GROUP == 0
    if paired or len(parts) == 1:
        stacked = tuple(QuantTensor(w.type, w.stacked, w.cols) for w in parts)
    else:
        stacked = tuple(w.of(e) for e in range(weights.experts) for w in parts)
    if bias is not None and paired:
        bias = bias.unflatten(1, (2, -1, GROUP)).transpose(1, 2).flatten(1)
    return DeviceExperts(
        repack(stacked, device, paired), weights.experts, None if bias is None else bias.to(device).contiguous()
    )


@triton.jit
def best_of(x, i):
    """The place of the largest x, the first of equals, and what x is without it."""
    at = tl.argmax(x, 0)
    return at, tl.where(i == at, -float("inf"), x)


@triton.jit
def only_best_groups(choice, e, E: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr, BEST: tl.constexpr):
    """-inf for all experts but those of the USED groups whose best ones, two or one, have the highest sum."""
    SIZE: tl.constexpr = E // GROUPS
    g = tl.arange(0, triton.next_power_of_2(GROUPS))
    sums = tl.where(g < GROUPS, 0.0, -float("inf"))
    for group in tl.static_range(GROUPS):
        _, rest = best_of(tl.where(e // SIZE == group, choice, -float("inf")), e)
        two = tl.max(tl.where(e // SIZE == group, choice, -float("inf")), 0)
        if SIZE > 1 and BEST > 1:
            two += tl.max(rest, 0)
        sums = tl.where(g == group, two, sums)
    kept = e < 0
    for _i in tl.static_range(USED):
        group, sums = best_of(sums, g)
        kept = kept | (e // SIZE == group)
    return tl.where(kept, choice, -float("inf"))


@triton.jit
def route_kernel(LOGITS, ADD, CHOICE, IDS, WEIGHTS, scale, E: tl.constexpr, PAD: tl.constexpr, USED: tl.constexpr,
                 SLOTS: tl.constexpr, GATING: tl.constexpr, NORMED: tl.constexpr, GROUPS: tl.constexpr,
                 GROUPS_USED: tl.constexpr, BEST: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr,
                 PDL: tl.constexpr):  # fmt: skip
    """One row: as `route` of reference/experts.py, with ADD added to the logits."""
    row = tl.program_id(0)
    e, slot = tl.arange(0, PAD), tl.arange(0, SLOTS)
    added, bias = 0.0, 0.0
    if ADDED:
        added = tl.load(ADD + e, mask=e < E, other=0.0)
    if BIASED:
        bias = tl.load(CHOICE + e, mask=e < E, other=0.0)
    wait_for_previous(PDL)
    score = tl.load(LOGITS + row * E + e, mask=e < E, other=-float("inf")) + added
    if GATING == 0:
        score = tl.exp(score - tl.max(score, 0))
        score = score / tl.sum(score, 0)
    elif GATING == 1:
        score = 1.0 / (1.0 + tl.exp(-score))
    choice = tl.where(e < E, score + bias, -float("inf"))
    if GROUPS > 1:
        choice = only_best_groups(choice, e, E, GROUPS, GROUPS_USED, BEST)
    ids = tl.zeros((SLOTS,), tl.int32)
    w = tl.full((SLOTS,), -float("inf") if GATING == 2 else 0.0, tl.float32)
    for i in range(USED):
        at, choice = best_of(choice, e)
        ids = tl.where(slot == i, tl.minimum(at, E - 1), ids)  # scores that are no numbers have any place
        w = tl.where(slot == i, tl.sum(tl.where(e == at, score, 0.0), 0), w)
    if GATING == 2:
        w = tl.exp(w - tl.max(w, 0))
    if NORMED or GATING == 2:
        w = w / tl.maximum(tl.sum(w, 0), _LEAST_SUM)
    tl.store(IDS + row * USED + slot, ids, mask=slot < USED)
    tl.store(WEIGHTS + row * USED + slot, w * scale, mask=slot < USED)


def route(
    logits: torch.Tensor, routing: Routing, add: torch.Tensor | None, choice: torch.Tensor | None, ids: torch.Tensor,
    weights: torch.Tensor, pdl: int = SERIAL,
) -> None:  # fmt: skip
    """Fill `ids` int32 and `weights` float32, [T, used] each, from logits [T, experts] + `add`; see the reference."""
    r = routing
    launch(route_kernel, (ids.numel() // r.used,))(
        logits, logits if add is None else add, logits if choice is None else choice, ids, weights, r.scale,
        E=r.experts, PAD=triton.next_power_of_2(r.experts), USED=r.used, SLOTS=triton.next_power_of_2(r.used),
        GATING=GATINGS.index(r.gating), NORMED=r.normed, GROUPS=r.groups, GROUPS_USED=r.groups_used, BEST=r.best,
        ADDED=add is not None, BIASED=choice is not None, PDL=pdl, num_warps=4 if r.experts > 128 else 1,
        launch_pdl=pdl != SERIAL,
    )  # fmt: skip


class Grouping(NamedTuple):
    """Pairs of a row and an expert, sorted by expert; int32 tensors of the device.

    `order` [pairs]; those of expert e are order[starts[e]] up to starts[e + 1], and their tiles, of `tile` pairs,
    ends[e - 1] up to ends[e]. `most`: tiles that there can be.
    """

    order: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    tile: int
    most: int

    @classmethod
    def of(cls, ids: torch.Tensor, experts: int) -> Grouping:
        """Of ids int32 [T, used]; the host does not wait for the device."""
        values, order = ids.flatten().sort(stable=True)
        edges = torch.arange(experts + 1, dtype=torch.int32, device=ids.device)
        starts = torch.searchsorted(values, edges, out_int32=True)
        pairs = ids.numel()
        tile = next((t for t in TILES if pairs <= t * experts), TILES[-1])
        ends = ((starts.diff() + (tile - 1)) // tile).cumsum(0, dtype=torch.int32)
        return cls(order.int(), starts, ends, tile, min(pairs, pairs // tile + experts))


@triton.jit
def plain_dot(X, W, row, x_row, there, K: tl.constexpr, N: tl.constexpr, T: tl.constexpr, STEP: tl.constexpr,
              STAGES: tl.constexpr):  # fmt: skip
    """As `woven_dot`, of a matrix of floats [*, K] and rows that are not woven."""
    k = tl.arange(0, 32 * STEP)
    acc = tl.zeros((N, T), tl.float32)
    for first in tl.range(0, K, 32 * STEP, num_stages=STAGES):
        w = tl.load(W + row[:, None] * K + (first + k)[None, :], mask=(first + k < K)[None, :], other=0.0)
        here = there[:, None] & (first + k < K)[None, :]
        x = tl.load(X + x_row[:, None] * K + (first + k)[None, :], mask=here, other=0.0)
        fence_copies(N)
        acc = tl.dot(w.to(tl.float16), tl.trans(x), acc)
    return acc


@triton.jit
def grouped_kernel(X, X_SCALES, CODES, HIGH, SCALES, SUPERS, TABLE, BIAS, ORDER, STARTS, ENDS, OUT, rows,
                   EACH: tl.constexpr, EXPERTS: tl.constexpr, K: tl.constexpr, CODING: tl.constexpr,
                   WORDS: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr, SPAN: tl.constexpr,
                   UNIT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
                   STEP: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """N rows of an expert's matrix times a tile of the pairs that have it, into OUT [pairs, rows]."""
    tile = tl.program_id(1)
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    ends = tl.load(ENDS + e, mask=e < EXPERTS, other=2147483647)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.max(tl.where(ends <= tile, ends, 0), 0)
        first = tl.load(STARTS + expert) + (tile - before) * T
        t = first + tl.arange(0, T)
        there = t < tl.load(STARTS + expert + 1)
        pair = tl.load(ORDER + t, mask=there, other=0).to(tl.int64)
        n = tl.program_id(0) * N + tl.arange(0, N)
        row = expert.to(tl.int64) * rows + tl.minimum(n, rows - 1)
        x_row = pair // EACH
        if KIND == 0:
            y = plain_dot(X, CODES, row, x_row, there, K, N, T, STEP, STAGES)
        else:
            y = woven_dot(X, X_SCALES, CODES, HIGH, SCALES, SUPERS, TABLE, row, x_row, there, 0, tl.cdiv(K, 128),
                          K // 32, CODING, WORDS, KIND, OFFSET, SPAN, UNIT, N, T, 1, STAGES, False)  # fmt: skip
        if SCALED:
            y *= tl.load(X_SCALES + x_row, mask=there, other=0.0)[None, :]
        if BIASED:
            y += tl.load(BIAS + row)[:, None]
        tl.store(OUT + pair[None, :] * rows + n[:, None], y, mask=(n < rows)[:, None] & there[None, :])


def grouped_product(x: HalfRows, weights: DeviceExperts, grouping: Grouping) -> torch.Tensor:
    """Rows times the matrices of their experts, with the bias: x [T or pairs, cols] -> float32 [pairs, rows].

    Weights and their scales are rounded to float16, sums are float32.
    """
    m, pairs = weights.matrix, grouping.order.numel()
    arrays = *m.arrays, m.codes if m.format.kind == PLAIN else m.table
    x, out = weave(x, m.cols, weights.woven), torch.empty(pairs, weights.rows, device=x.values.device)
    launch(grouped_kernel, (triton.cdiv(weights.rows, ROWS), grouping.most))(
        x.values, x.values if x.scales is None else x.scales, *arrays, out if weights.bias is None else weights.bias,
        grouping.order, grouping.starts, grouping.ends, out, weights.rows, EACH=pairs // x.values.shape[0],
        EXPERTS=weights.experts, K=m.cols, **constants(m.format), SCALED=x.scales is not None,
        BIASED=weights.bias is not None, N=ROWS, T=grouping.tile, STEP=STEP, num_warps=4,
        STAGES=2 if m.format.kind == PLAIN or grouping.tile == TILES[-1] else 3,
    )  # fmt: skip
    return out


@triton.jit
def mix_kernel(Y, WEIGHTS, OUT, d, USED: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    v = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(USED):
        y = tl.load(Y + (row * USED + j) * d + i, mask=i < d, other=0.0)
        v += tl.load(WEIGHTS + row * USED + j) * y
    tl.store(OUT + row * d + i, v, mask=i < d)


def mix(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums, in order: y [T * n, D], weights [T, n] -> [T, D]."""
    (t, n), d = weights.shape, y.shape[1]
    out = torch.empty(t, d, device=y.device)
    launch(mix_kernel, (t, triton.cdiv(d, COLUMNS)))(y, weights, out, d, USED=n, COLUMNS=COLUMNS, num_warps=4)
    return out
