"""`Found`: what files have of a prompt, whatever pages they are cut into. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile


@dataclass(frozen=True)
class Piece:
    """Rows [lo, hi) of the page `key` of a file, which has pages of `size` rows; in a page of another size they stand
    from slot `at` on."""

    file: PromptCacheFile
    key: PageKey
    size: int
    lo: int
    hi: int
    at: int


@dataclass(frozen=True)
class Kept:
    """A file of the store, and how many tokens of a prompt it agrees with. `page_size`: of its pages."""

    path: Path
    contents: Contents
    agrees: int
    page_size: int = 0

    def covers(self, page_size: int) -> dict[PageKey, int]:
        """The pages of that size of which it has the first row, and up to how many tokens each is right."""
        if self.page_size in (0, page_size):
            return dict.fromkeys(self.contents.pages, self.agrees)
        own = [_Rows(self.contents, self.agrees, self.page_size)]
        return {key: reach for key, reach, _ in _assembled(own, page_size)}


@dataclass(frozen=True)
class _Rows:
    """The pages of one file, right up to `agrees` tokens."""

    contents: Contents
    agrees: int
    size: int
    file: PromptCacheFile | None = None


class Found:
    """What there is of a prompt, for a cache with pages of `page_size` rows.

    `kept`: all files. `closest`: the most tokens that any of them has in common with the prompt. `expired`: the most
    tokens that any other has, which was not used for too long. Files stay open until `close`.
    """

    def __init__(self, page_size: int = 64) -> None:
        self.page_size = page_size
        self.kept: list[Kept] = []
        self.closest = 0
        self.closest_next: int | None = None  # the token that the closest one has there
        self.expired = 0
        self.stack = ExitStack()
        self._rows: list[_Rows] = []

    @classmethod
    def in_file(cls, file: PromptCacheFile, agrees: int, page_size: int) -> Found:
        """What one file has, which somebody else closes."""
        found = cls(page_size)
        found.add(file, agrees)
        return found

    def add(self, file: PromptCacheFile, agrees: int) -> None:
        """An open file that agrees with so many tokens of the prompt."""
        size = page_size_of(file, self.page_size)
        self.kept.append(Kept(file.path, file.contents, agrees, size))
        self._rows.append(_Rows(file.contents, agrees, size, file))
        self.__dict__.pop("_pages", None)

    def join(self, other: Found) -> None:
        """What another place has of the same prompt."""
        self.kept += other.kept
        self._rows += other._rows
        self.__dict__.pop("_pages", None)
        self.expired = max(self.expired, other.expired)
        if other.closest > self.closest:
            self.closest, self.closest_next = other.closest, other.closest_next
        self.stack.push(other.stack.pop_all())

    @cached_property
    def _pages(self) -> dict[PageKey, tuple[int, list[Piece]]]:
        return {key: (reach, pieces) for key, reach, pieces in _assembled(self._rows, self.page_size)}

    @property
    def valid(self) -> dict[PageKey, int]:
        """Up to how many tokens each page agrees with the prompt."""
        return {key: reach for key, (reach, _) in self._pages.items()}

    def pieces(self, keys: Iterable[PageKey]) -> dict[PageKey, list[Piece]]:
        """Where the rows of these pages lie."""
        return {key: self._pages[key][1] for key in keys}

    def close(self) -> None:
        self.stack.close()


def files_of(pieces: dict[PageKey, list[Piece]]) -> list[PromptCacheFile]:
    """The files that pages are read from, each once."""
    return list({piece.file.path: piece.file for listed in pieces.values() for piece in listed}.values())


def page_size_of(file: PromptCacheFile, default: int) -> int:
    """Rows of a file's pages."""
    text = file.contents.identity.get("page_size", "")
    return int(text) if text.isdecimal() and int(text) else default


def _assembled(files: list[_Rows], size: int) -> Iterator[tuple[PageKey, int, list[Piece]]]:
    """Every page of `size` rows of which the files have the first one: up to how many tokens it is right, and its
    pieces."""
    candidates: dict[PageKey, list[tuple[int, int, _Rows, PageKey]]] = defaultdict(list)
    for rows in files:
        for arena, number in rows.contents.pages:
            start = number * rows.size
            end = max(start, min(start + rows.size, rows.agrees))
            for cut in range(start // size, -(-(start + rows.size) // size)):
                candidates[arena, cut].append((start, end, rows, (arena, number)))
    for key, listed in candidates.items():
        first = at = key[1] * size
        reach, pieces = -1, list[Piece]()
        while at < first + size:
            start, end, rows, source = max(listed, key=lambda each: each[1] if each[0] <= at else -1)
            if start > at:
                break
            reach = max(reach, rows.agrees if rows.size == size else min(rows.agrees, max(at, end)))
            if end <= at:
                break
            stop = min(end, first + size)
            if rows.file is not None:
                pieces.append(Piece(rows.file, source, rows.size, at - start, stop - start, at - first))
            at = stop
        if reach >= 0:
            yield key, reach, pieces
