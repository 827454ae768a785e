"""Where model text goes: stdout as bytes, never through Rich, or a file. Broken streams are exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from kvcli.errors import OutputError

FLUSH_EVERY_S = 0.02


def _caret(code: int) -> str:
    """How a terminal-safe copy shows a control character: ^[ for ESC, ^? for DEL, M-^[ for CSI."""
    if code >= 0x80:
        return "M-" + _caret(code - 0x80)
    return "^?" if code == 0x7F else "^" + chr(code + 64)


_CONTROL = {code: _caret(code) for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def neutralise(text: str) -> str:
    """The text with control characters spelled out, newline and tab excepted: it cannot drive a terminal."""
    return text.translate(_CONTROL)


def discard(stream: TextIO) -> None:
    """Send what the stream still holds, and all that follows, to nowhere; else its last flush would fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def write_err(text: str) -> None:
    """Text on stderr. Where it cannot be written it is dropped: a remark must not cost the answer or the exit code."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except BrokenPipeError:
        raise
    except OSError:
        discard(sys.stderr)


def say(message: str) -> None:
    """One line on stderr, marked as ours."""
    write_err(f"kv: {message}\n")


@contextmanager
def writing_to(name: str) -> Iterator[None]:
    """Inside, a failed write is an OutputError; a reader that went away stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write to {name}: {error.strerror or error}") from None


class TextOut:
    """Text on a byte stream: flushed at once on a terminal, else at most every 20 ms.

    On a terminal control characters are neutralised unless `raw`. For failing writes see `writing_to`.
    """

    def __init__(self, stream: BinaryIO, tty: bool, raw: bool = False) -> None:
        self.stream, self.tty, self.raw = stream, tty, raw
        self.at_line_start = True  # nothing written yet, or the last character was a newline
        self.empty = True
        self._flushed_at = 0.0

    @classmethod
    def stdout(cls, raw: bool = False) -> TextOut:
        """Raises OutputError when the process was started without a stdout."""
        if sys.stdout is None:
            raise OutputError("stdout is closed")
        return cls(sys.stdout.buffer, sys.stdout.isatty(), raw)

    def write(self, text: str) -> None:
        if not text:
            return
        self.empty, self.at_line_start = False, text.endswith("\n")
        shown = neutralise(text) if self.tty and not self.raw else text
        with writing_to("stdout"):
            self.stream.write(shown.encode("utf-8", errors="replace"))
            now = time.monotonic()
            if self.tty or now - self._flushed_at >= FLUSH_EVERY_S:
                self._flushed_at = now
                self.stream.flush()

    def end_line(self) -> None:
        """A newline unless the text ends with one (an empty text gets one too)."""
        if self.empty or not self.at_line_start:
            self.write("\n")
        self.empty = True

    def flush(self) -> None:
        with writing_to("stdout"):
            self.stream.flush()


@contextmanager
def keys_wait() -> Iterator[Callable[[], None]]:
    """Keys pressed while nothing is read wait as they are for the next line: Enter stays Enter (a terminal would make
    another key of it), and none is echoed into an answer. Ctrl-C works as always. No terminal: nothing to do.

    Yields what gives the terminal back, for an exit that unwinds nothing; it may be called in a signal handler.
    """
    try:
        descriptor = sys.stdin.fileno()
        before, quiet = termios.tcgetattr(descriptor), termios.tcgetattr(descriptor)
    except (termios.error, OSError):
        yield lambda: None
        return

    def give_back() -> None:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)

    def keep(*_: object) -> None:
        with suppress(OSError):  # it is not the one that controls us
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return  # continued in the background
        termios.tcsetattr(descriptor, termios.TCSANOW, quiet)

    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    keep()
    continued = signal.signal(signal.SIGCONT, keep)  # after a Ctrl-Z, while the shell had the terminal
    try:
        yield give_back
    finally:
        signal.signal(signal.SIGCONT, continued)
        give_back()


class OutputFile:
    """A copy of the text in a file that appears whole or not at all (a device or a pipe is written directly).

    Raises OutputError at once when the folder cannot take the file, so that no model is loaded in vain.
    """

    def __init__(self, name: str) -> None:
        self.path = Path(os.path.realpath(name))
        if self.path.is_dir():
            raise OutputError(f"cannot write {name}: it is a directory")
        if not self._direct() and not os.access(self.path.parent, os.W_OK):
            raise OutputError(f"cannot write {name}: its folder is missing or not writable")

    def _direct(self) -> bool:
        return self.path.exists() and not self.path.is_file()

    def write(self, text: str) -> None:
        """Replace the file's content. Raises OutputError; the old content is then untouched."""
        data = text.encode("utf-8", errors="replace")
        temporary = self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        try:
            if self._direct():
                self.path.write_bytes(data)
                return
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if self.path.exists():
                shutil.copymode(self.path, temporary)
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from None
