"""`Sequence`: the tokens of one context and which pages hold their rows. `Step`: one forward pass over it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels import PagedKV, RecordLayout
from kvcli.runtime.layout import GroupLayout
from kvcli.runtime.pages import PagePool


@dataclass(frozen=True)
class Step:
    """Rows [start, start + T) of a sequence, ready for a model: ids int64 [T] and every layer's cache."""

    ids: torch.Tensor
    start: int
    groups: tuple[tuple[PagedKV, ...], ...]  # by group, by layer of the group
    slots: tuple[tuple[int, int] | None, ...]

    def kv(self, layer: int) -> PagedKV:
        """The cache of one model layer."""
        slot = self.slots[layer]
        if slot is None:
            raise ValueError(f"layer {layer} keeps no rows")
        return self.groups[slot[0]][slot[1]]


class _PageList:
    """Pages of one group: `pages[i]` holds positions (first + i) * page_size and on."""

    def __init__(self) -> None:
        self.first = 0
        self.pages: list[int] = []


class Sequence:
    """Token ids whose rows are in the cache, and one page list per layer group.

    `reserve` -> run the model -> `commit` appends rows; `rewind` takes rows back; `fork` shares all pages, and a
    shared page is copied before it is written to. Sliding groups let go of pages that no later query sees.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tokens: list[int] = []
        self._lists = [_PageList() for _ in pool.layout.groups]
        self._records = tuple(_record(g) for g in pool.layout.groups)
        self._views: dict[int, tuple[tuple[int, ...], tuple[PagedKV, ...]]] = {}

    @property
    def length(self) -> int:
        """Rows kept."""
        return len(self.tokens)

    def reserve(self, ids: list[int]) -> Step:
        """Pages for `ids` as the next rows, and the step that computes them.

        Pages that fell out of a window are released first. Raises DoesNotFit, with nothing changed but that.
        """
        self.drop()
        self._trim(self.length)  # pages of a step that was never committed: a fork may hold them too
        start, end, size = self.length, self.length + len(ids), self.pool.layout.page_size
        for g, held in enumerate(self._lists):
            index = start // size - held.first
            try:
                if start % size and self.pool.refcount(g, held.pages[index]) > 1:
                    shared = held.pages[index]
                    held.pages[index] = self.pool.copy(g, shared)
                    self.pool.release(g, shared)
                while (held.first + len(held.pages)) * size < end:
                    held.pages.append(self.pool.take(g))
            except DoesNotFit:
                self._trim(start)
                raise
        return Step(
            torch.tensor(ids, dtype=torch.int64),
            start,
            tuple(self._view(g) for g in range(len(self._lists))),
            self.pool.layout.slots,
        )

    def commit(self, ids: list[int]) -> None:
        """The rows of the last step are computed."""
        self.tokens.extend(ids)

    def drop(self) -> int:
        """Release pages that no query from here on can see; returns how many."""
        dropped = 0
        for g, (held, layout) in enumerate(zip(self._lists, self.pool.layout.groups, strict=True)):
            first = layout.first_page(self.length)
            while held.first < first and held.pages:
                self.pool.release(g, held.pages.pop(0))
                held.first += 1
                dropped += 1
        return dropped

    def rewindable(self, length: int) -> int:
        """The longest prefix of at most `length` rows that can be gone back to: windows must still be whole."""
        length = min(length, self.length)
        for held, layout in zip(self._lists, self.pool.layout.groups, strict=True):
            if layout.first_page(length) < held.first:
                return 0
        return length

    def rewind(self, length: int) -> None:
        """Keep the first `length` rows. Raises ValueError if a window they need is gone (see `rewindable`)."""
        if not 0 <= length <= self.length or self.rewindable(length) != length:
            raise ValueError(f"cannot go back to {length} of {self.length} rows")
        self._trim(length)
        del self.tokens[length:]

    def _trim(self, length: int) -> None:
        """Release the pages behind row `length`."""
        keep = -(-length // self.pool.layout.page_size)
        for g, held in enumerate(self._lists):
            while held.pages and held.first + len(held.pages) > keep:
                self.pool.release(g, held.pages.pop())
            if length == 0:
                held.first = 0

    def fork(self) -> Sequence:
        """A sequence with the same rows, sharing every page."""
        twin = Sequence(self.pool)
        twin.tokens = list(self.tokens)
        for g, (mine, theirs) in enumerate(zip(self._lists, twin._lists, strict=True)):
            theirs.first, theirs.pages = mine.first, list(mine.pages)
            for page in mine.pages:
                self.pool.retain(g, page)
        return twin

    def close(self) -> None:
        """Release every page; the sequence is empty afterwards."""
        for g, held in enumerate(self._lists):
            for page in held.pages:
                self.pool.release(g, page)
            held.first, held.pages = 0, []
        self.tokens.clear()

    def holds(self) -> Iterator[tuple[int, int]]:
        """(group, page) for every reference this sequence has, for `PagePool.check`."""
        for g, held in enumerate(self._lists):
            for page in held.pages:
                yield g, page

    def pages(self, group: int) -> int:
        """Pages of the group that this sequence holds."""
        return len(self._lists[group].pages)

    def _view(self, group: int) -> tuple[PagedKV, ...]:
        """The group's layers as the kernels see them; made again only when the pages change."""
        held, layout = self._lists[group], self.pool.layout.groups[group]
        key = (held.first, *held.pages)
        cached = self._views.get(group)
        if cached and cached[0] == key:
            return cached[1]
        base = np.array([self.pool.address(group, p) for p in held.pages], dtype=np.int64)
        pages = tuple(self.pool.page(group, p) for p in held.pages)
        offsets = [i * layout.layer_bytes for i in range(len(layout.layers))]
        view = tuple(PagedKV(self._records[group], base + x, pages, x, held.first) for x in offsets)
        self._views[group] = key, view
        return view


def _record(g: GroupLayout) -> RecordLayout:
    return RecordLayout(
        g.page_size, g.kv_heads, g.dim_k, g.dim_v, g.codec_k.name, g.codec_v.name,
        g.k_row_bytes, g.v_row_bytes, g.v_offset, g.record_bytes,
    )  # fmt: skip
