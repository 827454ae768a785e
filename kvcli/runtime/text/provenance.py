"""Strings that remember which of their characters a chat template wrote itself.

`Marked` is a str for everything but its origin. Concatenation, repetition, slicing, iteration, stripping, padding,
splitting, joining, replacing, changes of case and formatting keep the marks; whatever else is done to a Marked string
yields a plain one, which counts as untrusted. So a mark can be lost, never gained.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def __mul__(self, count: SupportsIndex) -> Marked:
        return concat([self] * count.__index__())

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> Marked:
        return _percent(self, values)

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if not isinstance(key, slice):
            index = range(len(self))[key]
            return _cut(self, index, index + 1)
        start, stop, step = key.indices(len(self))
        if step == 1:
            return _cut(self, start, max(start, stop))
        return concat(_cut(self, index, index + 1) for index in range(start, stop, step))

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

    def upper(self) -> Marked:
        return self.with_letters(str.upper)

    def lower(self) -> Marked:
        return self.with_letters(str.lower)

    def casefold(self) -> Marked:
        return self.with_letters(str.casefold)

    def swapcase(self) -> Marked:
        return self.with_letters(str.swapcase)

    def capitalize(self) -> Marked:
        return self.with_letters(str.capitalize)

    def title(self) -> Marked:
        return self.with_letters(str.title)

    def with_letters(self, change: Callable[[str], str]) -> Marked:
        """The text with every letter changed, each where it was and of the trust that it had.

        Where that cannot be told, because letters became several and their neighbours decide how, nothing is trusted.
        """
        plain = "".join(text for text, _ in self._parts)
        whole = change(plain)
        if len(whole) == len(plain):
            return _like(self, whole)
        pieces = [(change(text), trusted) for text, trusted in self._parts]
        return from_parts(pieces if "".join(text for text, _ in pieces) == whole else [(whole, False)])

    def center(self, width: SupportsIndex, fill: str = " ", /) -> Marked:
        extra = max(0, width.__index__() - len(self))
        return self._between(fill, extra // 2 + (extra & width.__index__() & 1), extra)

    def ljust(self, width: SupportsIndex, fill: str = " ", /) -> Marked:
        return self._between(fill, 0, max(0, width.__index__() - len(self)))

    def rjust(self, width: SupportsIndex, fill: str = " ", /) -> Marked:
        extra = max(0, width.__index__() - len(self))
        return self._between(fill, extra, extra)

    def _between(self, fill: str, before: int, extra: int) -> Marked:
        """`extra` times the letter `fill` around the text, `before` times in front of it."""
        if len(fill) != 1:
            raise TypeError("The fill character must be exactly one character long")
        return concat([*[fill] * before, self, *[fill] * (extra - before)])

    def format(self, *values: Any, **named: Any) -> Marked:
        return MarkedFormatter().vformat(self, values, named)

    def format_map(self, named: Mapping[str, Any], /) -> Marked:  # type: ignore[override]
        return MarkedFormatter().vformat(self, (), named)


class MarkedFormatter(string.Formatter):
    """`str.format` whose result keeps the marks of a format that is trusted throughout, and of the texts put into it.

    Of a format with an untrusted part nothing is trusted: its own letters say where values go. Nor is anything where a
    field's width is a field, too.
    """

    def vformat(self, form: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Marked:
        text = _unmarked(form)
        plain, fields = super().vformat(text, args, kwargs), list(self.parse(text))
        if not _all_trusted(form) or any("{" in (spec or "") for _, _, spec, _ in fields):
            return Marked(_unmarked(plain))
        pieces: list[str] = []
        unnamed = 0
        for literal, name, spec, conversion in fields:
            pieces.append(trust(literal))
            if name is None:
                continue
            if name == "":
                name, unnamed = str(unnamed), unnamed + 1
            value = self.convert_field(self.get_field(name, args, kwargs)[0], conversion)
            pieces.append(_placed(value, self.format_field(value, spec or "")))
        return concat(pieces)


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


# A conversion of the % operator: its key, flags, width, precision, type.
_CONVERSION = re.compile(r"%(?:\((.*?)\))?([-+ #0]*)(\d*)(?:\.(\d*))?[hlL]?([a-zA-Z%])")


def _percent(form: Marked, values: Any) -> Marked:
    """`form % values`, marked as by `MarkedFormatter`."""
    text = _unmarked(form)
    plain = text % values
    if not _all_trusted(form):
        return Marked(_unmarked(plain))
    given = iter(values if isinstance(values, tuple) else (values,))
    pieces: list[str] = []
    at = 0
    for found in _CONVERSION.finditer(text):
        pieces.append(trust(text[at : found.start()]))
        at = found.end()
        if found[5] == "%":
            pieces.append(trust("%"))
            continue
        value = values[found[1]] if found[1] is not None else next(given, "")
        conversion = f"%{found[2]}{found[3]}{'' if found[4] is None else '.' + found[4]}{found[5]}"
        filled = conversion % (value,)
        pieces.append(_placed(value, filled) if found[5] == "s" else Marked(filled))
    result = concat([*pieces, trust(text[at:])])
    if result != plain:  # a width of '*', or what else stands for another value
        return Marked(_unmarked(plain))
    return result


def _all_trusted(text: str) -> bool:
    return all(trusted for _, trusted in parts_of(text))


def _unmarked(text: str) -> str:
    return "".join(part for part, _ in parts_of(text))


def _like(text: Marked, letters: str) -> Marked:
    """`letters`, as many as those of `text`, each of the trust of the letter in its place."""
    pieces, at = [], 0
    for part, trusted in text._parts:
        pieces.append((letters[at : at + len(part)], trusted))
        at += len(part)
    return from_parts(pieces)


def _placed(value: Any, text: str) -> Marked:
    """`text`, which a trusted format made of `value`: a string keeps its marks, and what pads it is trusted."""
    if not isinstance(value, Marked):
        return Marked(text)
    shown = value if len(text) >= len(value) else _cut(value, 0, len(text))
    at = text.find(shown)
    if at < 0:
        return Marked(text)
    return concat([trust(text[:at]), shown, trust(text[at + len(shown) :])])


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
