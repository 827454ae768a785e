"""Sealing: when the rows of a step leave the tail of a quantized cache, they are encoded, once.

Keys are centred first. The mean is taken before RoPE, over the sequence's own first page without its first tokens (the
attention sinks), and it takes part in RoPE where it is subtracted; so it fits at any position, needs no calibration and
no bytes in the pages, and a shared prefix has the same one. Scores get it back (see kernels/attention.py), so a bad
mean costs nothing but precision.
"""

from __future__ import annotations

import numpy as np
import torch

from kvcli.kernels import Angles, Backend, PagedKV
from kvcli.runtime.model.rope import RopeTable

UNLIKE_THE_REST = 4  # first tokens of a sequence, left out of the mean


def seal_step(
    ops: Backend, rope: RopeTable | None, kv: PagedKV, start: int, end: int, stores: bool = True
) -> Angles | None:
    """Encode the rows of one layer that leave the tail as rows [start, end), just stored, come. Sinks stay open.

    `stores` False: the layer reads rows of another one, which has done that. Returns the angles of the mean, those of
    `kv.centres`, for attention; None where keys are not centred or there is no RoPE.
    """
    if kv.open is None:
        return None
    if fixes_basis(kv, end):
        fix_bases(ops, [kv], rope)
    angles = rope.centres(kv) if kv.basis.centre is not None and rope is not None else None
    first, last = kv.into.sealed(start, end, kv.record.page_size)
    if first < last and stores:
        ops.seal(kv, first, last, angles)
    return angles


def fixes_basis(kv: PagedKV, end: int) -> bool:
    """Whether a step up to row `end` fixes the mean of keys and the scales: the one that fills the first page.

    Not later: a sliding group lets go of that page, perhaps before it seals any.
    """
    return kv.open is not None and not kv.basis.known and end >= kv.record.page_size


def fix_bases(ops: Backend, layers: list[PagedKV], rope: RopeTable | None) -> None:
    """The mean of keys, and the scales of codecs with one a head: from the sequence's first page, full, in 16 bits. It
    is the first one that the step at hand writes into.

    `layers`: some of one group that share `rope`; what is computed for all of them at once saves a GPU waiting.
    """
    record, n = layers[0].record, len(layers)
    pages = [kv.open.rows(kv.open.into.memory[0], 0, record.page_size) for kv in layers if kv.open is not None]
    keys, values = (torch.cat(x) for x in zip(*pages, strict=True))  # [n * kv_heads, page_size, dim]
    codec_k, codec_v = layers[0].codecs
    found: dict[str, torch.Tensor] = {}
    if record.codec_k.centred:
        rows = keys.view(n, record.kv_heads, *keys.shape[1:]).transpose(1, 2).flatten(0, 1).contiguous()
        ops.rotate_(rows)  # back to the basis in which RoPE turns
        if rope is not None:
            cos, sin = rope.at_positions(-np.arange(record.page_size, dtype=np.float64))
            ops.rope_(rows, *(x.to(rows.device).repeat(n, 1) for x in (cos, sin)))
        found["centre"] = rows.unflatten(0, (n, record.page_size))[:, UNLIKE_THE_REST:].mean(1)
    if codec_k.per_head:
        found["scale_k"] = codec_k.static_scale(keys).view(n, -1)
    if codec_v.per_head:
        found["scale_v"] = codec_v.static_scale(values).view(n, -1)
    for i, kv in enumerate(layers):
        for name, of_layers in found.items():
            setattr(kv.basis, name, of_layers[i])
        kv.basis.known = True
