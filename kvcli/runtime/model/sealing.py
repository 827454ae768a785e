"""Sealing: when the rows of a step leave the tail of a quantized cache, they are encoded, once.

Keys are centred first. The mean is that of the sequence's own first page (kernels/reference/basis.py): it needs no
calibration and no bytes in the pages, and a shared prefix has the same one. Scores get it back (see
kernels/reference/attention.py), so a bad mean costs nothing but precision.
"""

from __future__ import annotations

from kvcli.kernels import Angles, Backend, PagedKV
from kvcli.runtime.model.rope import RopeTable


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
        ops.fix_basis(kv, rope)
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
