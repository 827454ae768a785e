"""`PageRows`: rows of one layer in the pages of a list, read many at a time and moved between slots. Plain torch, on
the device of the pool.

A row's *place* is page number * page size + slot. Where nothing was selected that is its position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvcli.codecs import RecordLayout
from kvcli.kernels import CENTRE_ROWS, Angles, Basis, PagedKV
from kvcli.kernels.reference import codecs
from kvcli.kernels.reference.pointwise import rope_
from kvcli.kernels.reference.rotation import rotate
from kvcli.runtime.cache.layout import GroupLayout
from kvcli.runtime.cache.pagelist import Form, PageList

AnglesAt = Callable[[np.ndarray], Angles]  # of positions, float64 [n]


@dataclass(frozen=True)
class _Class:
    """The pages of one form: records uint8 [pages, kv_heads, record_bytes], and which page numbers they are."""

    form: Form
    layout: GroupLayout
    numbers: np.ndarray
    records: torch.Tensor
    sealed: bool

    @property
    def record(self) -> RecordLayout:
        return self.layout.record

    def section(self, values: bool) -> torch.Tensor:
        """The rows of keys or values, a view: uint8 [pages, kv_heads, page_size, row bytes]."""
        r = self.record
        at, width = (r.v_offset, r.v_row_bytes) if values else (0, r.k_row_bytes)
        return self.records[..., at : at + r.page_size * width].unflatten(-1, (r.page_size, width))

    def scales(self, values: bool) -> torch.Tensor | None:
        """Their scales, a view: uint8 [pages, kv_heads, page_size, 2]; None where rows have none of their own."""
        r = self.record
        at = r.v_scales if values else r.k_scales
        return self.records[..., at : at + 2 * r.page_size].unflatten(-1, (r.page_size, 2)) if at else None


class PageRows:
    """Layer `index` of a list's group."""

    def __init__(self, held: PageList, index: int, angles: AnglesAt | None) -> None:
        """`angles`: of the layer's RoPE; None = it has none."""
        self.held, self.index, self.layout = held, index, held.layout
        self.basis: Basis = held.bases[index]
        self.device = held.closed.pool.device
        self._angles = angles

    def _class(self, form: Form, numbers: np.ndarray) -> _Class:
        layout = form.pool.layout.row_arenas[form.arena]
        pages = [form.pool.page(form.arena, form.pages[n])[self.index] for n in numbers.tolist()]
        shape = (len(pages), layout.kv_heads, layout.record.record_bytes)
        records = torch.stack(pages) if pages else torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return _Class(
            form, layout, numbers, records.view(shape), self.held.open is not None and form is self.held.closed
        )

    def _classes(self, places: np.ndarray) -> list[_Class]:
        """What has these places: sealed pages as far as they are there, else open ones."""
        numbers = np.unique(places // self.layout.page_size)
        opened = self.held.open
        if opened is None:
            return [self._class(self.held.closed, numbers)]
        is_open = np.array([n in opened.pages for n in numbers.tolist()], bool)
        return [self._class(self.held.closed, numbers[~is_open]), self._class(opened, numbers[is_open])]

    def _centres(self, places: torch.Tensor, heads: torch.Tensor) -> torch.Tensor | None:
        """What sealed keys at these places lack, int64 [n], of these KV heads: float32 [n, dim_k]; None = nothing."""
        mean = self.basis.centre
        if mean is None:
            return None
        blocks, block = (places // CENTRE_ROWS).unique(return_inverse=True)
        rows = mean.to(self.device).repeat(len(blocks), 1, 1)  # [blocks, kv_heads, dim_k]
        if self._angles is not None:
            middles = blocks.cpu().numpy() * float(CENTRE_ROWS) + (CENTRE_ROWS - 1) / 2
            angles = self._angles(middles)
            if self.device.type != "cpu":  # as kernels have them there
                angles = angles[0].half().float(), angles[1].half().float()
            rope_(rows, *(x.to(self.device) for x in angles))
        return rotate(rows)[block, heads]

    def _static(self, values: bool) -> torch.Tensor | None:
        """The scales of heads, float32 [kv_heads]."""
        found = self.basis.scale_v if values else self.basis.scale_k
        return None if found is None else found.to(self.device)

    def read(self, heads: torch.Tensor, places: torch.Tensor, values: bool) -> torch.Tensor:
        """Rows of these KV heads, int64 [n], at these places, int64 [n] -> float32 [n, dim], as they were stored: in
        the rotated basis where the cache has one."""
        size = self.layout.page_size
        dim = self.layout.dim_v if values else self.layout.dim_k
        found = torch.zeros(len(places), dim, device=self.device)
        for each in self._classes(places.unique().cpu().numpy()):
            page, there = _found(each.numbers, places // size)
            h, slot = heads[there], places[there] % size
            data = each.section(values)[page, h, slot][:, None]
            codec, scales = codecs.of(each.record.codec_v if values else each.record.codec_k), each.scales(values)
            if scales is not None:
                rows = codec.decode(data, scales[page, h, slot].contiguous().view(torch.float16), dim)
            elif codec.per_head:
                fixed = self._static(values)
                assert fixed is not None
                rows = codec.decode(data, fixed[h], dim)
            else:
                rows = codec.decode(data, dim)
            rows = rows[:, 0]
            if each.sealed and not values and (centres := self._centres(places[there], h)) is not None:
                rows = rows + centres
            found[there] = rows
        return found

    def move(self, heads: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Put rows of KV heads, int64 [n], at places `source` into those of `target`, encoded anew; nobody else holds
        the pages of these."""
        size, rows = self.layout.page_size, [self.read(heads, source, values) for values in (False, True)]
        for each in self._classes(target.unique().cpu().numpy()):
            page, there = _found(each.numbers, target // size)
            h, slot = heads[there], target[there] % size
            for values, all_rows in enumerate(rows):
                new = all_rows[there]
                if each.sealed and not values and (centres := self._centres(target[there], h)) is not None:
                    new = new - centres
                self._encode(each, bool(values), new, page, h, slot)
            for n, records in zip(each.numbers.tolist(), each.records, strict=True):
                each.form.pool.page(each.form.arena, each.form.pages[n])[self.index].copy_(records.flatten())

    def _encode(
        self, to: _Class, values: bool, rows: torch.Tensor, page: torch.Tensor, h: torch.Tensor, slot: torch.Tensor
    ) -> None:
        codec, scales = codecs.of(to.record.codec_v if values else to.record.codec_k), to.scales(values)
        data = to.section(values)
        if scales is not None:
            codes, row_scales = codec.encode(rows)
            data[page, h, slot] = codes
            scales[page, h, slot] = row_scales[:, None].contiguous().view(torch.uint8)
        elif codec.per_head:
            fixed = self._static(values)
            assert fixed is not None
            data[page, h, slot] = codec.encode(rows[:, None], fixed[h])[:, 0]
        else:
            data[page, h, slot] = codec.encode(rows)

    def all(self, places: torch.Tensor, values: bool) -> torch.Tensor:
        """Rows at these places, int64 [n], of all KV heads: float32 [kv_heads, n, dim], in the basis of RoPE."""
        n, heads = len(places), self.layout.kv_heads
        every = torch.arange(heads, device=self.device).repeat_interleave(n)
        found = self.read(every, places.repeat(heads), values).view(heads, n, -1)
        return rotate(found) if self._rotated(values) else found

    def _rotated(self, values: bool) -> bool:
        opened = self.layout.open_class
        if opened is None:
            return False
        mine, theirs = self.layout.record, opened.record
        return mine.codec_v != theirs.codec_v if values else mine.codec_k != theirs.codec_k


def _found(numbers: np.ndarray, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the page numbers `pages`, int64 [n], are among `numbers`: where each of those stands there, and which
    they are, int64 [m] both."""
    table = torch.from_numpy(numbers).to(pages.device)
    if not len(table):
        none = torch.zeros(0, dtype=torch.int64, device=pages.device)
        return none, none
    at = torch.searchsorted(table, pages).clamp(max=len(table) - 1)
    there = torch.nonzero(table[at] == pages).flatten()
    return at[there], there


def copies(kv: PagedKV, start: int, end: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Rows [start, end) of one layer, as far as their pages are there: (position, K float32 [T, kv_heads, dim_k], V) of
    each page."""
    size = kv.record.page_size
    for first, page in zip(kv.entries.first.tolist(), kv.entries.memory, strict=True):
        lo, hi = max(start, first), min(end, first + size)
        if lo < hi:
            k, v = kv.rows(page, lo - first, hi - first)
            k, v = (x.transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (k, v))
            yield lo, k, v
