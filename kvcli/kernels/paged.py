"""`PagedKV`: what a kernel sees of one layer's cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from kvcli.kernels import codecs


@dataclass(frozen=True)
class RecordLayout:
    """One (page, KV head) record: `page_size` K rows, then, from `v_offset`, as many V rows. Sizes in bytes."""

    page_size: int
    kv_heads: int
    dim_k: int
    dim_v: int
    codec_k: str
    codec_v: str
    k_row_bytes: int
    v_row_bytes: int
    v_offset: int
    record_bytes: int


@dataclass(frozen=True)
class PagedKV:
    """One layer's rows as pages by address.

    `addresses`: int64 [n_pages], the layer's first record in each page. `pages`: the same memory as uint8 tensors
    (whole pages of the group; this layer's records start at `offset`). Page 0 of the list holds the positions from
    `first_page * page_size`.
    """

    record: RecordLayout
    addresses: np.ndarray
    pages: tuple[torch.Tensor, ...]
    offset: int
    first_page: int
    descriptors: dict[str, object] = field(default_factory=dict, compare=False)  # a backend's own, made once

    def records(self, page: int) -> torch.Tensor:
        """uint8 [kv_heads, record_bytes]: a writable view of the page that holds positions page * page_size, ..."""
        r = self.record
        flat = self.pages[page - self.first_page]
        return flat[self.offset : self.offset + r.kv_heads * r.record_bytes].view(r.kv_heads, r.record_bytes)

    @cached_property
    def codecs(self) -> tuple[codecs.KVCodec, codecs.KVCodec]:
        return codecs.load(self.record.codec_k), codecs.load(self.record.codec_v)

    def slots(self, page: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable bytes of slots [lo, hi): K uint8 [kv_heads, n, k_row_bytes] and V likewise."""
        r, records = self.record, self.records(page)
        k = records[:, : r.page_size * r.k_row_bytes].view(r.kv_heads, r.page_size, r.k_row_bytes)
        v = records[:, r.v_offset : r.v_offset + r.page_size * r.v_row_bytes]
        return k[:, lo:hi], v.view(r.kv_heads, r.page_size, r.v_row_bytes)[:, lo:hi]
