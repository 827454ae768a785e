"""Strings that remember which of their characters a chat template wrote itself.

`Marked` is a str for everything but its origin. Concatenation, slicing, stripping, splitting, joining and
replacing keep the marks; whatever else is done to a Marked string yields a plain one, which counts as
untrusted. So a mark can be lost, never gained.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsIndex

Part = tuple[str, bool]  # text, trusted


class Marked(str):
    """A string in parts, neighbours of equal trust merged. `Marked(text)` is untrusted, as other str are."""

    __slots__ = ("_parts",)
    _parts: tuple[Part, ...]

    def __new__(cls, text: str = "") -> Marked:
        return text if isinstance(text, Marked) else from_parts([(text, False)])

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Marked:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> Marked:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return _cut(self, index, index + 1)
        start, stop, step = key.indices(len(self))
        return _cut(self, start, max(start, stop)) if step == 1 else super().__getitem__(key)

    def strip(self, chars: str | None = None) -> Marked:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> Marked:
        return _cut(self, len(self) - len(super().lstrip(chars)), len(self))

    def rstrip(self, chars: str | None = None) -> Marked:
        return _cut(self, 0, len(super().rstrip(chars)))

    def removeprefix(self, prefix: str) -> Marked:
        return _cut(self, len(self) - len(super().removeprefix(prefix)), len(self))

    def removesuffix(self, suffix: str) -> Marked:
        return _cut(self, 0, len(super().removesuffix(suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return _locate(self, super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return _locate(self, super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return _locate(self, super().splitlines(keepends), 0)

    def partition(self, sep: str) -> tuple[str, str, str]:
        before, middle, _ = super().partition(sep)
        return self._three(len(before), len(before) + len(middle))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        _, middle, after = super().rpartition(sep)
        return self._three(len(self) - len(after) - len(middle), len(self) - len(after))

    def _three(self, start: int, stop: int) -> tuple[str, str, str]:
        return _cut(self, 0, start), _cut(self, start, stop), _cut(self, stop, len(self))

    def join(self, items: Iterable[str]) -> Marked:
        pieces: list[str] = []
        for item in items:
            if not isinstance(item, str):
                raise TypeError(f"expected a string to join, not {type(item).__name__}")
            pieces += (self, item) if pieces else (item,)
        return concat(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return Marked(new).join(self.split(old, count)) if old else super().replace(old, new, count)


def trust(text: str) -> Marked:
    """The text, all of it trusted."""
    return from_parts([(str(text), True)])


def from_parts(parts: Iterable[Part]) -> Marked:
    """One string of (text, trusted) parts."""
    merged: list[Part] = []
    run: list[str] = []
    trusted = False
    for text, mark in parts:
        if not text:
            continue
        if run and mark != trusted:
            merged.append(("".join(run), trusted))
            run = []
        run.append(text)
        trusted = mark
    if run:
        merged.append(("".join(run), trusted))
    marked = str.__new__(Marked, "".join(text for text, _ in merged))
    marked._parts = tuple(merged)
    return marked


def parts_of(text: str) -> tuple[Part, ...]:
    """The (text, trusted) parts, none empty."""
    if isinstance(text, Marked):
        return text._parts
    return ((text, False),) if text else ()


def concat(pieces: Iterable[Any]) -> Marked:
    """All pieces (strings) in one."""
    return from_parts(part for piece in pieces for part in parts_of(piece))


def _cut(text: Marked, start: int, stop: int) -> Marked:
    """text[start:stop] for 0 <= start <= stop <= len(text)."""
    kept: list[Part] = []
    at = 0
    for part, trusted in text._parts:
        low, high = max(start - at, 0), min(stop - at, len(part))
        if low < high:
            kept.append((part[low:high], trusted))
        at += len(part)
    return from_parts(kept)


def _locate(text: Marked, pieces: list[str], separator: int) -> list[str]:
    """The pieces of a split as cuts of `text`.

    The length of the separator says where each starts; without one the gaps consist of characters that no
    piece starts with.
    """
    result: list[str] = []
    at = 0
    for piece in pieces:
        if not separator:
            at = text.find(piece, at)
        result.append(_cut(text, at, at + len(piece)))
        at += len(piece) + separator
    return result
