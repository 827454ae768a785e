"""Encoding new K/V rows into pages: the plain-torch reference."""

from __future__ import annotations

import torch

from kvcli.kernels.paged import PagedKV


def store(k: torch.Tensor, v: torch.Tensor, kv: PagedKV, start: int) -> None:
    """Write rows k [T, kv_heads, dim_k], v [T, kv_heads, dim_v] at positions start, start + 1, ..."""
    size, done, total = kv.record.page_size, 0, k.shape[0]
    codec_k, codec_v = kv.codecs
    while done < total:
        page, slot = divmod(start + done, size)
        n = min(size - slot, total - done)
        k_bytes, v_bytes = kv.slots(page, slot, slot + n)
        k_bytes.copy_(codec_k.encode(k[done : done + n].transpose(0, 1).contiguous()))
        v_bytes.copy_(codec_v.encode(v[done : done + n].transpose(0, 1).contiguous()))
        done += n
