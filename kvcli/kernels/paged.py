"""`PagedKV`: what a kernel sees of one layer's cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvcli.codecs import RecordLayout
from kvcli.kernels.reference import codecs
from kvcli.kernels.reference.pointwise import rope_
from kvcli.kernels.reference.rotation import rotate

CENTRE_ROWS = 16  # rows that share one rotation of the mean
Angles = tuple[torch.Tensor, torch.Tensor]  # cos, sin float32 [n, rope_dim / 2]


@dataclass
class Basis:
    """What a sequence's first page fixes for one layer of a sealed cache; None until that page is full.

    `centre`: mean of its keys before RoPE, float32 [kv_heads, dim_k], which sealed keys lack; `scale_k`, `scale_v`:
    float32 [kv_heads], for codecs with one scale a head.
    """

    centre: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    known: bool = False


class Stretch(NamedTuple):
    """Rows [lo, hi) of a step: those from position `start` on of the sequence whose layer `kv` is."""

    lo: int
    hi: int
    kv: PagedKV
    start: int

    @property
    def span(self) -> tuple[int, int]:
        """The first position, and how many there are."""
        return self.start, self.hi - self.lo


@dataclass(frozen=True)
class PagedKV:
    """One layer's rows as pages by address.

    `addresses`: int64 [n_pages], the layer's first record in each page. `pages`: the same memory as uint8 tensors
    [layers, layer_bytes] (whole pages of the group, of which this is layer `layer`). The first `front` of the list hold
    the first positions of the sequence, the others those from `first_page * page_size` on.

    Where the cache type is below 16 bits these are the *sealed* pages, and `open` has pages in 16 bits: the first
    `sinks` of the sequence, and the last `tail` up to the one being filled. A page that is not there has the address
    0. A query reads the sinks, its own page and the tail - 1 before it open, all others sealed: precision depends on
    positions alone.

    Where old rows are evicted (`retained` > 0) a query sees the first `keep` rows and those from `oldest(position)` on.
    """

    record: RecordLayout
    addresses: np.ndarray
    pages: Sequence[torch.Tensor | None]
    layer: int
    first_page: int
    open: PagedKV | None = None
    sinks: int = 0
    tail: int = 0
    front: int = 0
    keep: int = 0
    retained: int = 0
    basis: Basis = field(default_factory=Basis, compare=False)
    descriptors: dict[object, object] = field(default_factory=dict, compare=False)  # a backend's own, made once

    def records(self, page: int) -> torch.Tensor:
        """uint8 [kv_heads, record_bytes]: a writable view of the page that holds positions page * page_size, ..."""
        r = self.record
        at = self.index(page)
        found = self.pages[at] if at >= self.front or page < self.front else None
        if found is None:
            raise ValueError(f"page {page} is not in this class of pages")
        return found[self.layer].view(r.kv_heads, r.record_bytes)

    def index(self, page: int) -> int:
        """Where in the list a page stands that is there."""
        return page if page < self.front else page - self.first_page + self.front

    @property
    def numbers(self) -> np.ndarray:
        """The number of each page in the list: int64 [n_pages]."""
        n = np.arange(len(self.addresses))
        return np.where(n < self.front, n, n - self.front + self.first_page)

    def oldest(self, position: np.ndarray) -> np.ndarray:
        """The first row, beside the first `keep`, that queries at these positions see; 0 = they see every row.

        The `retained` most recent rows and what else is in the oldest page of those: whole pages are let go of. A gap
        that begins behind row `keep` is one: nothing was evicted before that.
        """
        first = np.maximum(position - self.retained + 1, 0) // self.record.page_size * self.record.page_size
        return np.where((self.retained > 0) & (first > self.keep), first, 0)

    def gaps(self, start: int, n: int) -> np.ndarray:
        """Evicted rows of queries at positions start, start + 1, ...: int64 [n]. The first `keep` rows are scored with
        a query that stands that much earlier."""
        first = self.oldest(np.arange(start, start + n))
        return np.where(first > 0, first - self.keep, 0)

    @cached_property
    def codecs(self) -> tuple[codecs.KVCodec, codecs.KVCodec]:
        return codecs.of(self.record.codec_k), codecs.of(self.record.codec_v)

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Whether keys and values are kept in the rotated basis (in open pages too): those that are sealed are."""
        r = self.record
        return (
            self.open is not None and r.codec_k != self.open.record.codec_k,
            self.open is not None and r.codec_v != self.open.record.codec_v,
        )

    def view(self, page: int, own: int) -> PagedKV:
        """The class of pages in which a query of page `own` reads `page`."""
        return self.open if self.open is not None and (page < self.sinks or page > own - self.tail) else self

    def slots(self, page: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable bytes of slots [lo, hi): K uint8 [kv_heads, n, k_row_bytes] and V likewise."""
        r, records = self.record, self.records(page)
        k = records[:, : r.page_size * r.k_row_bytes].view(r.kv_heads, r.page_size, r.k_row_bytes)
        v = records[:, r.v_offset : r.v_offset + r.page_size * r.v_row_bytes]
        return k[:, lo:hi], v.view(r.kv_heads, r.page_size, r.v_row_bytes)[:, lo:hi]

    def scales(self, page: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of a page's K rows and V rows: float16 [kv_heads, page_size] in the page (writable), float32
        [kv_heads] of the sequence, or None."""
        r, records = self.record, self.records(page)
        found = []
        for at, fixed in ((r.k_scales, self.basis.scale_k), (r.v_scales, self.basis.scale_v)):
            found.append(records[:, at : at + 2 * r.page_size].view(torch.float16) if at else fixed)
        return found[0], found[1]

    def centre(self, page: int, angles: Angles | None) -> torch.Tensor | None:
        """What the keys of each row of a sealed page lack: float32 [kv_heads, page_size, dim_k], rotated, or None.

        The mean takes part in RoPE like a key, at the middle of each CENTRE_ROWS rows; `angles` are for those of the
        pages in the list.
        """
        if self.basis.centre is None or self.open is None:
            return None
        size = self.record.page_size
        first, n = self.index(page) * size // CENTRE_ROWS, size // CENTRE_ROWS
        rows = self.basis.centre.repeat(n, 1, 1)  # [n, kv_heads, dim_k]
        if angles is not None:
            rope_(rows, *(x[first : first + n] for x in angles))
        return rotate(rows).repeat_interleave(CENTRE_ROWS, 0).transpose(0, 1)

    def rows(self, page: int, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [lo, hi) decoded: K float32 [kv_heads, n, dim_k] (less `centre`, where there is one), and V."""
        r, (k, v) = self.record, self.slots(page, lo, hi)
        decoded = []
        for codec, data, scales, dim in zip(self.codecs, (k, v), self.scales(page), (r.dim_k, r.dim_v), strict=True):
            if scales is None:
                decoded.append(codec.decode(data, dim))
            else:
                decoded.append(codec.decode(data, scales[:, lo:hi] if scales.dim() == 2 else scales, dim))
        return decoded[0], decoded[1]
