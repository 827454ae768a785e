"""`WindowTrail` and `HeldPages`: rows of a sequence that are yet to be written to a file while it goes on."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache.marks import Mark, pages_of
from kvcli.runtime.promptcache.pagefiles import host_bytes
from kvcli.runtime.promptcache.prefixpages import REWIND_ROWS


class WindowTrail:
    """What windows leave behind near the end of a prompt of `end` tokens and at its `marks`, in host memory: the pool
    lets go of it."""

    def __init__(self, layout: KVLayout, end: int) -> None:
        self.layout, self.end = layout, end
        self.marks: list[Mark] = []
        self._ends = pages_of(layout, end) if layout.grain > 1 else set()  # of the prompt's last block, from its start
        self.marked = self._ends  # what marks need
        self.copies: dict[PageKey, memoryview] = {}

    def mark(self, marks: Iterable[Mark]) -> None:
        """Keep what is needed to start from these."""
        self.marks = list(marks)
        self.marked = self._ends.union(*(pages_of(self.layout, mark.at) for mark in self.marks))

    def wants(self, key: PageKey, length: int) -> bool:
        """Whether a sequence of `length` rows lets go of this page, and it is near enough to the end, or marked."""
        if key[0] >= len(self.layout.row_arenas):
            return False
        arena, number = self.layout.row_arenas[key[0]], key[1]
        if not arena.windowed or not arena.kept_pages <= number < arena.first_page(length):
            return False
        return key in self.marked or number >= arena.first_page(max(0, self.end - REWIND_ROWS))

    def follow(self, seq: Sequence, there: Container[PageKey] = ()) -> None:
        """Copy what the next step lets go of and is not `there` already. To be called after every step of the
        prompt."""
        for key, page in seq.numbered().items():
            if key not in self.copies and key not in there and self.wants(key, seq.length):
                self.copies[key] = memoryview(bytes(host_bytes(seq.pool.page(key[0], page))))

    def leaving(self, seq: Sequence) -> set[PageKey]:
        """The marked pages that the next step lets go of."""
        return {key for key in seq.numbered() if key in self.marked and self.wants(key, seq.length)}


class HeldPages:
    """The pages `keys` of a sequence as they are now, and of its trail.

    Full pages get one more holder, for they do not change; of the others there are copies. `close` lets go.
    """

    def __init__(self, seq: Sequence, copies: dict[PageKey, memoryview], keys: Iterable[PageKey]) -> None:
        self.pool: PagePool = seq.pool
        self.bases = seq.bases
        self.pages: dict[PageKey, int] = {}
        self.copies: dict[PageKey, memoryview] = {}
        size, found = self.pool.layout.page_size, seq.numbered()
        for key in keys:
            if key not in found:
                self.copies[key] = copies[key]
            elif (key[1] + 1) * size <= seq.length:
                self.pool.retain(key[0], found[key])
                self.pages[key] = found[key]
            else:
                self.copies[key] = memoryview(bytes(host_bytes(self.pool.page(key[0], found[key]))))

    def buffer(self, key: PageKey) -> memoryview:
        """The bytes of one page. On a GPU a new copy."""
        return self.copies[key] if key in self.copies else host_bytes(self.pool.page(key[0], self.pages[key]))

    def close(self) -> None:
        for (arena, _), page in self.pages.items():
            self.pool.release(arena, page)
        self.pages = {}

    def holds(self) -> Iterator[tuple[int, int]]:
        """(arena, page) of every reference, for `PagePool.check`."""
        return ((arena, page) for (arena, _), page in self.pages.items())
