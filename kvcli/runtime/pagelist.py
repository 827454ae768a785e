"""`PageList`: which pages hold the rows of one layer group of a sequence, and how the kernels see them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvcli.kernels import Basis, PagedKV, RecordLayout
from kvcli.runtime.grouplayout import GroupLayout
from kvcli.runtime.pages import PagePool

NO_PAGE = -1
PageKey = tuple[int, int]  # (arena, page number): which page of a sequence


class PageList:
    """Pages of one group: `pages[i]` holds positions (first + i) * page_size and on.

    `front`: pages 0, 1, ... that are kept though the window, `pages`, has gone on. In a sealed group a page stands in
    `open` until it is full, then in `pages` (NO_PAGE before); sinks stay open.
    """

    def __init__(self, layers: int) -> None:
        self.first = 0
        self.front: list[int] = []
        self.pages: list[int] = []
        self.open: dict[int, int] = {}  # page number -> page of the open arena
        self.bases = tuple(Basis() for _ in range(layers))
        self._made: tuple[tuple[int, ...], tuple[Basis, ...], tuple[PagedKV, ...]] | None = None

    def views(self, pool: PagePool, group: int) -> tuple[PagedKV, ...]:
        """The layers of the group as the kernels see them; made again only when the pages change."""
        front, pages = len(self.front), [*self.front, *self.pages]
        numbers = (*range(front), *range(self.first, self.first + len(self.pages)))
        opened = [self.open.get(number, NO_PAGE) for number in numbers]
        key = (self.first, front, *pages, *opened)
        if self._made and self._made[0] == key and self._made[1] is self.bases:
            return self._made[2]
        arena, layout = pool.layout.open_arena(group), pool.layout.groups[group]
        views = self._layers(pool, group, pages)
        if arena is not None:
            sealed = zip(views, self._layers(pool, arena, opened), self.bases, strict=True)
            views = tuple(
                replace(v, open=o, sinks=layout.sinks, tail=layout.tail, basis=basis) for v, o, basis in sealed
            )
        self._made = key, self.bases, views
        return views

    def _layers(self, pool: PagePool, arena: int, pages: list[int]) -> tuple[PagedKV, ...]:
        """Every layer of an arena over these pages, whose numbers are those of the list."""
        layout = pool.layout.arenas[arena]
        keep, window = (layout.retention.keep, layout.retention.window) if layout.retention else (0, 0)
        record, front = paged_record(layout), len(self.front)
        address = np.array([0 if p == NO_PAGE else pool.address(arena, p) for p in pages], dtype=np.int64)
        memory = tuple(None if p == NO_PAGE else pool.page(arena, p) for p in pages)
        offsets = [i * layout.layer_bytes for i in range(len(layout.layers))]
        return tuple(
            PagedKV(record, np.where(address, address + x, 0), memory, x, self.first, None, 0, 0, front, keep, window)
            for x in offsets
        )


def paged_record(g: GroupLayout) -> RecordLayout:
    """How the kernels see the records of a group (or of its open class)."""
    return RecordLayout(
        g.page_size, g.kv_heads, g.dim_k, g.dim_v, g.codec_k.name, g.codec_v.name,
        g.k_row_bytes, g.v_row_bytes, g.v_offset, g.record_bytes, *g.scale_offsets,
    )  # fmt: skip
