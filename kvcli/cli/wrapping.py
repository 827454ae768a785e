"""Lines that are broken between words at the width of a terminal, while the text comes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from unicodedata import category, east_asian_width

TAB, CODE_INDENT = 8, 4
_PIECE = re.compile(r"\n|[ \t]+|[^ \t\n]+")
_FENCE = re.compile(r"```+|~~~+")
_ITEM = re.compile(r"[-*+•]|\d{1,3}[.)]")
_HANGUL = ("\uac00", "\ud7a3")  # Korean has spaces between its words


def columns(stream: Any) -> int:
    """How wide the terminal of a stream is now; of a stream without one, what COLUMNS says, or 80."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (AttributeError, OSError, ValueError):
        return shutil.get_terminal_size().columns


def fill(text: str, width: int, indent: str = "") -> str:
    """The text in lines of `width` at most, where words allow; `indent` stands before the rest of a broken line."""
    wrapper = Wrapper(lambda: width, indent)
    return wrapper.feed(text) + wrapper.release()


class Wrapper:
    """Breaks the lines of a text that comes in pieces. A word is held until it has ended, so that it goes whole to
    where it fits. Nothing is changed but white space at a break.

    Lines of code, indented ones and rows of a table stay as they are, as do words longer than a line; the rest of an
    item of a list is indented like it. `width`: how wide a line may be, asked for each word: terminals change.
    """

    def __init__(self, width: Callable[[], int], indent: str = "") -> None:
        self._width, self._base = width, indent
        self.reset()

    def reset(self) -> None:
        """A new text begins, at the start of a line."""
        self._fence = ""  # what begins and ends the code that the line is in
        self._begin_line()

    def _begin_line(self) -> None:
        self._column = 0
        self._gap = self._word = ""  # held
        self._indent = self._base
        self._begun = False  # its first word has ended
        self._kept = False  # this line is not broken
        self._open = False  # a word goes on that is not held

    def feed(self, text: str) -> str:
        """What to write of the text so far."""
        return "".join(self._feed(text))

    def release(self) -> str:
        """What is held: nothing more comes, or not soon."""
        return self._place()

    def _feed(self, text: str) -> Iterator[str]:
        for piece in _PIECE.findall(text):
            if piece == "\n":
                yield self._place()
                yield "\n"
                self._begin_line()
            elif piece[0] in " \t":
                if self._word:
                    yield self._place()
                self._open = False
                self._gap += piece
            else:
                yield from self._add(piece)

    def _add(self, letters: str) -> Iterator[str]:
        """Letters of a word, and the words that end with them: ideographs are words of their own."""
        if self._open:
            yield self._put(letters)
            return
        for letter in letters:
            if self._word and _may_break(self._word[-1], letter):
                yield self._place()
            self._word += letter
        if len(self._word) > self._width() or (self._kept and self._begun):
            yield self._place()
            self._open = True

    def _place(self) -> str:
        """What is held, on this line or the next one."""
        gap, word = self._gap, self._word
        self._gap = self._word = ""
        if not self._begun and word:
            self._judge(gap, word)
        self._begun = self._begun or bool(word)
        room = self._width()
        if self._kept or not self._column or not word or _end(self._column, gap + word) <= room:
            return self._put(gap + word)
        if _end(0, self._indent + word) > room:  # longer than a line
            return self._put(gap + word)
        self._column = 0
        return "\n" + self._put(self._indent + word)

    def _put(self, text: str) -> str:
        """The text as it is; the terminal breaks it where it must."""
        end, room = _end(self._column, text), max(1, self._width())
        self._column = end if end <= room else (end - 1) % room + 1
        return text

    def _judge(self, gap: str, word: str) -> None:
        """What kind of line begins with this white space and this word."""
        fence = _FENCE.match(word)
        if self._fence:
            self._kept = True
            if word.startswith(self._fence) and not word.strip(self._fence[0]):
                self._fence = ""
        elif fence:
            self._kept, self._fence = True, fence[0]
        elif _ITEM.fullmatch(word):
            self._indent = self._base + " " * _end(0, f"{gap}{word} ")
        else:
            self._kept = _end(0, gap) >= CODE_INDENT or word.startswith("|")


def _may_break(before: str, after: str) -> bool:
    """Whether a line may end between two letters."""
    if before.isascii() and after.isascii():
        return False
    opens, stays = category(before) in ("Ps", "Pi"), category(after) in ("Pe", "Pf", "Po", "Lm", "Mn", "Me", "Cf")
    return (_ideograph(before) or _ideograph(after)) and not opens and not stays


def _ideograph(letter: str) -> bool:
    wide = east_asian_width(letter) in "WF" and category(letter)[0] in "LP"
    return wide and not _HANGUL[0] <= letter <= _HANGUL[1]


def _end(column: int, text: str) -> int:
    """The column behind the text."""
    first, *others = text.split("\t")
    column += cells(first)
    for part in others:
        column += TAB - column % TAB + cells(part)
    return column


def cells(text: str) -> int:
    """How many columns a text takes."""
    if text.isascii() and text.isprintable():
        return len(text)
    from wcwidth import wcswidth, wcwidth

    width = wcswidth(text)
    return width if width >= 0 else sum(max(0, wcwidth(letter)) for letter in text)
