"""What signals do: SIGINT, SIGTERM and SIGHUP stage by stage, so that every exit is prompt, silent and has the right
code; the others that would end a process end it at once, but not before what was generated is kept."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from kvcli.cli import jsonobjects
from kvcli.errors import EXIT_INTERRUPTED

LEAVE = "leave"  # exit at once: imports, loading, prefill; there is nothing to save
UNWIND = "unwind"  # raise SystemExit: whatever holds temporary files or the terminal tidies up
FINISH = "finish"  # note it; the answer ends after the token at hand

INSIST_S = 2.0
SAME_S = 0.02  # within which a signal twice is one: timeout(1) sends it to the process and to its group
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# They ask for no tidy end: a core dump (Ctrl-\\), a limit of processor time, a timer, whatever a script means by them.
AT_ONCE = (signal.SIGQUIT, signal.SIGALRM, signal.SIGVTALRM, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)
CODES = tuple(128 + number for number in SIGNALS)  # exit codes of processes that they ended


def say_nothing(code: int) -> None:
    """For `on_leave`, where nobody expects anything."""


class Interrupts:
    """Context manager that owns their handlers. A signal that the parent had ignored stays ignored, and one of AT_ONCE
    that something else handles is left to that.

    `stage` may be changed at any time. `code` is 0, or 128 + the signal noted while finishing.
    `on_leave(code)` runs just before an exit at once and must not use buffered streams. A second signal within
    two seconds of the first exits at once while finishing, with `insist`, and is of no account while unwinding. It
    is none where it is the same one within SAME_S.
    """

    def __init__(self, on_leave: Callable[[int], None] = say_nothing, insist: bool = True) -> None:
        self.stage = LEAVE
        self.code = 0
        self.on_leave, self.insist = on_leave, insist
        self._noted_at, self._noted = -INSIST_S, 0  # the last signal that was noted, and when
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Take the signals over until the context ends, or for good where there is none."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        for number in AT_ONCE:
            if _is_ours(handler := signal.getsignal(number)) or handler is signal.SIG_DFL:
                self._previous[number] = signal.signal(number, self._handle)

    def __enter__(self) -> Interrupts:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def cancelled(self) -> bool:
        """True once a signal was noted; what `Engine.generate` polls."""
        return self.code != 0

    def reset(self) -> None:
        """Forget a noted signal (the session goes on)."""
        self.code = 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        code, now = 128 + number, time.monotonic()
        if self.stage == FINISH and number == self._noted and now - self._noted_at < SAME_S:
            return
        again = now - self._noted_at < INSIST_S
        if number in AT_ONCE or self.stage == LEAVE or (self.stage == FINISH and self.insist and again):
            self.on_leave(code)
            end_by_signal(code)
        self._noted_at, self._noted = now, number
        if self.stage == FINISH:
            self.code = max(self.code, code)
        elif not again:  # else what the first one began goes on undisturbed
            raise SystemExit(code)


def _is_ours(handler: Any) -> bool:
    return isinstance(getattr(handler, "__self__", None), Interrupts)


def end_by_signal(code: int) -> NoReturn:
    """End as a process that does nothing about the signal (`code` - 128): a shell's loop around it then ends, too."""
    signal.signal(code - 128, signal.SIG_DFL)
    signal.raise_signal(code - 128)
    os._exit(code)  # it is blocked


def leave(code: int) -> NoReturn:
    """End by the signal of this code, when all is done."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or None
            stream.flush()
    end_by_signal(code)


def as_object(code: int) -> dict[str, Any]:
    """What --json says of a process that a signal ended, as "error"."""
    return {"code": code, "message": "interrupted" if code == EXIT_INTERRUPTED else "terminated", "hint": None}


def last_words(code: int, as_json: bool, remark: str = "", text: str = "") -> None:
    """For `on_leave`: an error object where JSON is expected, with the `text` so far; a terminal gets its line and
    cursor back."""
    if as_json:
        with suppress(OSError):  # nobody reads it, or it is full
            os.write(1, jsonobjects.failure(as_object(code), text).encode())
    if sys.stderr is not None and sys.stderr.isatty():
        with suppress(OSError):  # it may be gone
            os.write(sys.stderr.fileno(), b"\r\x1b[K\x1b[?25h")
    if sys.stderr is not None and remark:
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"kv: {remark}\n".encode())
