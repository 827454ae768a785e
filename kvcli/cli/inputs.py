"""What the user typed, piped or named in files: strict UTF-8, unchanged but for a byte-order mark and one newline."""

from __future__ import annotations

import codecs
import os
import select
import stat
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvcli.errors import InputBytesError, UsageError
from kvcli.keepalive import thisprocess
from kvcli.notices import Tell
from kvcli.words import counted

STDIN_PATIENCE_S = 3.0
TEXT_BYTES = 32 << 20  # of one input: more than any context has room for
LIST_BYTES = 1 << 30  # of many texts
STDIN = "standard input"  # its name above its text
_BOM = "\ufeff"
_MARKS = (  # UTF-32 first: its little-endian mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


class Assembled(NamedTuple):
    """A message, and where in it the text of each file ends: (name, characters up to there)."""

    text: str
    ends: tuple[tuple[str, int], ...] = ()


def assemble_prompt(
    instruction: str | None,
    files: Sequence[str],
    tell: Tell,
    use_stdin: bool = True,
    names: bool = False,
    chat: bool = False,
) -> Assembled:
    """The user's message: files in order, then stdin, then the instruction, joined by a blank line.

    A file '-' is stdin and fixes its place, whatever `use_stdin` says of stdin that nobody asked for. `names`: each
    file has its name above it; `chat`: who has no prompt may have meant kv chat. Raises UsageError when nothing is
    left, InputBytesError for bytes that are not text.
    """
    if files.count("-") > 1:
        raise UsageError("-f - stands twice; stdin can be read once")
    asked = [] if instruction is None else [argument(instruction, "the prompt", "-f", tell)]
    sources = [(STDIN, read_stdin(tell)) if name == "-" else (name, read_file(name)) for name in files]
    piped = use_stdin and "-" not in files and sys.stdin is not None and not sys.stdin.isatty()
    if piped:
        unasked = bool(files) or instruction is not None
        sources.append((STDIN, _unasked_stdin(tell) if unasked else read_stdin(tell)))
    for name, text in sources:
        if not text and name != STDIN:
            tell.warn(f"{_shown(name)} is empty")
    parts = [f"==> {_shown(name)} <==\n{text}" if names else text for name, text in sources] + asked
    prompt, ends = "", list[tuple[str, int]]()
    for number, part in enumerate(parts):
        prompt += ("\n\n" if prompt and part else "") + part
        if part and number < len(sources):
            ends.append((_shown(sources[number][0]), len(prompt)))
    if not prompt.strip():
        what = "the prompt is empty" if parts else "no prompt"
        if not use_stdin:
            more = "or -f - for stdin, which --no-stdin leaves alone"
        else:
            more = "pipe something in, or use kv chat" if chat else "or pipe something in"
        raise UsageError(what, f"give text, -f FILE, {more}")
    return Assembled(prompt, tuple(ends))


def _shown(name: str) -> str:
    """A file's name as text, whatever its bytes."""
    return os.fsencode(name).decode("utf-8", "replace")


def _unasked_stdin(tell: Tell) -> str:
    """The text on stdin beside a prompt that would do without. How much it was is told; a file that another program
    reads, too, is left alone: a loop such as `while read` would lose its lines."""
    if read := _read_by_another():
        tell.warn(
            f"stdin is not read: another program (a loop?) has read {read[0]:,} of its {read[1]:,} bytes;"
            " --no-stdin is silent about it, -f - reads the rest"
        )
        return ""
    data = stdin_bytes(tell, " (use --no-stdin)")
    text = _as_text(data, "stdin")
    if data:
        lines = data.count(b"\n") + (not data.endswith(b"\n"))
        told = f"read {counted(lines, 'line')} ({len(data):,} bytes) from stdin into the prompt"
        if _inherited():
            tell.announce(f"{told}; --no-stdin leaves them to the calling program")
        else:
            tell.notice(told)
    return text


def _read_by_another() -> tuple[int, int] | None:
    """Of a file on stdin that was not at its beginning when we got it: where it was, and its size; None at its end."""
    number = sys.stdin.fileno()
    status = os.fstat(number)
    if not stat.S_ISREG(status.st_mode):
        return None
    at = os.lseek(number, 0, os.SEEK_CUR)
    return (at, status.st_size) if 0 < at < status.st_size else None


def _inherited() -> bool:
    """Whether the process that started us has the same stdin: a script, or a loop that goes on with its next line."""
    try:
        return os.readlink(f"/proc/{thisprocess.parent()}/fd/0") == os.readlink(f"/proc/self/fd/{sys.stdin.fileno()}")
    except OSError:
        return True  # it cannot be told


def read_file(name: str) -> str:
    """Text of a file. Raises UsageError (unreadable) or InputBytesError."""
    return _as_text(file_bytes(name), name)


def read_stdin(tell: Tell) -> str:
    """All of stdin."""
    return _as_text(stdin_bytes(tell), "stdin")


def file_bytes(name: str, most: int = TEXT_BYTES) -> bytes:
    """All of a file, of at most so many bytes. Raises UsageError."""
    try:
        with open(name, "rb", buffering=0) as file:
            return _pieces(file.read, name, most)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None


def stdin_bytes(tell: Tell, otherwise: str = "", most: int = TEXT_BYTES) -> bytes:
    """All of stdin, of at most so many bytes. Where nothing has come for three seconds that is told, with what may be
    done. Raises UsageError."""
    if sys.stdin is None:
        return b""
    stream = sys.stdin.buffer
    ready, _, _ = select.select([stream], [], [], STDIN_PATIENCE_S)
    if not ready:
        tell.announce(f"waiting for stdin{otherwise}")
    try:
        return _pieces(partial(os.read, stream.fileno()), "stdin", most)
    except OSError as error:
        raise UsageError(f"cannot read stdin: {error.strerror or error}") from None


def _pieces(read: Callable[[int], bytes], name: str, most: int) -> bytes:
    """All that `read` gives, piece by piece: between them signals are handled. Raises UsageError for more than `most`
    bytes, which a source without an end has, too."""
    data = bytearray()
    while piece := read(1 << 20):
        data += piece
        if len(data) > most:
            raise UsageError(f"{name} has more than {most >> 20:,} MiB, which is too much text", "cut it with head -c")
    return bytes(data)


def argument(text: str, name: str, reads: str, tell: Tell) -> str:
    """A text on the command line. Where it is the name of a file, that may have been meant: this is told, with the
    option that `reads` files. Raises InputBytesError (Python passes undecodable bytes on as lone surrogates)."""
    decoded = decode(os.fsencode(text), name)
    if os.path.isfile(text):
        tell.warn(f"{name} is {text!r}, not what is in the file of that name; {reads} reads files")
    return decoded


def _as_text(data: bytes, name: str) -> str:
    """Text less a byte-order mark, and less one newline at its end ('\\n' or '\\r\\n')."""
    text = drop_mark(decode(data, name))
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def drop_mark(text: str) -> str:
    """The text without the byte-order mark that some editors put in front."""
    return text.removeprefix(_BOM)


def decode(data: bytes, name: str, nul: bool = False) -> str:
    """Strict UTF-8, a byte-order mark included. Raises InputBytesError for all else, with what is to be done.

    `nul`: NULs separate texts. Elsewhere they show that this is no text, or one of another encoding.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark) and _decodes(data, encoding):
            raise InputBytesError(f"{name} is {encoding}, not UTF-8", f"convert it: {_iconv(encoding)}")
    if not nul and (at := data.find(b"\0")) >= 0:
        order = _order_of_utf16(data)
        hint = f"if it is UTF-16: {_iconv(f'UTF-16{order}')}" if order else "only text can be read: extract it first"
        raise InputBytesError(f"{name} is not text: it has a NUL byte at offset {at}", hint)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"{name} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        # Of the two, Latin-1 has control characters where Windows has quotation marks and dashes.
        encoding = "windows-1252" if any(0x80 <= byte < 0xA0 for byte in data) else "latin1"
        raise InputBytesError(message, f"if it is {encoding}: {_iconv(encoding)}") from None


def _decodes(data: bytes, encoding: str) -> bool:
    """Whether this may be text of an encoding, beginning with its mark: the mark alone is none."""
    try:
        return bool(data.decode(encoding))
    except UnicodeDecodeError:
        return False


def _iconv(encoding: str) -> str:
    return f"iconv -f {encoding.lower()} -t utf-8 FILE"


def _order_of_utf16(data: bytes) -> str:
    """LE or BE where the data looks like Western text in UTF-16: every other byte is NUL, nearly everywhere."""
    data = data[:4096]
    for order, high in (("LE", data[1::2]), ("BE", data[::2])):
        if 2 * high.count(0) > len(high) > 2 * (data.count(0) - high.count(0)):
            text = data.decode(f"utf-16-{order}", "replace")
            return order if all(c.isprintable() or c.isspace() for c in text) and "\ufffd" not in text else ""
    return ""
