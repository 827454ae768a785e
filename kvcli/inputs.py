"""What the user typed, piped or named in files: strict UTF-8, unchanged but for one newline at the end."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvcli.errors import InputBytesError, UsageError

STDIN_PATIENCE_S = 3.0
BOM = b"\xef\xbb\xbf"


def assemble_prompt(instruction: str | None, files: Sequence[str], use_stdin: bool, tell: Callable[[str], None]) -> str:
    """The user's message: files in order, then stdin, then the instruction, joined by a blank line.

    A file '-' is stdin and fixes its place. `tell` is called when stdin keeps us waiting. Raises UsageError
    when nothing is left, InputBytesError for bytes that are not UTF-8.
    """
    if files.count("-") > 1:
        raise UsageError("-f - stands twice; stdin can be read once")
    if "-" in files and not use_stdin:
        raise UsageError("-f - reads stdin, which --no-stdin forbids")
    parts = [read_stdin(tell) if name == "-" else read_file(name) for name in files]
    piped = use_stdin and "-" not in files and sys.stdin is not None and not sys.stdin.isatty()
    if piped:
        parts.append(read_stdin(tell))
    if instruction is not None:
        parts.append(check_argument(instruction, "the prompt"))
    prompt = "\n\n".join(part for part in parts if part)
    if not prompt:
        what = "the prompt is empty" if piped or parts else "no prompt"
        raise UsageError(what, "give text, -f FILE, pipe something in, or use kv chat")
    return prompt


def read_file(name: str) -> str:
    """Text of a file less one trailing newline. Raises UsageError (unreadable) or InputBytesError."""
    try:
        data = Path(name).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read {name}: {reason}") from None
    return drop_newline(decode_utf8(data, name))


def read_stdin(tell: Callable[[str], None]) -> str:
    """All of stdin less one trailing newline; `tell` is called when nothing has come for three seconds."""
    if sys.stdin is None:
        return ""
    stream = sys.stdin.buffer
    ready, _, _ = select.select([stream], [], [], STDIN_PATIENCE_S)
    if not ready:
        tell("waiting for stdin (use --no-stdin)")
    return drop_newline(decode_utf8(stream.read(), "stdin"))


def check_argument(text: str, name: str) -> str:
    """A command-line argument. Python passes its undecodable bytes on as lone surrogates: refuse those."""
    return decode_utf8(os.fsencode(text), name) if not text.isascii() else text


def decode_utf8(data: bytes, name: str) -> str:
    """Strict UTF-8 less a byte-order mark. Raises InputBytesError with the offset of the first bad byte."""
    skipped = len(BOM) if data.startswith(BOM) else 0
    try:
        return data[skipped:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = skipped + error.start
        message = f"{name} is not UTF-8: byte 0x{data[offset]:02x} at offset {offset}"
        raise InputBytesError(message, "convert it first, e.g. with iconv -t utf-8") from None


def drop_newline(text: str) -> str:
    """The text less one newline at its end ('\\n' or '\\r\\n')."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
