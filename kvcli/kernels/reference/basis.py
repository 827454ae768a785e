"""What a sequence's first page fixes for one layer of a sealed cache: the mean of keys, and the scales of codecs with
one a head.

The mean is that of keys before RoPE, without the first tokens of the sequence, which are unlike the rest (attention
sinks). It takes part in RoPE where it is subtracted; so it fits at any position.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from kvcli.kernels.attend import Rope
from kvcli.kernels.paged import PagedKV

UNLIKE_THE_REST = 4  # first tokens of a sequence, left out of the mean


class _Rotations(Protocol):
    def rotate_(self, x: torch.Tensor) -> None: ...
    def rope_(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None: ...


def fix_basis(ops: _Rotations, kv: PagedKV, rope: Rope | None) -> None:
    """Fill `kv.basis` from the sequence's first page, full, in 16 bits: the first one that the step at hand writes
    into."""
    assert kv.open is not None
    size = kv.record.page_size
    keys, values = kv.open.rows(kv.open.into.memory[0], 0, size)  # [kv_heads, page_size, dim]
    codec_k, codec_v = kv.codecs
    if kv.record.codec_k.centred:
        rows = keys.transpose(0, 1).contiguous()
        ops.rotate_(rows)  # back to the basis in which RoPE turns
        if rope is not None:
            ops.rope_(rows, *rope.at_positions(-np.arange(size, dtype=np.float64)))
        kv.basis.centre = rows[UNLIKE_THE_REST:].mean(0)
    if codec_k.per_head:
        kv.basis.scale_k = codec_k.static_scale(keys)
    if codec_v.per_head:
        kv.basis.scale_v = codec_v.static_scale(values)
    kv.basis.known = True
