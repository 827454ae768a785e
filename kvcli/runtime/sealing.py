"""Sealing: when the rows of a step fill pages of a quantized cache, those pages are encoded, once.

Keys are centred first. The mean is taken before RoPE, over the sequence's own first page without its first tokens (the
attention sinks), and rotated to the middle of each page it is subtracted from; so it fits at any position, needs no
calibration, and a shared prefix has the same one. Scores get it back (see kernels/attention.py), so nothing is lost by
a bad mean but precision.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcli.kernels import Backend, PagedKV
from kvcli.runtime.layout import sealed_rows
from kvcli.runtime.rope import RopeTable

UNLIKE_THE_REST = 4  # first tokens of a sequence, left out of the mean


def seal_step(ops: Backend, kv: PagedKV, start: int, end: int, rope: RopeTable | None) -> None:
    """Encode the rows of one layer that leave the tail as rows [start, end), just stored, come. Sinks stay open."""
    size = kv.record.page_size
    first, last = (max(sealed_rows(n, size, kv.tail), kv.sinks * size) for n in (start, end))
    if kv.open is None or first >= last:
        return
    if not kv.basis.known:
        _fix_basis(ops, kv, rope)
    means = None
    if kv.basis.mean is not None:
        middles = np.arange(first // size, (last - 1) // size + 1) * float(size) + (size - 1) / 2
        means = kv.basis.mean.repeat(len(middles), 1, 1)
        _turn(ops, means, rope, middles)
    ops.seal(kv, first, last, means)


def _fix_basis(ops: Backend, kv: PagedKV, rope: RopeTable | None) -> None:
    """From the first page, which is full and open: the mean of its keys, and the scales of codecs with one a head."""
    size, basis = kv.record.page_size, kv.basis
    keys, values = kv.open.rows(0, 0, size)
    if kv.record.mean:
        rows = keys.transpose(0, 1).contiguous()  # [page_size, kv_heads, dim_k]
        _turn(ops, rows, rope, -np.arange(size, dtype=np.float64))
        basis.mean = rows[UNLIKE_THE_REST:].mean(0)
    codec_k, codec_v = kv.codecs
    if codec_k.per_head:
        basis.scale_k = codec_k.static_scale(keys)
    if codec_v.per_head:
        basis.scale_v = codec_v.static_scale(values)
    basis.known = True


def _turn(ops: Backend, rows: torch.Tensor, rope: RopeTable | None, positions: np.ndarray) -> None:
    """Apply RoPE at `positions` [n] to rows [n, kv_heads, dim_k] that are in the Hadamard basis, in place."""
    if rope is not None:
        ops.rotate_(rows)
        ops.rope_(rows, *rope.at_positions(positions))
        ops.rotate_(rows)
