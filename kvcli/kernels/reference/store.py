"""Writing rows into pages, and sealing full ones: the plain-torch reference."""

from __future__ import annotations

import torch

from kvcli.kernels.paged import Angles, PagedKV


def store(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None:
    """Write rows k [T, kv_heads, dim_k], v [T, kv_heads, dim_v] at positions start, start + 1, ...

    They go into the open pages where the cache is sealed.
    """
    target = kv.open or kv
    size, done, total = kv.record.page_size, 0, k.shape[0]
    codec_k, codec_v = target.codecs
    while done < total:
        page, slot = divmod(start + done, size)
        n = min(size - slot, total - done)
        k_bytes, v_bytes = target.slots(page, slot, slot + n)
        k_bytes.copy_(codec_k.encode(k[done : done + n].transpose(0, 1).contiguous()))
        v_bytes.copy_(codec_v.encode(v[done : done + n].transpose(0, 1).contiguous()))
        done += n


def seal(kv: PagedKV, first: int, end: int, angles: Angles | None = None) -> None:
    """Encode rows [first, end) of the open pages into the sealed pages, once and for ever.

    `angles`: RoPE at the middle of each CENTRE_ROWS rows of the sequence, for the mean that is taken out of keys.
    """
    if kv.open is None:
        raise ValueError("this cache has no pages to seal")
    size = kv.record.page_size
    for page in range(first // size, (end - 1) // size + 1):
        lo, hi = max(first - page * size, 0), min(end - page * size, size)
        keys, values = kv.open.rows(page, lo, hi)
        centre = kv.centre(page, angles)
        if centre is not None:
            keys = keys - centre[:, lo:hi]
        for codec, rows, data, scales in zip(
            kv.codecs, (keys, values), kv.slots(page, lo, hi), kv.scales(page), strict=True
        ):
            if scales is None:
                data.copy_(codec.encode(rows))
            elif scales.dim() == 1:
                data.copy_(codec.encode(rows, scales))
            else:
                codes, row_scales = codec.encode(rows)
                data.copy_(codes)
                scales[:, lo:hi] = row_scales
