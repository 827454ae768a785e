"""Where model text goes: stdout as bytes, never through Rich, or a file. Broken streams are exit codes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from kvcli.cli.wrapping import Wrapper, columns, fill
from kvcli.errors import OutputError, StdoutError

FLUSH_EVERY_S = 0.02
STDOUT = "stdout"


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


def wrapped(text: str, indent: str = "") -> str:
    """Text for stderr: on a terminal its lines are broken between words, with `indent` before the rest of each."""
    return fill(text, columns(sys.stderr), indent) if is_terminal(sys.stderr) else text


def say(message: str) -> None:
    """One line on stderr, marked as ours."""
    write_err(f"{marked(message)}\n")


def marked(message: str) -> str:
    """A message with the mark of ours, in as many lines as it takes."""
    return wrapped(f"kv: {message}", " " * len("kv: "))


def is_terminal(stream: TextIO | None) -> bool:
    """True for an open stream on a terminal; None is a stream that the process was started without."""
    return stream is not None and not stream.closed and stream.isatty()


@contextmanager
def writing_to(name: str) -> Iterator[None]:
    """Inside, a failed write is an OutputError; a reader that went away stays a BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        kind = StdoutError if name == STDOUT else OutputError
        raise kind(f"cannot write to {name}: {error.strerror or error}") from None


class TextOut:
    """Text on a byte stream: flushed at once on a terminal, else at most every 20 ms.

    On a terminal control characters are neutralised and lines broken between words, unless `raw`. For failing writes
    see `writing_to`.
    """

    def __init__(self, stream: BinaryIO, tty: bool, raw: bool = False) -> None:
        self.stream, self.tty, self.raw = stream, tty, raw
        self.at_line_start = True  # nothing written yet, or the last character was a newline
        self.empty = True
        self._wrapper = Wrapper(lambda: columns(stream)) if tty and not raw else None
        self._flushed_at = 0.0

    @classmethod
    def stdout(cls, raw: bool = False) -> TextOut:
        """Raises OutputError when the process was started without a stdout."""
        if sys.stdout is None:
            raise StdoutError("stdout is closed")
        return cls(sys.stdout.buffer, sys.stdout.isatty(), raw)

    def write(self, text: str) -> None:
        if not text:
            return
        self.empty, self.at_line_start = False, text.endswith("\n")
        self._write(self._wrapper.feed(neutralise(text)) if self._wrapper else text)

    def _write(self, shown: str) -> None:
        with writing_to(STDOUT):
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
        if self._wrapper:
            self._wrapper.reset()

    def flush(self) -> None:
        """Write what is held back: nothing more comes for now."""
        if self._wrapper:
            self._write(self._wrapper.release())
        with writing_to(STDOUT):
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

    def become(mode: list[Any]) -> None:
        with suppress(termios.error):  # it may be gone
            termios.tcsetattr(descriptor, termios.TCSANOW, mode)

    def give_back() -> None:
        become(before)

    def keep(*_: object) -> None:
        with suppress(OSError):  # it is not the one that controls us
            if os.tcgetpgrp(descriptor) != os.getpgrp():
                return  # continued in the background
        become(quiet)

    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ICANON | termios.ECHO)
    keep()
    continued = signal.signal(signal.SIGCONT, keep)  # after a Ctrl-Z, while the shell had the terminal
    try:
        yield give_back
    finally:
        signal.signal(signal.SIGCONT, continued)
        give_back()


def typed_so_far() -> str:
    """What was typed at the terminal and not read yet: before `keys_wait`, so that Enter was made a newline. Here it
    is Enter again."""
    data = b""
    with suppress(OSError, ValueError, AttributeError):  # no stdin, or we are in the background
        descriptor = sys.stdin.fileno()
        while os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp():
            if not select.select([descriptor], [], [], 0)[0] or not (block := os.read(descriptor, 1 << 12)):
                break
            data += block
    return data.replace(b"\n", b"\r").replace(b"\0", b"").decode("utf-8", "surrogateescape")


class OutputFile:
    """A copy of the text in a file. While the context is open, text goes into a file beside it as it comes; however the
    context ends, that one then takes the file's place, so the file holds the old text or all of the new one there is.
    Without any text it stays as it is. A device or a pipe is written directly.

    Raises OutputError at once when the folder cannot take the file, so that no model is loaded in vain. A write that
    fails later ends the copy and leaves the file as it was; OutputError then comes at the end of the context.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        direct = os.path.exists(name) and not os.path.isfile(name)
        self.path = Path(name if direct else os.path.realpath(name))
        if self.path.is_dir():
            raise OutputError(f"cannot write {name}: it is a directory")
        if self.path.exists() and not os.access(self.path, os.W_OK):
            raise OutputError(f"cannot write {name}: no permission")
        if not direct and not os.access(self.path.parent, os.W_OK):
            raise OutputError(f"cannot write {name}: its folder is missing or not writable")
        self.whole = False  # all of the text was written
        self._written_to = self.path if direct else self.path.with_name(f"{self.path.name}.tmp-{os.getpid()}")
        self._file: FileIO | None = None
        self._error = ""
        self._ends_line = False

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if remark := self.keep():
            say(remark)
        if kind is None and (error := self.failure):
            raise error

    @property
    def failure(self) -> OutputError | None:
        """Why the file does not have the text; None = nothing went wrong yet."""
        return OutputError(f"cannot write {self.name}: {self._error}") if self._error else None

    def write(self, text: str) -> None:
        """Append to the new text, '' too: it has begun."""
        with self._noting_failure():
            if self._file is None and not self._error:
                self._file = FileIO(self._written_to, "w")
            data = memoryview(text.encode("utf-8", errors="replace"))
            while self._file and data:
                data = data[self._file.write(data) :]
            self._ends_line = text.endswith("\n") if text else self._ends_line

    def end_line(self) -> None:
        """A newline unless the text ends with one (an empty text gets one too)."""
        if not self._ends_line:
            self.write("\n")

    @property
    def at_line_start(self) -> bool:
        """Nothing was written, or the last character was a newline."""
        return self._file is None or self._ends_line

    def keep(self) -> str:
        """Put what was written in place; what to say of it, "" = nothing. It may be called in a signal handler."""
        if self._file is None:
            return ""
        with self._noting_failure():
            if self._written_to != self.path:
                os.fsync(self._file.fileno())
                if self.path.exists():
                    shutil.copymode(self.path, self._written_to)
                self._written_to.replace(self.path)
            self._file.close()
            self._file = None
            return "" if self.whole else f"{self.name} holds the answer so far"
        return ""

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """A write that fails ends the copy; nothing is left of it."""
        try:
            yield
        except OSError as error:
            self._error, self._file = error.strerror or str(error), None
            if self._written_to != self.path:
                self._written_to.unlink(missing_ok=True)
