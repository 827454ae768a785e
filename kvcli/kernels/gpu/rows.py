"""`prepare`: from the projections of a step to queries that attention wants, and rows in their pages.

Per head and token: the bias, the RMS norm of the head, RoPE, the Hadamard rotation (kernels/reference/rotation.py), and
then: a query is scaled and kept as float16, a key or a value is written to its page. The position is read on the
device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from kvcli.kernels.attend import AttentionLayer
from kvcli.kernels.gpu.language import SERIAL, summed, wait_for_previous
from kvcli.kernels.gpu.launching import launch
from kvcli.kernels.gpu.pages import DevicePages, padded
from kvcli.kernels.gpu.settle import norm_heads_together
from kvcli.kernels.gpu.tiles import LARGEST_HALF, launch_options
from kvcli.kernels.gpu.wide import rms_norm
from kvcli.kernels.reference.rotation import block

LOG2_E = 1.4426950408889634
TWO_PI = tl.constexpr(6.283185307179586)


@dataclass(frozen=True)
class Queries:
    """Queries of T tokens, scaled so that scores are exponents of 2.

    `q` float16 [T, heads, dim_k], in the basis of the cached keys. Where keys are centred: `qc` float16
    [T, heads, rope_dim] and `qb` float32 [T, heads], such that qc . (cos | sin) + qb is the score of the mean under
    the rotation by those angles.

    Where `PageLists.turns`, T more rows follow: the same queries turned back by their shifts, for entries that want
    those.
    """

    q: torch.Tensor
    qc: torch.Tensor
    qb: torch.Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, dim_k: int, rope_dim: int, device: torch.device | str) -> Queries:
        """Buffers. `rope_dim` may be 0."""
        return cls(
            torch.empty(rows, heads, dim_k, dtype=torch.float16, device=device),
            torch.empty(rows, heads, rope_dim, dtype=torch.float16, device=device),
            torch.empty(rows, heads, device=device),
        )


@triton.jit
def hadamard(x, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """x float32 [PAD] with each run of BLOCK elements rotated; the additions are those of `rotation.rotate`."""
    i = tl.arange(0, PAD)
    for step in tl.static_range(9):
        if (1 << step) < BLOCK:
            other = tl.gather(x, i ^ (1 << step), 0)
            x = tl.where((i & (1 << step)) == 0, x + other, other - x)
    return x * (1.0 / BLOCK) ** 0.5


@triton.jit
def turning(position, frequencies, ROPE: tl.constexpr, PAD: tl.constexpr):
    """What RoPE multiplies an element and its partner (half a rope_dim away) by: float32 [PAD] each."""
    i = tl.arange(0, PAD)
    half: tl.constexpr = ROPE // 2
    f = tl.load(frequencies + tl.where(i < half, i, i - half), mask=i < ROPE, other=0.0)
    angle = position.to(tl.float64) * f
    angle -= tl.floor(angle * (1.0 / TWO_PI) + 0.5) * TWO_PI
    a = angle.to(tl.float32)
    return tl.cos(a), tl.where(i < half, -tl.sin(a), tl.sin(a))


@triton.jit
def head_of(x_at, bias, norm, c, s, eps, DIM: tl.constexpr, PAD: tl.constexpr, ROPE: tl.constexpr,
          BIASED: tl.constexpr, NORMED: tl.constexpr, LAST: tl.constexpr, apart=0,
          PARTS: tl.constexpr = 1):  # fmt: skip
    """One head, summed over its parts, with its bias, normed and turned, or turned and normed (LAST): float32 [PAD],
    and for each element below ROPE the one that it is paired with."""
    i = tl.arange(0, PAD)
    x = summed(x_at, i, i < DIM, apart, PARTS)
    if BIASED:
        x += tl.load(bias + i, mask=i < DIM, other=0.0)
    half: tl.constexpr = ROPE // 2
    j = tl.where(i < half, i + half, i - half)
    partner = x
    if ROPE > 0:
        partner = summed(x_at, j, i < ROPE, apart, PARTS)
        if BIASED:
            partner += tl.load(bias + j, mask=i < ROPE, other=0.0)
    if NORMED and not LAST:
        r = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x = x * r * tl.load(norm + i, mask=i < DIM, other=0.0)
        if ROPE > 0:
            partner = partner * r * tl.load(norm + j, mask=i < ROPE, other=0.0)
    turned = x
    if ROPE > 0:
        turned = x * c + partner * s
        partner = partner * c - x * s
    if NORMED and LAST:
        r = tl.rsqrt(tl.sum(turned * turned, 0) / DIM + eps)
        turned = turned * r * tl.load(norm + i, mask=i < DIM, other=0.0)
        if ROPE > 0:
            partner = partner * r * tl.load(norm + j, mask=i < ROPE, other=0.0)
    return turned, partner


@triton.jit
def query_gain(position, growth, length, past):
    """What queries at a position are multiplied by; see `attend.AttentionLayer`."""
    return 1.0 + growth * tl.log(1.0 + ((position + past) // length).to(tl.float32))


@triton.jit
def store_row(at, x, DIM: tl.constexpr, PAD: tl.constexpr, CODEC: tl.constexpr):
    """x float32 [PAD] as a row of f16, bf16 or f32 at that address."""
    i = tl.arange(0, PAD)
    if CODEC.mantissa == 10:
        half = tl.clamp(x, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
        tl.store(tl.multiple_of(at.to(tl.pointer_type(tl.float16)), 16) + i, half, mask=i < DIM)
    elif CODEC.mantissa == 7:  # in integers: to nearest, ties to even
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(tl.multiple_of(at.to(tl.pointer_type(tl.uint16)), 16) + i, bits.to(tl.uint16), mask=i < DIM)
    else:
        tl.store(tl.multiple_of(at.to(tl.pointer_type(tl.float32)), 16) + i, x, mask=i < DIM)


@triton.jit
def row_and_page(t, position, into, SIZE: tl.constexpr, APART: tl.constexpr):
    """The position of row t of a step, and the word of the page that it goes into: no kernel of the step writes them.

    APART: see `PageLists`."""
    if APART:
        return tl.load(position + t), tl.load(into + t)
    else:
        start = tl.load(position)
        at = start + t
        return at, tl.load(into + (at // SIZE - start // SIZE))


@triton.jit
def prepare_head(
    t, rows, head, at, page, qkv, shift, frequencies, bias, q_norm, k_norm, centre, q, qc, qb, eps, factor, amplitude,
    growth, length, past,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, RECORD: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, TURN_K: tl.constexpr,
    TURN_V: tl.constexpr, BIASED: tl.constexpr, Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr, CENTRED: tl.constexpr,
    LAST: tl.constexpr, GAIN: tl.constexpr, TURNS: tl.constexpr, APART: tl.constexpr, STORES: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """Row t of a step of `rows`, at a position and of a page at these, and a head: what one program of `prepare`
    does. qkv: PARTS of all rows, to be summed."""
    WIDTH: tl.constexpr = (HEADS + KV_HEADS) * DIM_K + KV_HEADS * DIM_V if STORES else HEADS * DIM_K
    i = tl.arange(0, PAD_K)
    place = at % SIZE
    inside = at
    to = t
    if TURNS:
        FIRST: tl.constexpr = HEADS + 2 * KV_HEADS if STORES else HEADS
        if head >= FIRST:
            inside = at - tl.load(shift + t)
            to = t + rows
            head -= FIRST
    c, s = 0.0, 0.0
    if ROPE > 0:
        c, s = turning(inside, frequencies, ROPE, PAD_K)
    half: tl.constexpr = ROPE // 2
    own, other = 0.0, 0.0
    if CENTRED:
        mean = centre + (tl.minimum(head, HEADS - 1) // (HEADS // KV_HEADS)) * DIM_K  # keys and values do without
        if APART:
            mean += t * (KV_HEADS * DIM_K)
        own = tl.load(mean + i, mask=i < DIM_K, other=0.0)
        if ROPE > 0:
            other = tl.load(mean + tl.where(i < half, i + half, i - half), mask=i < ROPE, other=0.0)
    wait_for_previous(PDL)
    if head < HEADS:
        x, partner = head_of(
            qkv + t * WIDTH + head * DIM_K, bias + head * DIM_K, q_norm, c, s, eps, DIM_K, PAD_K, ROPE, BIASED,
            Q_NORMED, LAST, rows * WIDTH, PARTS,
        )  # fmt: skip
        if GAIN:
            gain = query_gain(at, growth, length, past)
            x *= tl.where(i < ROPE, gain * amplitude, gain)
            partner *= gain * amplitude
        if CENTRED:
            if ROPE > 0:
                term = tl.where(i < half, x * own + partner * other, x * other - partner * own) * factor
                half_c = tl.clamp(term, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
                tl.store(qc + (to * HEADS + head) * ROPE + i, half_c, mask=i < ROPE)
            tl.store(qb + to * HEADS + head, tl.sum(tl.where(i < ROPE, 0.0, x * own), 0) * factor)
        if TURN_K > 0:
            x = hadamard(x, PAD_K, TURN_K)
        half_x = tl.clamp(x * factor, -LARGEST_HALF, LARGEST_HALF).to(tl.float16)
        tl.store(q + (to * HEADS + head) * DIM_K + i, half_x, mask=i < DIM_K)
    else:
        if head < HEADS + KV_HEADS:
            key, _ = head_of(
                qkv + t * WIDTH + head * DIM_K, bias + head * DIM_K, k_norm, c, s, eps, DIM_K, PAD_K, ROPE, BIASED,
                K_NORMED, LAST, rows * WIDTH, PARTS,
            )  # fmt: skip
            if TURN_K > 0:
                key = hadamard(key, PAD_K, TURN_K)
            store_row(page + (head - HEADS) * RECORD + place * K_ROW, key, DIM_K, PAD_K, CODEC_K)
        else:
            h = head - HEADS - KV_HEADS
            j = tl.arange(0, PAD_V)
            first_v = (HEADS + KV_HEADS) * DIM_K + h * DIM_V
            value = summed(qkv + t * WIDTH, first_v + j, j < DIM_V, rows * WIDTH, PARTS)
            if BIASED:
                value += tl.load(bias + first_v + j, mask=j < DIM_V, other=0.0)
            if TURN_V > 0:
                value = hadamard(value, PAD_V, TURN_V)
            store_row(page + h * RECORD + V_OFFSET + place * V_ROW, value, DIM_V, PAD_V, CODEC_V)


@triton.jit(do_not_specialize=["offset", "length", "past"])
def _prepare(
    position, into, offset,
    qkv, shift, frequencies, bias, q_norm, k_norm, centre, q, qc, qb, eps, factor, amplitude, growth, length, past,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM_K: tl.constexpr, PAD_K: tl.constexpr, DIM_V: tl.constexpr,
    PAD_V: tl.constexpr, ROPE: tl.constexpr, SIZE: tl.constexpr, RECORD: tl.constexpr, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, V_OFFSET: tl.constexpr, CODEC_K: tl.constexpr, CODEC_V: tl.constexpr, TURN_K: tl.constexpr,
    TURN_V: tl.constexpr, BIASED: tl.constexpr, Q_NORMED: tl.constexpr, K_NORMED: tl.constexpr, CENTRED: tl.constexpr,
    LAST: tl.constexpr, GAIN: tl.constexpr, TURNS: tl.constexpr, APART: tl.constexpr, STORES: tl.constexpr,
    SPARE: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row and head, and with TURNS one more for each second query. TURN_K, TURN_V: blocks of the
    Hadamard rotation; 0 = none. SPARE, APART: see `PageLists`. Without STORES there are queries alone."""
    t = tl.program_id(0).to(tl.int64)
    at, word = row_and_page(t, position, into, SIZE, APART)
    if SPARE:  # noqa: SIM102 - a constant: else the test is not compiled
        if word == 0:  # what is written into a slot that no row has is written again when one comes
            return
    prepare_head(
        t, tl.num_programs(0), tl.program_id(1), at, word + offset, qkv, shift, frequencies, bias, q_norm, k_norm,
        centre, q, qc, qb, eps, factor, amplitude, growth, length, past, HEADS, KV_HEADS, DIM_K, PAD_K, DIM_V, PAD_V,
        ROPE, SIZE, RECORD, K_ROW, V_ROW, V_OFFSET, CODEC_K, CODEC_V, TURN_K, TURN_V, BIASED, Q_NORMED, K_NORMED,
        CENTRED, LAST, GAIN, TURNS, APART, STORES, PDL, PARTS,
    )  # fmt: skip


def prepare(
    qkv: torch.Tensor,
    layer: AttentionLayer,
    pages: DevicePages,
    out: Queries | None = None,
    pdl: int = SERIAL,
) -> Queries:
    """qkv float32 [T, (heads + kv_heads) * dim_k + kv_heads * dim_v] -> queries; keys, values go into their pages.

    Of a layer that does not store, qkv is [T, heads * dim_k]. It may be [parts, T, ...], to be summed.
    """
    out, programs, given = arguments(qkv, layer, pages, out)
    parts = qkv.shape[0] if qkv.dim() == 3 else 1
    launch(_prepare, (qkv.shape[-2], programs))(*given, pages.lists.spare, parts, pdl, **launch_options(pdl, 1))
    return out


def arguments(
    qkv: torch.Tensor, layer: AttentionLayer, pages: DevicePages, out: Queries | None
) -> tuple[Queries, int, tuple[Any, ...]]:
    """Where the queries of `prepare` go, how many programs a row has, and what these take of all but the launch."""
    r, lists, rows, heads = pages.record, pages.lists, qkv.shape[-2], layer.heads
    target, into = pages.where_rows_go
    frequencies = None if layer.rope is None else layer.rope.frequencies_on(qkv.device)
    rope = 0 if frequencies is None else 2 * frequencies.shape[0]
    if out is None:
        out = Queries.empty(rows * (1 + lists.turns), heads, r.dim_k, rope, qkv.device)
    o, (rotated_k, rotated_v) = target.record, pages.rotated
    present = (
        qkv if x is None else x for x in (frequencies, layer.bias, layer.q_norm, layer.k_norm, pages.centre)
    )  # something stands for what is not there
    return out, heads * (1 + lists.turns) + 2 * r.kv_heads * layer.stores, (
        lists.position, into, target.offset, qkv, lists.shift, *present, out.q, out.qc, out.qb, layer.eps,
        layer.scale * LOG2_E, layer.amplitude, *(layer.temperature or (0.0, 1, 0)), heads, r.kv_heads, r.dim_k,
        padded(r.dim_k), r.dim_v, padded(r.dim_v), rope, r.page_size, o.record_bytes, o.k_row_bytes, o.v_row_bytes,
        o.v_offset, o.codec_k.numbers, o.codec_v.numbers, block(r.dim_k) if rotated_k else 0,
        block(r.dim_v) if rotated_v else 0, layer.bias is not None, layer.q_norm is not None, layer.k_norm is not None,
        pages.centre is not None, layer.norms_last, layer.amplitude != 1 or layer.temperature is not None, lists.turns,
        lists.apart, layer.stores,
    )  # fmt: skip


def with_values(qkv: torch.Tensor, layer: AttentionLayer, kv_heads: int, dims: tuple[int, int]) -> torch.Tensor:
    """Projections as `prepare` wants them, of a layer that takes its keys for values, or that norms values: a copy, or
    qkv with its values changed. `dims`: dim_k and dim_v. Raises ValueError for such layers with a bias.
    """
    if not _changes_values(layer):
        return qkv
    if layer.bias is not None:
        raise ValueError("layers with a bias of values have no norm of them")
    first = (layer.heads + kv_heads) * dims[0]
    if layer.keys_as_values:
        qkv = torch.cat([qkv, qkv[:, layer.heads * dims[0] :]], 1)
    if layer.v_norm is not None:
        values = qkv[:, first:].unflatten(1, (kv_heads, dims[1]))
        values.copy_(rms_norm(values, layer.v_norm, layer.eps))
    return qkv


def is_changed(layer: AttentionLayer, dim_k: int) -> bool:
    """Whether `with_values` or `normed_together` do anything with the projections of a layer."""
    return _changes_values(layer) or _norms_together(layer, dim_k)


def _changes_values(layer: AttentionLayer) -> bool:
    return layer.stores and (layer.v_norm is not None or layer.keys_as_values)


def _norms_together(layer: AttentionLayer, dim_k: int) -> bool:
    return layer.q_norm is not None and layer.k_norm is not None and layer.q_norm.numel() != dim_k


def normed_together(qkv: torch.Tensor, layer: AttentionLayer, dim_k: int) -> AttentionLayer:
    """Add the bias and apply norms that go over all heads, in place: qkv as in `prepare`. Returns the layer without
    them, or as it is where norms are of each head."""
    if not _norms_together(layer, dim_k):
        return layer
    assert layer.q_norm is not None and layer.k_norm is not None
    if layer.bias is not None:
        qkv += layer.bias
    norm_heads_together(qkv, layer.q_norm, layer.k_norm, layer.eps)
    return replace(layer, bias=None, q_norm=None, k_norm=None)
