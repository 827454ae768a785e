"""`PageList`: which pages hold the rows of one layer group of a sequence, and how the kernels see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvcli.kernels import Basis, PagedKV
from kvcli.runtime.cache.pool import NO_PAGE, PagePool

Bases = tuple[tuple[Basis, ...], ...]  # of each group, of each of its layers


class Memory(Sequence[torch.Tensor | None]):
    """The memory of each of some pages: see `PagePool.page`; None for NO_PAGE."""

    def __init__(self, pool: PagePool, arena: int, pages: list[int]) -> None:
        self._pool, self._arena, self._pages = pool, arena, pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, at: int) -> torch.Tensor | None:  # type: ignore[override]
        page = self._pages[at]
        return None if page == NO_PAGE else self._pool.page(self._arena, page)


class Layers:
    """The layers of a group over the pages of a list, each made when it is first asked for."""

    def __init__(self, count: int, of_layer: Callable[[int], PagedKV]) -> None:
        self._of_layer = of_layer
        self._made: list[PagedKV | None] = [None] * count

    def __len__(self) -> int:
        return len(self._made)

    def __getitem__(self, layer: int) -> PagedKV:
        made = self._made[layer]
        if made is None:
            made = self._made[layer] = self._of_layer(layer)
        return made

    def __iter__(self) -> Iterator[PagedKV]:
        return map(self.__getitem__, range(len(self)))


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
        self._made: tuple[tuple[object, ...], tuple[Basis, ...], Layers] | None = None

    def views(self, pool: PagePool, group: int) -> Layers:
        """The layers of the group as the kernels see them; made again only when the pages change."""
        key = self.first, tuple(self.front), tuple(self.pages), tuple(self.open.items())
        if self._made and self._made[0] == key and self._made[1] is self.bases:
            return self._made[2]
        layout, arena, bases = pool.layout.groups[group], pool.layout.open_arena(group), self.bases
        of_layer = self._in_arena(pool, group, [*self.front, *self.pages])
        if arena is not None:
            numbers = (*range(len(self.front)), *range(self.first, self.first + len(self.pages)))
            plain, opened = of_layer, self._in_arena(pool, arena, [self.open.get(n, NO_PAGE) for n in numbers])

            def of_layer(i: int) -> PagedKV:
                return replace(plain(i), open=opened(i), sinks=layout.sinks, tail=layout.tail, basis=bases[i])

        self._made = key, bases, Layers(len(layout.layers), of_layer)
        return self._made[2]

    def _in_arena(self, pool: PagePool, arena: int, pages: list[int]) -> Callable[[int], PagedKV]:
        """What makes a layer of an arena over these pages, whose numbers are those of the list."""
        layout = pool.layout.arenas[arena]
        keep, window = (layout.retention.keep, layout.retention.window) if layout.retention else (0, 0)
        record, first, front = layout.record, self.first, len(self.front)
        address, memory = pool.addresses(arena, pages), Memory(pool, arena, pages)

        def of_layer(i: int) -> PagedKV:
            there = np.where(address, address + i * layout.layer_stride, 0)
            return PagedKV(record, there, memory, i, first, None, 0, 0, front, keep, window)

        return of_layer
