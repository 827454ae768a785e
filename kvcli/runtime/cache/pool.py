"""`PagePool`: all KV memory. Knows pages and who counts on them; knows nothing of tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels.cpu.memory import Room
from kvcli.runtime.cache.grouplayout import GroupLayout
from kvcli.runtime.cache.layout import Arena, KVLayout

NO_PAGE = -1


class _Arena:
    """The pages of one arena: chunks of equal pages that never move, a free list and reference counts."""

    def __init__(self, layout: Arena, device: torch.device) -> None:
        self.layout = layout
        self.page_bytes = layout.held_bytes
        self.device = device
        self._room = Room()
        self.pages: list[torch.Tensor] = []  # uint8 [layers, layer_bytes], by page id
        self.addresses = np.zeros(1, dtype=np.int64)  # by page id, and behind them that of NO_PAGE: 0
        self.summaries: list[torch.Tensor] = []  # by page id, where there are any
        self.summary_addresses = np.zeros(0, dtype=np.int64)
        self.summarized = np.zeros(0, dtype=bool)  # whether the summary is that of the rows that are there
        self.free: list[int] = []
        self.refs: list[int] = []
        self.peak = 0

    def pages_within(self, budget_bytes: int) -> int:
        """Pages of the next chunk with so much room: as many as it has, or, where it is by page, as fit."""
        full, room = self.layout.pages_per_chunk, budget_bytes // self.page_bytes
        return full if room >= full else 0 if self.layout.by_layer else max(0, room)

    def growth_bytes(self, pages: int) -> int:
        """Bytes to commit for so many pages more than there are."""
        return self.layout.committed_bytes(pages) if self.layout.by_layer else pages * self.page_bytes

    def grow(self, pages: int) -> None:
        layers, size, first = len(self.layout.layers), self.layout.layer_bytes, len(self.pages)
        memory = self._memory(pages * layers * size)
        by_layer = self.layout.by_layer
        chunk = memory.view(layers, pages, size).transpose(0, 1) if by_layer else memory.view(pages, layers, size)
        self.pages.extend(chunk)
        self.addresses = np.append(self.addresses[:-1], [*(page.data_ptr() for page in chunk), 0])
        if isinstance(self.layout, GroupLayout) and self.layout.summarized:
            summaries = torch.zeros(pages, layers, self.layout.summary.bytes, dtype=torch.uint8, device=self.device)
            self.summaries.extend(summaries)
            self.summary_addresses = np.append(self.summary_addresses, [each.data_ptr() for each in summaries])
            self.summarized = np.append(self.summarized, np.zeros(pages, dtype=bool))
        self.refs.extend([0] * pages)
        self.free.extend(range(len(self.pages) - 1, first - 1, -1))

    def _memory(self, n_bytes: int) -> torch.Tensor:
        on_cpu = self.device.type == "cpu"
        return self._room.take(n_bytes) if on_cpu else torch.empty(n_bytes, dtype=torch.uint8, device=self.device)

    @property
    def used(self) -> int:
        return len(self.pages) - len(self.free)


class PagePool:
    """Pages of every arena of a layout (its groups, then the 16-bit classes), committed on demand under one budget.

    Ids are per arena, which is named by its number, and stay valid until the last `release`. Memory of a released page
    is kept for the next `take`.
    """

    def __init__(
        self,
        layout: KVLayout,
        budget_bytes: int | None = None,
        device: str | torch.device = "cpu",
        arenas: list[_Arena] | None = None,
    ) -> None:
        self.layout = layout
        self.budget_bytes = budget_bytes
        self.device = torch.device(device)
        self._arenas = [_Arena(a, self.device) for a in layout.arenas] if arenas is None else arenas
        self._reclaim: Callable[[int, bool], object] = lambda arena, last_resort: None
        self._soft_bytes = 0

    def under(self, layout: KVLayout, budget_bytes: int | None) -> PagePool:
        """Another pool over the same memory: a page has the same id and the same holders in both. Its layout has pages
        of the same sizes, and keeps other rows."""
        if [a.page_bytes for a in self._arenas] != [a.held_bytes for a in layout.arenas]:
            raise ValueError("the pages of the other layout have other sizes")
        return PagePool(layout, budget_bytes, self.device, self._arenas)

    def lend(self, reclaim: Callable[[int, bool], object], soft_bytes: int) -> None:
        """From now on pages may be held only in case they are of use again: `reclaim` is asked to free one of an arena
        before more than `soft_bytes` are committed, and, with True, before a page is refused."""
        self._reclaim, self._soft_bytes = reclaim, soft_bytes

    def take(self, arena: int) -> int:
        """A page with one reference; its contents are undefined. Raises DoesNotFit beyond the budget."""
        a = self._arenas[arena]
        if not a.free and self.committed_bytes + a.page_bytes > self._soft_bytes:
            self._reclaim(arena, False)
        if not a.free and not self._grow(a):
            self._reclaim(arena, True)
            if not a.free:
                raise DoesNotFit(
                    f"the KV pool is full: {self.committed_bytes:,} of {self.budget_bytes:,} bytes committed",
                    "use a smaller context or a smaller cache type",
                )
        page = a.free.pop()
        a.refs[page] = 1
        a.peak = max(a.peak, a.used)
        self.outdate(arena, page)
        return page

    def take_spare(self, arena: int) -> int | None:
        """A page for what can be done without, None where there is no room beside what others hold for now."""
        a = self._arenas[arena]
        full = a.layout.limit is not None and len(a.pages) >= a.layout.limit
        if not a.free and (full or self.committed_bytes + a.page_bytes > self._soft_bytes):
            self._reclaim(arena, False)
        return self.take(arena) if a.free or self._grow(a) else None

    def _grow(self, arena: _Arena) -> bool:
        """Commit more pages; False if the budget has no room for one."""
        pages = arena.layout.pages_per_chunk
        if arena.layout.limit is not None and len(arena.pages) >= arena.layout.limit:
            return False
        if self.budget_bytes is not None:
            pages = arena.pages_within(self.budget_bytes - self.committed_bytes)
        if pages > 0:
            arena.grow(pages)
        return pages > 0

    def has_room(self, pages: Sequence[int]) -> bool:
        """Whether so many more pages of each arena could be taken, with nobody letting go of any."""
        if self.budget_bytes is None:
            return True
        short = (max(0, wanted - len(a.free)) for a, wanted in zip(self._arenas, pages, strict=True))
        growth = (a.growth_bytes(wanted) for a, wanted in zip(self._arenas, short, strict=True))
        return self.committed_bytes + sum(growth) <= self.budget_bytes

    def retain(self, arena: int, page: int) -> None:
        """One more holder of a page that somebody holds."""
        refs = self._arenas[arena].refs
        if refs[page] < 1:
            raise ValueError(f"page {page} of arena {arena} is free and cannot be retained")
        refs[page] += 1

    def release(self, arena: int, page: int) -> None:
        """One holder less; the last one returns the page to the pool."""
        a = self._arenas[arena]
        if a.refs[page] < 1:
            raise ValueError(f"page {page} of arena {arena} is free and cannot be released")
        a.refs[page] -= 1
        if a.refs[page] == 0:
            a.free.append(page)

    def copy(self, arena: int, page: int) -> int:
        """A new page with the same bytes and one reference."""
        new = self.take(arena)
        a = self._arenas[arena]
        a.pages[new].copy_(a.pages[page])
        return new

    def refcount(self, arena: int, page: int) -> int:
        return self._arenas[arena].refs[page]

    def page(self, arena: int, page: int) -> torch.Tensor:
        """The page's memory: uint8 [layers, layer_bytes], writable; in one piece unless chunks are by layer."""
        return self._arenas[arena].pages[page]

    def addresses(self, arena: int, pages: np.ndarray) -> np.ndarray:
        """Where the first layer of each of these pages, int64 [n], is, 0 for NO_PAGE: int64 [n]. See
        `GroupLayout.layer_stride`."""
        return self._arenas[arena].addresses[pages]

    def outdate(self, arena: int, page: int) -> None:
        """The page is written to: its summary, where it has one, is to be made again."""
        a = self._arenas[arena]
        if len(a.summarized):
            a.summarized[page] = False

    def summaries(self, arena: int, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the summary of the first layer of each of these pages, int64 [n], is, int64 [n], and which are still to
        be made, bool [n]."""
        a = self._arenas[arena]
        return a.summary_addresses[pages], ~a.summarized[pages]

    def summary(self, arena: int, page: int) -> torch.Tensor:
        """What tells of the page's keys (`SummaryLayout`): uint8 [layers, bytes], writable; see `settle_summaries`."""
        return self._arenas[arena].summaries[page]

    def settle_summaries(self, arena: int, pages: np.ndarray) -> None:
        """The summaries of these pages, int64 [n], have been made."""
        self._arenas[arena].summarized[pages] = True

    def used(self, arena: int) -> int:
        """Pages of the arena that somebody holds."""
        return self._arenas[arena].used

    def peak(self, arena: int) -> int:
        """Most pages of the arena that were held at once."""
        return self._arenas[arena].peak

    @property
    def used_bytes(self) -> int:
        return sum(a.used * a.page_bytes for a in self._arenas)

    @property
    def committed_bytes(self) -> int:
        return self.committed(range(len(self._arenas)))

    def committed(self, arenas: Iterable[int]) -> int:
        """Bytes that are committed of these arenas."""
        return sum(len(self._arenas[i].pages) * self._arenas[i].page_bytes for i in arenas)

    def check(self, holders: Iterable[tuple[int, int]]) -> None:
        """Compare the counts with the (arena, page) pairs that holders report. Raises ValueError on a difference."""
        held = Counter(holders)
        for arena, a in enumerate(self._arenas):
            free = set(a.free)
            if len(free) != len(a.free):
                raise ValueError(f"arena {arena}: a page is on the free list twice")
            for page, refs in enumerate(a.refs):
                if refs != held[arena, page]:
                    raise ValueError(f"arena {arena} page {page}: {refs} references, {held[arena, page]} holders")
                if (page in free) != (refs == 0):
                    raise ValueError(f"arena {arena} page {page}: {refs} references, on the free list: {page in free}")
