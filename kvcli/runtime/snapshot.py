"""Which pages make up the rows of a prefix, wherever they lie; and `Snapshot`, pages that are held beside a sequence.

A row is a function of the tokens up to it and of its position. So a page is *valid* for a prompt as far as the tokens
it was computed from agree with the prompt's, and pages of several origins may be put together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcli.kernels import Basis
from kvcli.runtime.config import SLIDING
from kvcli.runtime.grouplayout import GroupLayout
from kvcli.runtime.layout import KVLayout
from kvcli.runtime.pages import PagePool
from kvcli.runtime.sequence import PageKey, Sequence

REWIND_ROWS = 512  # sliding groups: rows before the window that are kept, so that a prompt's end can be another

Bases = tuple[tuple[Basis, ...], ...]


def common_length(a: list[int], b: list[int]) -> int:
    """How many ids two lists have in common from the start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def needed(layout: KVLayout, length: int) -> Iterator[PageKey]:
    """The pages that a sequence of `length` rows holds between steps."""
    for g, group in enumerate(layout.groups):
        for number in group.held_pages(length):
            yield from _forms(layout, g, group, number, length)


def _forms(layout: KVLayout, g: int, group: GroupLayout, number: int, length: int) -> Iterator[PageKey]:
    """The one form, sealed or open, in which page `number` of a group is held."""
    opened = layout.open_arena(g)
    full = (number + 1) * layout.page_size <= length
    if opened is None or (number >= group.sinks and (full or not group.tail)):
        yield g, number
    else:
        yield opened, number


def longest(layout: KVLayout, length: int, valid: Mapping[PageKey, int]) -> int:
    """The longest prefix of at most `length` tokens that can be gone on from with the pages of `valid`.

    `valid`: up to how many tokens each page's rows agree with the prompt. Inside a page only where all groups have
    the page in a form that takes more rows; else to a page's end.
    """
    size = layout.page_size
    for candidate in (length, *range(length // size * size, 0, -size)):
        ends = ((key, min(candidate, (key[1] + 1) * size)) for key in needed(layout, candidate))
        if all(valid.get(key, -1) >= end for key, end in ends):
            return candidate
    return 0


class Snapshot:
    """Pages of one sequence that are held for later: more of its sliding groups than it holds itself.

    Pages are shared, never copied: whoever writes to one that has two holders copies it first. `close` lets go.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.tokens: list[int] = []
        self.pages: dict[PageKey, int] = {}
        self.bases: Bases = ()

    def follow(self, seq: Sequence) -> None:
        """Hold what `seq` holds now. Where it went on from what was held before, keep of that the sliding rows up to
        REWIND_ROWS before the window."""
        found, went_on = seq.numbered(), seq.tokens[: len(self.tokens)] == self.tokens
        for (arena, _), page in found.items():
            self.pool.retain(arena, page)
        for key, page in self.pages.items():
            if went_on and key not in found and self.keeps(key, seq.length):
                found[key] = page
            else:
                self.pool.release(key[0], page)
        self.pages, self.tokens, self.bases = found, list(seq.tokens), seq.bases

    def keeps(self, key: PageKey, length: int) -> bool:
        """Whether a page that a sequence of `length` rows does not hold is worth holding."""
        arena, number = key
        groups = self.pool.layout.groups
        if arena >= len(groups) or not (groups[arena].kind == SLIDING or groups[arena].retention):
            return False
        return number >= groups[arena].first_page(max(0, length - REWIND_ROWS))

    def share(self) -> Snapshot:
        """Another holder of the same pages."""
        twin = Snapshot(self.pool)
        twin.tokens, twin.pages, twin.bases = self.tokens, dict(self.pages), self.bases
        for arena, page in self.holds():
            self.pool.retain(arena, page)
        return twin

    def close(self) -> None:
        """Let go of every page."""
        for (arena, _), page in self.pages.items():
            self.pool.release(arena, page)
        self.pages = {}

    def holds(self) -> Iterator[tuple[int, int]]:
        """(arena, page) of every reference, for `PagePool.check`."""
        return ((arena, page) for (arena, _), page in self.pages.items())
