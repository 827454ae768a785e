"""What is one message: lines between triple quotes, and lines that end with a backslash, as typed and in a script."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator

from kvcli.cli.inputs import TEXT_BYTES, decode, drop_mark
from kvcli.errors import UsageError

QUOTES = '"""'
Piece = tuple[str, str]  # "line 3" or "message 3", and its text


def is_open(text: str) -> bool:
    """Whether a message that begins with triple quotes has not come to its end."""
    stripped = text.strip()
    closed = len(stripped) >= 2 * len(QUOTES) and stripped.endswith(QUOTES)
    return stripped.startswith(QUOTES) and not closed


def unquote(text: str) -> str:
    """A message in triple quotes without them and without the newlines next to them; other text as it is."""
    stripped = text.strip()
    if stripped.startswith(QUOTES) and not is_open(text):
        return stripped[len(QUOTES) : -len(QUOTES)].strip("\n")
    return text


def of_stdin(null: bool) -> Iterator[Piece]:
    """The messages of a script, as they arrive, with their names: each line is one or a part of one; or, `null`, what
    ends with NUL.

    Raises InputBytesError, whose offset counts within the line or message, and UsageError.
    """
    return _pieces(b"\0", "message") if null else joined(_pieces(b"\n", "line"))


def joined(lines: Iterable[Piece]) -> Iterator[Piece]:
    """Lines put together to messages, as the Enter key does it at a terminal; each has the name of its first line.
    Raises UsageError for triple quotes that never end."""
    begun = first = ""
    for name, line in lines:
        first = first if begun else name
        text = begun + line
        if is_open(text):
            begun = f"{text}\n"
        elif text.endswith("\\"):
            begun = f"{text[:-1]}\n"
        else:
            begun = ""
            yield first, unquote(text)
    if begun and is_open(begun):
        raise UsageError(f"the message of {first} begins with {QUOTES} and has no end", f"end it with {QUOTES}")
    if begun:
        yield first, begun[:-1] + "\\"  # nothing follows: it is a backslash


def _pieces(end: bytes, what: str) -> Iterator[Piece]:
    """Texts from stdin as they arrive, each ended by the byte `end`; the last one need not be."""
    held, number = b"", 0
    while block := os.read(sys.stdin.fileno(), 1 << 16):
        *whole, held = (held + block).split(end)
        if len(held) > TEXT_BYTES:
            raise UsageError(f"{what} {number + 1} has more than {TEXT_BYTES >> 20} MiB, which is too much text")
        for piece in whole:
            number += 1
            yield _piece(piece.removesuffix(b"\r") if end == b"\n" else piece, what, number)
    if held:
        yield _piece(held, what, number + 1)


def _piece(data: bytes, what: str, number: int) -> Piece:
    text = decode(data, name := f"{what} {number}")
    return name, drop_mark(text) if number == 1 else text
