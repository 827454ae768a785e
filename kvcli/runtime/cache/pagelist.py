"""`PageList`: which pages hold the rows of one layer group of a sequence, and who sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels import NEVER, Basis, Entries, Into, PagedKV, Summaries
from kvcli.runtime.cache.attending import PageChoice
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.layout import GroupLayout
from kvcli.runtime.cache.pool import NO_PAGE, PagePool
from kvcli.runtime.cache.shown import Shown
from kvcli.runtime.config import CHUNKED, WINDOWED

Bases = tuple[tuple[Basis, ...], ...]  # of each group, of each of its layers


class PoolMemory(Sequence[torch.Tensor | None]):
    """The memory of each of some pages, int64 [n]: see `PagePool.page`; None for NO_PAGE."""

    def __init__(self, pool: PagePool, arena: int, pages: np.ndarray) -> None:
        self._pool, self._arena, self._pages = pool, arena, pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, at: int) -> torch.Tensor | None:  # type: ignore[override]
        page = self._pages[at]
        return None if page == NO_PAGE else self._pool.page(self._arena, page)

    @property
    def pages(self) -> np.ndarray:
        """Their numbers in the pool: int64 [n]."""
        return self._pages

    @property
    def addresses(self) -> np.ndarray:
        """Of the first layer's: int64 [n]."""
        return self._pool.addresses(self._arena, self._pages)


class PoolSummaries(Sequence[torch.Tensor | None]):
    """The summary of each of some pages: see `PagePool.summary`."""

    def __init__(self, pool: PagePool, arena: int, pages: np.ndarray) -> None:
        self._pool, self._arena, self._pages = pool, arena, pages
        self.settled = False  # whether all that are chosen among were there once

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, at: int) -> torch.Tensor | None:  # type: ignore[override]
        return self._pool.summary(self._arena, self._pages[at])

    @property
    def addresses(self) -> np.ndarray:
        """Of the first layer's: int64 [n]."""
        return self._pool.summaries(self._arena, self._pages)[0]

    @property
    def missing(self) -> np.ndarray:
        """Which are still to be made: bool [n]."""
        return self._pool.summaries(self._arena, self._pages)[1]

    def settle(self, made: np.ndarray) -> None:
        """The summaries at these places have been made: all are there."""
        self._pool.settle_summaries(self._arena, self._pages[made])
        self.settled = True


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


class Form:
    """The pages of one arena that a sequence holds, by their numbers, the lowest first: page n has the rows from
    position n * page_size on."""

    def __init__(self, pool: PagePool, arena: int) -> None:
        self.pool, self.arena = pool, arena
        self.pages: dict[int, int] = {}
        self.changes = 0  # so far

    def put(self, number: int, page: int) -> None:
        """A page that the sequence holds now."""
        self.pages[number] = page
        self.changes += 1

    def take(self, number: int) -> None:
        """Have a page that nobody else holds, to be written to. Raises DoesNotFit, with nothing changed."""
        held = self.pages.get(number)
        page = self.pool.take(self.arena) if held is None else self._own(held)
        if page != held:
            self.put(number, page)
        else:
            self.pool.outdate(self.arena, page)

    def _own(self, page: int) -> int:
        """The page itself if nobody else holds it, else a copy in its place."""
        if self.pool.refcount(self.arena, page) == 1:
            return page
        try:
            copy = self.pool.copy(self.arena, page)
        except DoesNotFit:
            if self.pool.refcount(self.arena, page) == 1:  # the others let go of it to make room
                return page
            raise
        self.pool.release(self.arena, page)
        return copy

    def release(self, numbers: Iterable[int]) -> int:
        """Let go of those of these pages that are there; returns how many."""
        found = [number for number in numbers if number in self.pages]
        for number in found:
            self.pool.release(self.arena, self.pages.pop(number))
        self.changes += len(found)
        return len(found)

    def below(self, number: int) -> Iterator[int]:
        """Numbers of the pages before that one."""
        return itertools.takewhile(lambda n: n < number, self.pages)

    def behind(self, number: int) -> Iterator[int]:
        """Numbers of that page and those behind it, the last first."""
        return itertools.takewhile(lambda n: n >= number, reversed(self.pages))

    @property
    def numbers(self) -> np.ndarray:
        """Of its pages: int64 [n], ascending."""
        return np.fromiter(self.pages, np.int64, len(self.pages))

    def memory(self, numbers: np.ndarray, of: np.ndarray) -> PoolMemory:
        """Of the pages with the numbers `of`, which are some of `numbers`."""
        pages = np.fromiter(self.pages.values(), np.int64, len(self.pages))
        found = pages if of is numbers else pages[numbers.searchsorted(of)]
        return PoolMemory(self.pool, self.arena, found)

    def into(self, numbers: range, page_size: int, whole: bool) -> Into:
        """Those of these pages that are there, to be written to."""
        pages = np.array([self.pages.get(number, NO_PAGE) for number in numbers], np.int64)
        memory = PoolMemory(self.pool, self.arena, pages)
        return Into(numbers.start * page_size, memory.addresses, memory, whole)


@dataclass(frozen=True, eq=False)
class Selected:
    """Rows that were selected of those at positions before `below`: `rows` in each layer and KV head, in the first
    pages, no longer in order; those behind them up to `below` are gone. `positions`: in the text, int32 [layers,
    kv_heads, rows]."""

    rows: int
    below: int
    positions: torch.Tensor


class PageList:
    """Pages of one group, in one form or in two: where the group is sealed, a page stands in `open` until it is full,
    then in `closed`; sinks stay open.

    `layout` is the group's, with what stays of this sequence.
    """

    def __init__(self, pool: PagePool, group: int, retention: Retention | None = None) -> None:
        """`retention`: what stays of the sequence, where that is not what the pool's layout says. Sliding groups have
        windows of their own."""
        shared = pool.layout.groups[group]
        own = retention is not None and not shared.window
        self.layout = replace(shared, retention=retention) if own else shared
        opened = pool.layout.open_arena(group)
        self.closed, self.open = Form(pool, group), None if opened is None else Form(pool, opened)
        self.bases = tuple(Basis() for _ in shared.layers)
        self.selected: Selected | None = None
        self._made: tuple[tuple[object, ...], tuple[Basis, ...], Layers] | None = None

    @property
    def forms(self) -> tuple[Form, ...]:
        return (self.closed,) if self.open is None else (self.closed, self.open)

    def has(self, numbers: Iterable[int]) -> bool:
        """Whether all of these pages are there, in one form or the other."""
        return not set(numbers).difference(*(form.pages for form in self.forms))

    @property
    def selects(self) -> bool:
        """Whether rows may be selected: not in layers with a window or chunks of their own."""
        return self.layout.kind not in WINDOWED

    @property
    def evicted(self) -> int:
        """Rows that were not selected."""
        return self.selected.below - self.selected.rows if self.selected else 0

    def numbers(self, length: int) -> list[int]:
        """Numbers of the pages that the first `length` rows need; see `GroupLayout.held_pages`."""
        if self.selected is None:
            return self.layout.held_pages(length)
        size = self.layout.page_size
        return [*_pages(0, self.selected.rows, size), *_pages(self.selected.below, length, size)]

    def places(self, length: int) -> torch.Tensor:
        """Where the first `length` rows stand, as page number * page size + slot: int64 [n], on the host."""
        if self.selected is None:
            return torch.arange(length)
        return torch.cat([torch.arange(self.selected.rows), torch.arange(self.selected.below, length)])

    def positions(self, layer: int, places: torch.Tensor, heads: torch.Tensor | None = None) -> torch.Tensor:
        """Positions in the text of rows of a layer: int64, of places [kv_heads, n], or [n] with `heads` [n]."""
        if self.selected is None:
            return places.clone()
        known, rows = self.selected.positions[layer].long().to(places.device), self.selected.rows
        at = places.clamp(max=rows - 1)
        return torch.where(places < rows, known.gather(1, at) if heads is None else known[heads, at], places)

    def own(self, rows: int) -> None:
        """Have the pages of the first `rows` places, which nobody else holds, to be written to. Raises DoesNotFit."""
        for number in _pages(0, rows, self.layout.page_size):
            is_open = self.open is not None and number < self.layout.sinks
            (self.open if is_open and self.open is not None else self.closed).take(number)

    def keep(self, selected: Selected) -> None:
        """Let go of the pages of rows that were not selected; those that were have been moved."""
        self.selected, size = selected, self.layout.page_size
        for form in self.forms:
            form.release(range(-(-selected.rows // size), selected.below // size))
            form.pages = dict(sorted(form.pages.items()))  # `own` may have taken one before others
            form.changes += 1

    def take(self, start: int, end: int) -> None:
        """The pages that rows [start, end) go into, and those that they fill. Raises DoesNotFit."""
        layout = self.layout
        for number in _pages(start, end, layout.page_size):
            (self.open or self.closed).take(number)
        if self.open is not None:
            for number in _pages(*layout.newly_sealed(start, end), layout.page_size):
                self.closed.take(number)

    def drop(self, length: int) -> int:
        """Let go of what no query from position `length` on sees; returns how many pages."""
        layout = self.layout
        first, kept = layout.first_page(length), layout.kept_pages
        if first <= kept:
            return 0
        return sum(form.release([n for n in form.below(first) if n >= kept]) for form in self.forms)

    def seal(self, length: int) -> None:
        """Let go of open pages that stand sealed now that the first `length` rows are computed."""
        if self.open is not None:
            layout = self.layout
            sealed = -(-layout.sealed_rows(length) // layout.page_size)
            self.open.release([n for n in self.open.below(sealed) if n >= layout.sinks])

    def trim(self, length: int) -> None:
        """Let go of the pages behind row `length`, and of a sealed page that is being filled again."""
        end = -(-length // self.layout.page_size)
        if self.selected and length < self.selected.below:
            self.selected, end = None, 0
        for form in self.forms:
            form.release(list(form.behind(end)))
        if self.open is not None and self.layout.tail and end - 1 in self.open.pages:
            self.closed.release([end - 1])  # taken for rows that did not come

    def views(self, start: int, end: int, chosen: PageChoice | None = None) -> Layers:
        """The layers of the group as kernels see them in a step of rows [start, end); made again only when the list
        changes. `chosen`: what its queries read of pages with a summary; None = all."""
        layout = self.layout
        into, evicts = _pages(start, end, layout.page_size), layout.retention
        chosen = chosen if layout.summarized else None
        changes = tuple(form.changes for form in self.forms)
        key = into, changes, evicts, evicts.start(start) if evicts else layout.chunk_start(start), chosen
        if self._made is None or self._made[0] != key or self._made[1] is not self.bases:
            make = self._layers(start, into, chosen)
            self._made = key, self.bases, Layers(len(layout.layers), make)
        return self._made[2]

    def _layers(self, start: int, into: range, chosen: PageChoice | None) -> Callable[[int], PagedKV]:
        """What makes a layer of the group for a step from row `start` on, which writes into the pages `into`."""
        layout, bases = self.layout, self.bases
        opened, plain, stride = layout.open_class, self._listed(self.closed, start, into), layout.layer_stride
        choice = None
        if chosen is not None:
            among = chosen.candidates(plain[0], layout.page_size)
            choice = chosen.choice(len(among))
            plain = (replace(plain[0], summaries=self._summaries(plain[0], among)), plain[1]) if choice else plain
        if self.open is None or opened is None:
            return lambda i: PagedKV(layout.record, *plain, i, i * stride, None, bases[i], choice)
        beside = self._listed(self.open, start, into)

        def of_layer(i: int) -> PagedKV:
            other = PagedKV(opened.record, *beside, i, i * opened.layer_stride)
            return PagedKV(layout.record, *plain, i, i * stride, other, bases[i], choice)

        return of_layer

    def _summaries(self, entries: Entries, among: np.ndarray) -> Summaries:
        """Of the entries at the places `among` of the closed class."""
        assert isinstance(entries.memory, PoolMemory)
        addresses = np.zeros(len(entries), np.int64)
        found = PoolSummaries(self.closed.pool, self.closed.arena, entries.memory.pages)
        addresses[among] = found.addresses[among]
        return Summaries(addresses, found, self.layout.summary)

    def _listed(self, form: Form, start: int, into: range) -> tuple[Entries, Into]:
        """The class of pages that `form` holds: what queries from `start` on see of it, and what is written to."""
        size, numbers = self.layout.page_size, form.numbers
        shown = self._shown(numbers)
        closed = _read_closed(self.layout, shown.page)
        shown = shown.limited(closed, NEVER, start) if form is self.closed else shown.limited(0, closed, start)
        memory = form.memory(numbers, shown.page)
        entries = Entries(
            memory.addresses, shown.page * size, shown.lo, shown.hi, shown.since, shown.until, shown.turned, memory
        )
        return entries, form.into(into, size, self.layout.tail > 0)

    def _shown(self, pages: np.ndarray) -> Shown:
        """What is shown of these pages, whichever form they are in."""
        layout, size = self.layout, self.layout.page_size
        shown = layout.retention.shown(pages) if layout.retention else Shown.whole(pages, size)
        if self.selected:
            end = np.where(pages * size < self.selected.below, self.selected.rows, NEVER)
            shown = replace(shown, hi=np.minimum(shown.hi, end - pages * size))
        return shown.chunked(layout.window, size) if layout.kind == CHUNKED else shown


def _read_closed(layout: GroupLayout, pages: np.ndarray) -> np.ndarray:
    """The first query that reads these pages as they are when they are full, int64 [n]: those before read 16 bits."""
    if not layout.sealed:
        return np.zeros_like(pages)
    return np.where(pages < layout.sinks, NEVER, (pages + 1) * layout.page_size if layout.tail else 0)


def _pages(start: int, end: int, page_size: int) -> range:
    """Numbers of the pages that have rows [start, end)."""
    return range(start // page_size, -(-end // page_size)) if start < end else range(0)
