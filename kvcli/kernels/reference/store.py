"""Writing rows into pages, and sealing full ones: the plain-torch reference."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvcli.kernels.paged import Angles, PagedKV


def store(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None:
    """Write rows k [T, kv_heads, dim_k], v [T, kv_heads, dim_v] at positions start, start + 1, ...

    They go into the open pages where the cache is sealed, those of `Into`.
    """
    target = kv.open or kv
    codec_k, codec_v = target.codecs
    for page, at, lo, hi in _pages(target, start, start + k.shape[0]):
        k_bytes, v_bytes = target.slots(target.into.memory[page], lo, hi)
        k_bytes.copy_(codec_k.encode(k[at : at + hi - lo].transpose(0, 1).contiguous()))
        v_bytes.copy_(codec_v.encode(v[at : at + hi - lo].transpose(0, 1).contiguous()))


def seal(kv: PagedKV, first: int, end: int, angles: Angles | None = None) -> None:
    """Encode rows [first, end) of the open pages into the sealed pages, once and for ever.

    `angles`: of `PagedKV.centres`, for the mean that is taken out of keys.
    """
    if kv.open is None:
        raise ValueError("this cache has no pages to seal")
    for page, _, lo, hi in _pages(kv, first, end):
        keys, values = kv.open.rows(kv.open.into.memory[page], lo, hi)
        centre = kv.centre(len(kv.entries) + page, angles)
        if centre is not None:
            keys = keys - centre[:, lo:hi]
        there = kv.into.memory[page]
        for codec, rows, data, scales in zip(
            kv.codecs, (keys, values), kv.slots(there, lo, hi), kv.scales(there), strict=True
        ):
            if scales is None:
                data.copy_(codec.encode(rows))
            elif scales.dim() == 1:
                data.copy_(codec.encode(rows, scales))
            else:
                codes, row_scales = codec.encode(rows)
                data.copy_(codes)
                scales[:, lo:hi] = row_scales


def _pages(kv: PagedKV, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows [start, end) page by page: the page's place in `kv.into`, how many rows stand before, and its slots."""
    size = kv.record.page_size
    for page in range(start // size, -(-end // size)):
        base = page * size
        yield page - kv.into.first // size, max(0, base - start), max(start - base, 0), min(end - base, size)
