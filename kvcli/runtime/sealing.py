"""Sealing: when the rows of a step leave the tail of a quantized cache, they are encoded, once.

Keys are centred first. The mean is taken before RoPE, over the sequence's own first page without its first tokens (the
attention sinks), and it takes part in RoPE where it is subtracted; so it fits at any position, needs no calibration and
no bytes in the pages, and a shared prefix has the same one. Scores get it back (see kernels/attention.py), so a bad
mean costs nothing but precision.
"""

from __future__ import annotations

import numpy as np

from kvcli.kernels import Angles, Backend, PagedKV
from kvcli.runtime.cachetypes import CODEC_SPECS
from kvcli.runtime.grouplayout import sealed_rows
from kvcli.runtime.rope import RopeTable

UNLIKE_THE_REST = 4  # first tokens of a sequence, left out of the mean


def seal_step(ops: Backend, kv: PagedKV, start: int, end: int, rope: RopeTable | None) -> Angles | None:
    """Encode the rows of one layer that leave the tail as rows [start, end), just stored, come. Sinks stay open.

    Returns the angles of the mean, for attention; None where keys are not centred or there is no RoPE.
    """
    if kv.open is None:
        return None
    size = kv.record.page_size
    if fixes_basis(kv, end):
        fix_basis(ops, kv, rope)
    first, last = (max(sealed_rows(n, size, kv.tail), kv.sinks * size) for n in (start, end))
    angles = None
    if kv.basis.centre is not None and rope is not None:
        angles = rope.centres(-(-end // size) * size, kv.first_page * size, kv.front * size)
    if first < last:
        ops.seal(kv, first, last, angles)
    return angles


def fixes_basis(kv: PagedKV, end: int) -> bool:
    """Whether a step up to row `end` fixes the mean of keys and the scales: the one that fills the first page.

    Not later: a sliding group lets go of that page, perhaps before it seals any.
    """
    return kv.open is not None and not kv.basis.known and end >= kv.record.page_size


def fix_basis(ops: Backend, kv: PagedKV, rope: RopeTable | None) -> None:
    """The mean of keys, and the scales of codecs with one a head: from the sequence's first page, full, in 16 bits."""
    assert kv.open is not None
    size, basis = kv.record.page_size, kv.basis
    keys, values = kv.open.rows(0, 0, size)  # [kv_heads, page_size, dim]
    if CODEC_SPECS[kv.record.codec_k].centred:
        rows = keys.transpose(0, 1).contiguous()
        ops.rotate_(rows)  # back to the basis in which RoPE turns
        if rope is not None:
            cos, sin = rope.at_positions(-np.arange(size, dtype=np.float64))
            ops.rope_(rows, cos.to(rows.device), sin.to(rows.device))
        basis.centre = rows[UNLIKE_THE_REST:].mean(0)
    codec_k, codec_v = kv.codecs
    if codec_k.per_head:
        basis.scale_k = codec_k.static_scale(keys)
    if codec_v.per_head:
        basis.scale_v = codec_v.static_scale(values)
    basis.known = True
