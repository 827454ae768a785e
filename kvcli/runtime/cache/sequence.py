"""`Sequence`: the tokens of one context and their pages. `Part`: rows of one that a step computes. `Step`: one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels import Basis, PagedKV
from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.cache.pagelist import NO_PAGE, Bases, Layers, PageList
from kvcli.runtime.cache.pool import PagePool


@dataclass(frozen=True)
class Part:
    """Rows [start, start + T) of a sequence, ready for a model: ids int64 [T], on the host, and every layer's cache."""

    ids: torch.Tensor
    start: int
    groups: tuple[Layers, ...]  # by group
    slots: tuple[tuple[int, int] | None, ...]

    def kv(self, layer: int) -> PagedKV:
        """The cache of one model layer."""
        slot = self.slots[layer]
        if slot is None:
            raise ValueError(f"layer {layer} keeps no rows")
        return self.groups[slot[0]][slot[1]]

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Step:
    """One forward pass: parts of different sequences, one after the other. What has no look at the cache is computed
    for all their rows at once."""

    parts: tuple[Part, ...]

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [T], of all parts."""
        return self.parts[0].ids if len(self.parts) == 1 else torch.cat([part.ids for part in self.parts])

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], Part], ...]:
        """Each part, with its rows [lo, hi) among those of the step."""
        ends = tuple(itertools.accumulate(len(part.ids) for part in self.parts))
        return tuple(((end - len(part.ids), end), part) for part, end in zip(self.parts, ends, strict=True))


def chunk_end(start: int, end: int, ubatch: int, page_size: int) -> int:
    """Where a prefill step that begins with row `start`, of rows up to `end`, ends: it has at most `ubatch` rows, and
    reaches into no more pages than so many need."""
    return min(end, start + ubatch, (start // page_size + -(-ubatch // page_size)) * page_size)


class Sequence:
    """Token ids whose rows are in the cache, and one page list per layer group.

    `reserve` -> run the model -> `commit` appends rows; `rewind` takes rows back; `fork` shares all pages, and a
    shared page is copied before it is written to. Pages that no later query sees are let go of: those behind a sliding
    window, and evicted ones. A token's position is its index in `tokens`, whatever was evicted before it.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tokens: list[int] = []
        self._lists = [PageList(len(g.layers)) for g in pool.layout.groups]

    @property
    def length(self) -> int:
        """Tokens so far, and the position of the next one; see `kept` for rows."""
        return len(self.tokens)

    @property
    def evicted(self) -> int:
        """Tokens that the last one did not see because they were evicted. With none, no row depends on the policy."""
        retention = self.pool.layout.retention
        return retention.gap(self.length - 1) if retention and self.length else 0

    @property
    def kept(self) -> int:
        """Rows that the last token saw, sliding windows aside: never more than the context has room for."""
        return self.length - self.evicted

    def losses(self) -> tuple[str, ...]:
        """Why the rows are not those of a 16-bit cache that keeps everything: () = they are."""
        found = [f"evicted: {self.evicted:,} tokens, kept {self.pool.layout.retention}"] if self.evicted else []
        sealed = {(g.codec_k.name, g.codec_v.name) for g in self.pool.layout.groups if g.sealed}
        return (*found, *(f"quantized: keys {k}, values {v}" for k, v in sorted(sealed)))

    def reserve(self, ids: list[int]) -> Part:
        """Pages for `ids` as the next rows: this sequence's part of a step that computes them.

        Pages that fell out of a window are released first. Raises DoesNotFit, with nothing changed but that.
        """
        self.drop()
        self._trim(self.length)  # pages of a step that was never committed: a fork may hold them too
        start, end = self.length, self.length + len(ids)
        try:
            for g in range(len(self._lists)):
                self._take(g, start, end)
        except DoesNotFit:
            self._trim(start)
            raise
        return Part(torch.tensor(ids, dtype=torch.int64), start, self.views(), self.pool.layout.slots)

    def _take(self, group: int, start: int, end: int) -> None:
        """The pages of one group that rows [start, end) go into, and those that they fill."""
        held, size = self._lists[group], self.pool.layout.page_size
        arena = self.pool.layout.open_arena(group)
        if arena is None:
            index = start // size - held.first
            if start % size and index < len(held.pages):
                held.pages[index] = self._own(group, held.pages[index])
            while (held.first + len(held.pages)) * size < end:
                held.pages.append(self.pool.take(group))
            return
        layout = self.pool.layout.groups[group]
        if start % size:
            at = start // size
            held.open[at] = self._own(arena, held.open[at]) if at in held.open else self.pool.take(arena)
        for page in range(-(-start // size), -(-end // size)):
            held.open[page] = self.pool.take(arena)
            held.pages.append(NO_PAGE)
        first, last = layout.newly_sealed(start, end)
        for page in range(first // size, -(-last // size)):
            index = page - held.first
            if held.pages[index] == NO_PAGE:
                held.pages[index] = self.pool.take(group)
            else:
                held.pages[index] = self._own(group, held.pages[index])

    def _own(self, arena: int, page: int) -> int:
        """The page itself if nobody else holds it, else a copy in its place."""
        if self.pool.refcount(arena, page) == 1:
            return page
        try:
            copy = self.pool.copy(arena, page)
        except DoesNotFit:
            if self.pool.refcount(arena, page) == 1:  # the others let go of it to make room
                return page
            raise
        self.pool.release(arena, page)
        return copy

    def commit(self, ids: list[int]) -> None:
        """The rows of the last step are computed, and the pages they filled are sealed."""
        self.tokens.extend(ids)
        for g, (held, layout) in enumerate(zip(self._lists, self.pool.layout.groups, strict=True)):
            sealed = -(-layout.sealed_rows(self.length) // layout.page_size)
            for page in [p for p in held.open if layout.sinks <= p < sealed]:
                self.pool.release(self._open_arena(g), held.open.pop(page))

    def drop(self) -> int:
        """Release pages that no query from here on can see; returns how many."""
        dropped = 0
        for g, (held, layout) in enumerate(zip(self._lists, self.pool.layout.groups, strict=True)):
            first = layout.first_page(self.length)
            kept = layout.retention.kept_pages if layout.retention else 0
            while held.first < first and held.pages:
                page = held.pages.pop(0)
                if held.first < kept:
                    held.front.append(page)
                else:
                    self._release(g, held.first, page)
                    dropped += 1
                held.first += 1
        return dropped

    def rewindable(self, length: int) -> int:
        """The longest prefix of at most `length` rows that can be gone back to.

        Windows must still be whole, those of a retention too, and a sealed page cannot be opened again.
        """
        length, size = min(length, self.length), self.pool.layout.page_size
        for held, layout in zip(self._lists, self.pool.layout.groups, strict=True):
            if layout.sealed and layout.tail and length // size not in held.open:
                length = length // size * size
        for held, layout in zip(self._lists, self.pool.layout.groups, strict=True):
            if layout.first_page(length) < held.first:
                return 0
        return length

    def rewind(self, length: int) -> None:
        """Keep the first `length` rows. Raises ValueError if that cannot be (see `rewindable`)."""
        if not 0 <= length <= self.length or self.rewindable(length) != length:
            raise ValueError(f"cannot go back to {length} of {self.length} rows")
        self._trim(length)
        del self.tokens[length:]

    def rewind_to(self, length: int) -> int:
        """Keep the first `length` rows, fewer where rows are gone that their windows need; returns the rows kept."""
        kept = self.rewindable(length)
        self.rewind(kept)
        return kept

    def _trim(self, length: int) -> None:
        """Release the pages behind row `length`, and a sealed page that is being filled again."""
        size = self.pool.layout.page_size
        keep = -(-length // size)
        for g, (held, layout) in enumerate(zip(self._lists, self.pool.layout.groups, strict=True)):
            while held.pages and held.first + len(held.pages) > keep:
                page = held.first + len(held.pages) - 1
                self._release(g, page, held.pages.pop())
            if layout.tail and keep - 1 in held.open and held.pages[-1] != NO_PAGE:
                self.pool.release(g, held.pages[-1])  # taken for rows that did not come
                held.pages[-1] = NO_PAGE
            if length == 0:
                while held.front:
                    page = len(held.front) - 1
                    self._release(g, page, held.front.pop())
                held.first = 0
            if length < size and (length < self.length or any(basis.known for basis in held.bases)):
                held.bases = tuple(Basis() for _ in held.bases)  # a fork may go on with the old ones

    def _release(self, group: int, number: int, page: int) -> None:
        """Let go of page `number` of a group in both of its forms."""
        if page != NO_PAGE:
            self.pool.release(group, page)
        opened = self._lists[group].open.pop(number, None)
        if opened is not None:
            self.pool.release(self._open_arena(group), opened)

    def _open_arena(self, group: int) -> int:
        arena = self.pool.layout.open_arena(group)
        if arena is None:
            raise ValueError(f"group {group} has no open pages")
        return arena

    def fork(self) -> Sequence:
        """A sequence with the same rows, sharing every page."""
        twin = Sequence(self.pool)
        twin.tokens = list(self.tokens)
        for mine, theirs in zip(self._lists, twin._lists, strict=True):
            theirs.first, theirs.pages, theirs.open = mine.first, list(mine.pages), dict(mine.open)
            theirs.front = list(mine.front)
            if self.length >= self.pool.layout.page_size:
                theirs.bases = mine.bases
        for arena, page in self.holds():
            self.pool.retain(arena, page)
        return twin

    def close(self) -> None:
        """Release every page; the sequence is empty afterwards."""
        for arena, page in self.holds():
            self.pool.release(arena, page)
        self._lists = [PageList(len(g.layers)) for g in self.pool.layout.groups]
        self.tokens.clear()

    def numbered(self) -> dict[PageKey, int]:
        """Every page held, by its key."""
        found: dict[PageKey, int] = {}
        for g, held in enumerate(self._lists):
            pages = (*enumerate(held.front), *enumerate(held.pages, held.first))
            found.update(((g, number), page) for number, page in pages if page != NO_PAGE)
            found.update(((self._open_arena(g), number), page) for number, page in held.open.items())
        return found

    @property
    def bases(self) -> Bases:
        """Of each group, of each of its layers."""
        return tuple(held.bases for held in self._lists)

    def adopt(self, tokens: list[int], pages: Mapping[PageKey, int], bases: Bases) -> None:
        """Have these rows instead of its own: those of `tokens`, in `pages`, which get one more holder each.

        Only pages that a sequence of this length holds may be given; see `prefixpages.needed`.
        """
        for (arena, _), page in pages.items():
            self.pool.retain(arena, page)
        self.close()
        self.tokens = list(tokens)
        size = self.pool.layout.page_size
        for g, (held, layout) in enumerate(zip(self._lists, self.pool.layout.groups, strict=True)):
            held.first, opened = layout.first_page(self.length), self.pool.layout.open_arena(g)
            numbers = layout.held_pages(self.length)
            held.front = [pages.get((g, number), NO_PAGE) for number in numbers if number < held.first]
            held.pages = [pages.get((g, number), NO_PAGE) for number in numbers if number >= held.first]
            if opened is not None:
                held.open = {number: pages[opened, number] for number in numbers if (opened, number) in pages}
            if self.length >= size:
                held.bases = bases[g]

    def holds(self) -> Iterator[tuple[int, int]]:
        """(arena, page) for every reference this sequence has, for `PagePool.check`."""
        return ((arena, page) for (arena, _), page in self.numbered().items())

    def pages(self, arena: int) -> int:
        """Pages of the arena that this sequence holds."""
        return sum(a == arena for a, _ in self.holds())

    @property
    def page_utilization(self) -> float | None:
        """The share of the pages held, by their bytes, that is rows which are of use; None = there are no pages."""
        arenas, size, held = self.pool.layout.arenas, self.pool.layout.page_size, self.numbered()
        total = size * sum(arenas[arena].page_bytes for arena, _ in held)
        used = sum(arenas[a].page_bytes * arenas[a].rows_in_use(number, self.length) for a, number in held)
        return used / total if total else None

    def views(self) -> tuple[Layers, ...]:
        """The cache as the kernels see it, by group."""
        return tuple(self._lists[g].views(self.pool, g) for g in range(len(self._lists)))
