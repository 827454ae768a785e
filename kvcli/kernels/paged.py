"""`PagedKV`: what a kernel sees of one layer's cache: a list of entries, which says all about who sees which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from kvcli.codecs import RecordLayout, SummaryLayout
from kvcli.kernels.reference import codecs
from kvcli.kernels.reference.pointwise import rope_
from kvcli.kernels.reference.rotation import rotate

CENTRE_ROWS = 16  # rows that share one rotation of the mean
MASS_UNIT = 1 << 22  # of `Watch.mass`: a probability of 1; whole numbers add up to the same in any order
CHOICE_BLOCK = 128  # queries that choose together what they read; blocks begin at multiples
NEVER = np.iinfo(np.int64).max  # `Entries.until` of what no query stops seeing
Angles = tuple[torch.Tensor, torch.Tensor]  # cos, sin float32 [n, rope_dim / 2]
Memory = Sequence[torch.Tensor | None]  # pages as uint8 [layers, layer_bytes]; None where there is none


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


class Choice(NamedTuple):
    """Which entries queries read of those that have a summary: for each block of queries and key-value head the `pages`
    whose scores are the largest, or those whose exponential is at least `threshold` of the largest one's."""

    pages: int = 0
    threshold: float = 0.0


@dataclass(frozen=True, eq=False)
class Summaries:
    """What tells of the keys of an entry's page without reading them: the mean of each run of rows, as many means a
    page. `addresses`: where those of the group's first layer are, int64 [n]; 0 = there are none, and the entry is read
    in any case. `memory`: the same ones as tensors, uint8 [layers, layout.bytes]."""

    addresses: np.ndarray
    memory: Memory
    layout: SummaryLayout


@dataclass(frozen=True, eq=False)
class Entries:
    """Which rows of one class of pages the queries of a step see, and how: int64 [n] each, in the order of `first`.

    Entry i shows slots [lo, hi) of a page, which are the rows at positions first + lo .. first + hi - 1, to queries at
    positions [since, until) that stand at the row's position or behind it (and in whose reach it is, in a layer with a
    sliding window). A page may have several entries, but a query sees each row in one of them at most. Where rows were
    compacted or moved `first` is nominal: nothing but order and causality comes from it.

    `addresses`: where the records of the group's first layer begin in the page. `turned`: 0 = the rows are scored by
    the ordinary query; 1 = by one that stands as much nearer to them as `PagedKV.shift` says.
    `memory`: the same pages as tensors. `summaries`: where queries choose what they read (`PagedKV.choice`). `made`:
    what others derive from the list, for as long as it lives.
    """

    addresses: np.ndarray
    first: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    since: np.ndarray
    until: np.ndarray
    turned: np.ndarray
    memory: Memory
    summaries: Summaries | None = None
    made: dict[object, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def any_turned(self) -> bool:
        return bool(self.turned.any())

    def shows(self, positions: np.ndarray) -> np.ndarray:
        """How many rows of each entry queries at `positions`, int64 [t], see, sliding windows aside: int64 [t, n]."""
        at = positions[:, None]
        rows = np.minimum(self.hi, at + 1 - self.first) - self.lo
        return np.where((self.since <= at) & (at < self.until), np.maximum(rows, 0), 0)

    def find(self, row: int, query: int) -> int | None:
        """The entry in which a query at position `query` sees the row at position `row`."""
        there = (self.first + self.lo <= row) & (row < self.first + self.hi)
        found = np.flatnonzero(there & (self.since <= query) & (query < self.until))
        return int(found[0]) if len(found) and row <= query else None


@dataclass(frozen=True, eq=False)
class Into:
    """Pages of one class that a step writes into: `addresses` and `memory` as in `Entries`, page after page.

    The first one holds the rows from position `first` on, a multiple of the page size. A page that the class lacks has
    the address 0: in the sealed class, one that the step does not fill. `whole`: such a page is encoded in one piece
    when it is full; else row by row, as they come.
    """

    first: int
    addresses: np.ndarray
    memory: Memory
    whole: bool = True

    @cached_property
    def _there(self) -> tuple[int, int] | None:
        """The places [a, b) of the pages that the class has; None if there are none."""
        there = np.flatnonzero(self.addresses).tolist()
        return (there[0], there[-1] + 1) if there else None

    def sealed(self, start: int, end: int, page_size: int) -> tuple[int, int]:
        """The rows [a, b) that are encoded into these pages as rows [start, end) come; there are none where a >= b."""
        if self._there is None:
            return 0, 0
        first, last = self.first + self._there[0] * page_size, self.first + self._there[1] * page_size
        return (first, last) if self.whole else (max(first, start), min(last, end))


@dataclass
class Moments:
    """Sums over queries before RoPE: `first` float64 [heads, dim_k], `second` of their outer products, float64 [heads,
    dim_k, dim_k]; None as long as `count`, how many there were, is 0."""

    first: torch.Tensor | None = None
    second: torch.Tensor | None = None
    count: int = 0

    def add(self, q: torch.Tensor) -> None:
        """Those of q [T, heads, dim_k], too."""
        rows = q.transpose(0, 1).double()  # [heads, T, dim_k]
        first, second = rows.sum(1), rows.transpose(1, 2) @ rows
        self.first = first if self.first is None else self.first + first
        self.second = second if self.second is None else self.second + second
        self.count += q.shape[0]


class Watch(NamedTuple):
    """What attention notes of the queries of a step in one layer, those at positions from `since` on.

    `mass`: int64 [kv_heads, n], in units of 1 / MASS_UNIT; the probability of each row is added at its place,
    `Entries.first` + slot, for all query heads of the KV head; or where that is `largest`, the largest one stays.
    `queries`: what is summed of the queries themselves.
    """

    since: int
    mass: torch.Tensor | None = None
    queries: Moments | None = None
    largest: bool = False


class Stretch(NamedTuple):
    """Rows [lo, hi) of a step: those from position `start` on of the sequence whose layer `kv` is.

    `shift`: `PagedKV.shift` of these rows, which all layers of a group share. `watch`: None = nothing is noted.
    """

    lo: int
    hi: int
    kv: PagedKV
    start: int
    shift: np.ndarray | None = None
    watch: Watch | None = None

    @property
    def record(self) -> RecordLayout:
        """What pages have of the layer."""
        return self.kv.record

    @property
    def span(self) -> tuple[int, int]:
        """The first position, and how many there are."""
        return self.start, self.hi - self.lo


@dataclass(frozen=True)
class PagedKV:
    """One layer's rows as a list of entries.

    The list is one for all layers of a group: this is layer `layer`, whose records stand `offset` bytes behind the
    addresses in `entries` and `into`. Where the cache type is below 16 bits these are the *sealed* pages, and `open` is
    the same layer's class in 16 bits, with entries of its own. Entries say which query reads which class; rows of a
    step are written into the open one. `choice`: what queries read of the entries with a summary; None = all of them.
    """

    record: RecordLayout
    entries: Entries
    into: Into
    layer: int = 0
    offset: int = 0
    open: PagedKV | None = None
    basis: Basis = field(default_factory=Basis, compare=False)
    choice: Choice | None = None
    descriptors: dict[object, object] = field(default_factory=dict, compare=False)  # a backend's own, made once

    @property
    def classes(self) -> tuple[PagedKV, ...]:
        """The layer in each of its classes of pages."""
        return (self,) if self.open is None else (self, self.open)

    def shift(self, start: int, n: int) -> np.ndarray | None:
        """How much nearer queries at positions start .. start + n - 1 stand to rows of turned entries than their
        numbers say: int64 [n]. None = no entry is turned, or all the shifts are 0.

        The cache is numbered anew without what was evicted: the last of m rows that a query sees, its own, is row m - 1
        (StreamingLLM, arXiv 2309.17453).
        """
        if not any(kv.entries.any_turned for kv in self.classes):
            return None
        positions = np.arange(start, start + n)
        shift = positions + 1 - sum(kv.entries.shows(positions).sum(1) for kv in self.classes)
        return shift if shift.any() else None

    def find(self, row: int, query: int) -> tuple[PagedKV, int] | None:
        """The class and the entry in which a query at position `query` sees the row at position `row`."""
        found = ((kv, kv.entries.find(row, query)) for kv in self.classes)
        return next(((kv, at) for kv, at in found if at is not None), None)

    def summary(self, at: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What tells of the keys of entry `at`: codes int8 [kv_heads, means, dim_k] and scales float32
        [kv_heads, means], writable; None = there is nothing."""
        found = self.entries.summaries
        page = None if found is None or not found.addresses[at] else found.memory[at]
        if found is None or page is None:
            return None
        each, layer = found.layout, page[self.layer]
        codes = layer[: each.scales].view(torch.int8).view(each.kv_heads, each.means, each.pitch)
        scales = layer[each.scales :].view(torch.float32)[: each.kv_heads * each.means]
        return codes[..., : each.dim], scales.view(each.kv_heads, each.means)

    @cached_property
    def codecs(self) -> tuple[codecs.KVCodec, codecs.KVCodec]:
        return codecs.of(self.record.codec_k), codecs.of(self.record.codec_v)

    @cached_property
    def rotated(self) -> tuple[bool, bool]:
        """Whether keys and values are kept in the rotated basis (in open pages too): those that are sealed are."""
        r = self.record
        return (
            self.open is not None and r.codec_k != self.open.record.codec_k,
            self.open is not None and r.codec_v != self.open.record.codec_v,
        )

    def records(self, page: torch.Tensor | None) -> torch.Tensor:
        """uint8 [kv_heads, record_bytes]: this layer's, writable, of a page of `Entries.memory` or `Into.memory`."""
        if page is None:
            raise ValueError("the page is not in this class of pages")
        return page[self.layer].view(self.record.kv_heads, self.record.record_bytes)

    def slots(self, page: torch.Tensor | None, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Writable bytes of slots [lo, hi): K uint8 [kv_heads, n, k_row_bytes] and V likewise."""
        r, records = self.record, self.records(page)
        k = records[:, : r.page_size * r.k_row_bytes].view(r.kv_heads, r.page_size, r.k_row_bytes)
        v = records[:, r.v_offset : r.v_offset + r.page_size * r.v_row_bytes]
        return k[:, lo:hi], v.view(r.kv_heads, r.page_size, r.v_row_bytes)[:, lo:hi]

    def scales(self, page: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of a page's K rows and V rows: float16 [kv_heads, page_size] in the page (writable), float32
        [kv_heads] of the sequence, or None."""
        r, records = self.record, self.records(page)
        found = []
        for at, fixed in ((r.k_scales, self.basis.scale_k), (r.v_scales, self.basis.scale_v)):
            found.append(records[:, at : at + 2 * r.page_size].view(torch.float16) if at else fixed)
        return found[0], found[1]

    @property
    def centres(self) -> np.ndarray:
        """Where the mean of keys has angles of its own, as a row's position: int64 [n], the middle of each CENTRE_ROWS
        rows of each page of `entries` and, behind those, of `into`."""
        size = self.record.page_size
        pages = np.concatenate([self.entries.first, self.into.first + size * np.arange(len(self.into.addresses))])
        return np.add.outer(pages, np.arange(0, size, CENTRE_ROWS) + (CENTRE_ROWS - 1) / 2).flatten()

    def centre(self, at: int, angles: Angles | None) -> torch.Tensor | None:
        """What the keys of each row of a sealed page lack: float32 [kv_heads, page_size, dim_k], rotated, or None.

        The mean takes part in RoPE like a key, at the middle of each CENTRE_ROWS rows. `angles`: those of `centres`;
        the page is number `at` among those that they are for.
        """
        if self.basis.centre is None or self.open is None:
            return None
        n = self.record.page_size // CENTRE_ROWS
        rows = self.basis.centre.repeat(n, 1, 1)  # [n, kv_heads, dim_k]
        if angles is not None:
            rope_(rows, *(x[at * n : (at + 1) * n] for x in angles))
        return rotate(rows).repeat_interleave(CENTRE_ROWS, 0).transpose(0, 1)

    def rows(self, page: torch.Tensor | None, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [lo, hi) decoded: K float32 [kv_heads, n, dim_k] (less `centre`, where there is one), and V."""
        r, (k, v) = self.record, self.slots(page, lo, hi)
        decoded = []
        for codec, data, scales, dim in zip(self.codecs, (k, v), self.scales(page), (r.dim_k, r.dim_v), strict=True):
            if scales is None:
                decoded.append(codec.decode(data, dim))
            else:
                decoded.append(codec.decode(data, scales[:, lo:hi] if scales.dim() == 2 else scales, dim))
        return decoded[0], decoded[1]
