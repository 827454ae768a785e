"""`attend` on a CPU, and `AttentionLayer`, which says what one layer's attention is on every backend.

All that a layer does with its cache is done here: biases and norms of heads, RoPE, second queries for the rows of
turned entries, rotation into the basis of a quantized cache and back, storing, sealing, and the scores of the mean that
sealed keys lack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvcli.kernels.paged import Angles, PagedKV, Stretch, Watch

Seal = Callable[[PagedKV, int, int], Angles | None]
Spans = tuple[tuple[int, int], ...]  # first position and number of rows of each part of a step


def nothing_to_seal(kv: PagedKV, start: int, end: int) -> None:
    """`AttentionLayer.seal` of a cache without a 16-bit tail."""


class Rope(Protocol):
    """What attention asks of the rotary embedding of a layer (arXiv 2104.09864)."""

    def of(self, spans: Spans) -> Angles:
        """Angles of positions start .. start + n - 1 of each (start, n), one after the other."""

    def inside(self, spans: Spans, shift: np.ndarray) -> Angles:
        """Angles of these rows where they stand earlier inside the cache by `shift`, int64 [sum of n]."""

    def at_positions(self, positions: np.ndarray) -> Angles:
        """Angles of any positions, float64 [n]."""

    def frequencies_on(self, device: torch.device) -> torch.Tensor:
        """Angles of position 1: float64 [rope_dim / 2]."""


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention, without its projections and its cache.

    `scale` multiplies q.k; `softcap` c > 0 replaces a score s by c * tanh(s / c); `window`: the rows that a query sees,
    its own included, 0 = all. `bias` float32 [(heads + kv_heads) * dim_k + kv_heads * dim_v] or None is added to the
    projections. `q_norm`, `k_norm`: weights of an RMS norm over each head, float32 [dim_k], or over all heads together,
    [heads * dim_k], or None; `eps` is added to its mean; `norms_last`: it comes after RoPE. `amplitude`
    multiplies the dims of queries that RoPE turns, and a `temperature` (scale, length, offset) all dims of queries at
    position p by 1 + scale * ln(1 + floor((p + offset) / length)).
    `v_norm`: weights of an RMS norm over each head of values, or None. `keys_as_values`: there are no projections of
    values, which are the keys before norm and RoPE. `stores` False: there are only queries; rows are those of another
    layer. `sinks`: a logit of each head, float32 [heads], that takes part in the softmax and has no value, or None.
    `seal(kv, start, end)` encodes what leaves the 16-bit tail of a cache as its rows [start, end), just stored, come,
    and returns the angles of the mean that sealed keys lack, None where they lack none or there is no RoPE.
    """

    heads: int
    scale: float
    rope: Rope | None = None
    window: int = 0
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0
    norms_last: bool = False
    amplitude: float = 1.0
    temperature: tuple[float, int, int] | None = None
    v_norm: torch.Tensor | None = None
    keys_as_values: bool = False
    stores: bool = True
    sinks: torch.Tensor | None = None
    seal: Seal = nothing_to_seal


class Norms(Protocol):
    """What heads are normed by."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...


class Operations(Norms, Protocol):
    """The operations of the facade that `attend` is written in."""

    def add_(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> None: ...
    def rope_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...
    def rotate_(self, x: torch.Tensor) -> None: ...
    def store(self, k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None: ...
    def store_each(self, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Stretch]) -> None: ...
    def attention(
        self, q: torch.Tensor, kv: PagedKV, start: int, window: int, scale: float, softcap: float,
        angles: Angles | None, turned_q: torch.Tensor | None, sinks: torch.Tensor | None, watch: Watch | None,
    ) -> torch.Tensor: ...  # fmt: skip
    def attention_each(
        self, q: torch.Tensor, parts: Sequence[Stretch], window: int, scale: float, softcap: float,
        angles: Sequence[Angles | None], turned_q: torch.Tensor | None, sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...  # fmt: skip


def store_each(ops: Operations, k: torch.Tensor, v: torch.Tensor, parts: Sequence[Stretch]) -> None:
    """`store` the rows of each part: k [T, kv_heads, dim_k], v [T, kv_heads, dim_v] of all."""
    for part in parts:
        ops.store(k[part.lo : part.hi], v[part.lo : part.hi], part.kv, part.start)


def attention_each(
    ops: Operations,
    q: torch.Tensor,
    parts: Sequence[Stretch],
    window: int,
    scale: float,
    softcap: float,
    angles: Sequence[Angles | None],
    turned_q: torch.Tensor | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """`attention` of each part over its own pages: q, turned_q [T, heads, dim_q] of all -> [T, heads * dim_v].

    `angles`: of each part.
    """
    found = []
    for part, mean in zip(parts, angles, strict=True):
        rows = slice(part.lo, part.hi)
        second = None if turned_q is None else turned_q[rows]
        how = window, scale, softcap, mean, second, sinks, part.watch
        found.append(ops.attention(q[rows], part.kv, part.start, *how))
    return torch.cat(found)


def attend(ops: Operations, qkv: torch.Tensor, parts: Sequence[Stretch], layer: AttentionLayer) -> torch.Tensor:
    """Store the T rows of a step, each part's in the pages of its sequence, and attend to all that they see there.

    qkv float32 [T, heads * dim_q + kv_heads * (dim_k + dim_v)], or without what the layer has no projections of,
    changed -> float32 [T, heads * dim_v]. In records whose values are parts of keys (`RecordLayout.joined`) RoPE and
    norms of keys are of the other part, which queries have first, and each head's key stands beside its value.
    """
    kv = parts[0].kv  # all are of one form
    t, r, spans = qkv.shape[0], kv.record, tuple([part.span for part in parts])
    angles = None if layer.rope is None else layer.rope.of(spans)
    if layer.bias is not None:
        ops.add_(qkv, layer.bias)
    n_q = layer.heads * r.dim_q
    if layer.stores:
        _store(ops, qkv, n_q, parts, layer, angles)
    q, turned_q = qkv[:, :n_q].view(t, layer.heads, r.dim_q), None  # rows of a wider matrix
    note_queries(ops, q, parts, layer)
    if (inside := _angles_inside(parts, spans, layer.rope)) is not None:
        turned_q = _queries(ops, q.clone(memory_format=torch.contiguous_format), kv, layer, spans, inside)
    q = _queries(ops, q, kv, layer, spans, angles)
    means = [layer.seal(part.kv, part.start, part.start + part.hi - part.lo) for part in parts]
    out = ops.attention_each(q, parts, layer.window, layer.scale, layer.softcap, means, turned_q, layer.sinks)
    if kv.rotated[1]:
        ops.rotate_(out.view(t, layer.heads, r.dim_v))
    return out


class HeadOperations(Protocol):
    """The operations of the facade that `attend_latents` is written in."""

    def by_head(self, x: torch.Tensor, weights: Any) -> torch.Tensor: ...
    def attend(self, qkv: torch.Tensor, parts: Any, layer: AttentionLayer) -> torch.Tensor: ...


def attend_latents(
    ops: HeadOperations, turned: torch.Tensor, others: torch.Tensor, row: torch.Tensor, parts: Sequence[Any],
    layer: AttentionLayer, keys: Any, values: Any,
) -> torch.Tensor:  # fmt: skip
    """`attend` over latents, which are keys and values of all heads by their matrices: queries `turned`
    [T, heads, dim_k], which RoPE turns, and `others` [T, heads, plain]; `row` [T, dim_k + dim_v] -> what heads give,
    float32 [T, heads * n].

    Queries become queries of latents by `keys`, and what heads find becomes values by `values` ("absorbed").
    """
    asked = torch.cat((turned, ops.by_head(others, keys)), 2).flatten(1)
    found = ops.attend(torch.cat((asked, row), 1), parts, layer)
    return ops.by_head(found.unflatten(1, (layer.heads, -1)), values).flatten(1)


def _store(
    ops: Operations,
    qkv: torch.Tensor,
    lo: int,
    parts: Sequence[Stretch],
    layer: AttentionLayer,
    angles: Angles | None,
) -> None:
    """Store the rows of a step from their projections, whose columns from `lo` on are keys and values."""
    r, (rotated_k, rotated_v) = parts[0].kv.record, parts[0].kv.rotated
    hi = lo + r.kv_heads * r.dim_k
    if r.joined:
        k, v = (x.contiguous() for x in qkv[:, lo:].view(-1, r.kv_heads, r.dim_q).split([r.dim_k, r.dim_v], 2))
    else:
        k = qkv[:, lo:hi].view(-1, r.kv_heads, r.dim_k)
        v = k.clone() if layer.keys_as_values else qkv[:, hi:].view(-1, r.kv_heads, r.dim_v)
    k = _turned(ops, k, layer.k_norm, layer, angles)
    if layer.v_norm is not None:
        v = _normed(ops, v, layer.v_norm, layer.eps)
    if rotated_k:
        ops.rotate_(k)
    if rotated_v:
        ops.rotate_(v)
    ops.store_each(k, v, parts)


def _queries(
    ops: Operations, q: torch.Tensor, kv: PagedKV, layer: AttentionLayer, spans: Spans, angles: Angles | None
) -> torch.Tensor:
    """Queries as scores are made of them, from projections [T, heads, dim_q], which are changed."""
    q = _turned(ops, q, layer.q_norm, layer, angles)
    amplify(q, spans, layer)
    if kv.rotated[0]:
        ops.rotate_(q)
    if kv.record.joined and kv.rotated[1]:
        latents = q[..., kv.record.dim_k :].clone(memory_format=torch.contiguous_format)
        ops.rotate_(latents)
        q[..., kv.record.dim_k :] = latents
    return q


def note_queries(ops: Norms, q: torch.Tensor, parts: Sequence[Stretch], layer: AttentionLayer) -> None:
    """Add queries before RoPE to the sums of the parts that want them; q [T, heads, dim_k]: projections with their
    biases."""
    for part in parts:
        if part.watch is None or part.watch.queries is None:
            continue
        rows = q[part.lo + max(0, part.watch.since - part.start) : part.hi]
        if len(rows):
            if layer.q_norm is not None and not layer.norms_last:
                rows = _normed(ops, rows.contiguous(), layer.q_norm, layer.eps)
            part.watch.queries.add(rows)


def amplify(q: torch.Tensor, spans: Spans, layer: AttentionLayer) -> None:
    """Multiply queries [T, heads, dim_k] by what grows with their position, and by the amplitude."""
    if layer.amplitude != 1 and layer.rope is not None:
        q[..., : 2 * layer.rope.frequencies_on(q.device).numel()] *= layer.amplitude
    if layer.temperature is not None:
        scale, length, offset = layer.temperature
        positions = np.concatenate([np.arange(start, start + n) for start, n in spans])
        factors = 1 + scale * np.log1p((positions + offset) // length)
        q *= torch.from_numpy(factors.astype(np.float32))[:, None, None]


def _turned(
    ops: Operations, x: torch.Tensor, norm: torch.Tensor | None, layer: AttentionLayer, angles: Angles | None
) -> torch.Tensor:
    """Queries or keys x [T, heads, dim_k], which are changed, with their norm and RoPE, in the layer's order."""
    if norm is not None and not layer.norms_last:
        x = _normed(ops, x, norm, layer.eps)
    if angles is not None:
        ops.rope_(x, *angles)
    if norm is not None and layer.norms_last:
        x = _normed(ops, x, norm, layer.eps)
    return x


def _normed(ops: Norms, x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, heads, dim], each head or all of a token together."""
    return ops.rms_norm(x if norm.numel() == x.shape[-1] else x.flatten(1), norm, eps).view(x.shape)


def _angles_inside(parts: Sequence[Stretch], spans: Spans, rope: Rope | None) -> Angles | None:
    """RoPE of queries for the rows of turned entries, at the positions that they have inside the cache (StreamingLLM,
    arXiv 2309.17453). None where the ordinary queries will do."""
    if rope is None or all(part.shift is None for part in parts):
        return None
    shift = [np.zeros(part.hi - part.lo, np.int64) if part.shift is None else part.shift for part in parts]
    return rope.inside(spans, np.concatenate(shift))
