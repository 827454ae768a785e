"""A process that was forked for one command: it becomes what the caller's process is, then runs the command."""

from __future__ import annotations

import _signal
import _socket
import io
import os
import resource
import sys
import time
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from marshal import loads
from typing import TYPE_CHECKING

from kvcli.keepalive import inheritance, thisprocess, wire

if TYPE_CHECKING:
    from typing import TextIO

TAKEN_S = 5.0  # until another process must have taken a command
HIGH = 512  # descriptors of ours are above this one, out of the way of the caller's


@dataclass(frozen=True)
class Request:
    """What a caller sent: words, environment, and descriptors that are `numbers` there; `folder`: its working folder.
    `body` is all but the descriptors, as it came."""

    body: bytes
    folder: int
    fds: tuple[int, ...]
    argv: tuple[bytes, ...]
    environment: Mapping[bytes, bytes]
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, body: bytes, fds: Sequence[int]) -> Request:
        """Raises ValueError for one that makes no sense."""
        try:
            argv, environment, numbers = loads(body)
            if len(fds) != 1 + len(numbers):
                raise ValueError("descriptors are missing")
            return cls(body, fds[0], tuple(fds[1:]), tuple(argv), environment, tuple(numbers))
        except (EOFError, TypeError) as error:
            raise ValueError(str(error)) from None

    def close(self) -> None:
        for fd in (self.folder, *self.fds):
            os.close(fd)

    def moved(self) -> Request:
        """With descriptors above HIGH. Raises OSError."""
        folder, *fds = (fcntl(fd, F_DUPFD_CLOEXEC, HIGH) for fd in (self.folder, *self.fds))
        return Request(self.body, folder, tuple(fds), self.argv, self.environment, self.numbers)


def become(
    request: Request, conn: _socket.socket, control: int, caller: int, kept_open: set[int]
) -> thisprocess.Forked:
    """Make this process, just forked, what the caller's is. `conn` and `control` are above HIGH (see `moved`);
    `kept_open`: descriptors that libraries have.

    The caller's descriptors get the numbers that they have there; none of ours is left. Raises OSError.
    """
    os.setpgid(0, 0)
    request = request.moved()  # before there may be fewer descriptors
    close_all(range(HIGH), but=kept_open)
    parent = inheritance.take(caller)
    for number, fd in zip(request.numbers, request.fds, strict=True):
        os.dup2(fd, number)
    os.fchdir(request.folder)
    os.environ.clear()
    os.environ.update({os.fsdecode(name): os.fsdecode(value) for name, value in request.environment.items()})
    time.tzset()
    sys.argv = [os.fsdecode(word) for word in request.argv]
    thisprocess.started_with.clear()
    thisprocess.started_with.update(os.environ)
    return thisprocess.Forked("", None, request, conn, control, parent)


def reset_signals() -> None:
    """In a process just forked: no signal is handled as before."""
    for each in range(1, _signal.NSIG):
        if each not in (_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGPIPE):
            with suppress(OSError, ValueError):  # of the C library's own
                _signal.signal(each, _signal.SIG_DFL)
    _signal.signal(_signal.SIGINT, thisprocess.leave)


def close_all(numbers: Container[int], but: Collection[int]) -> None:
    """Those descriptors among `numbers`."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number in numbers and number not in but:
            with suppress(OSError):  # of this listing
                os.close(number)


def allow_descriptors() -> None:
    """As many as requests have, above HIGH; where fewer are allowed, callers do their commands themselves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = HIGH + 2 * wire.MOST_FDS
    if soft != resource.RLIM_INFINITY and soft < needed:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def moved(conn: _socket.socket, control: int) -> tuple[_socket.socket, int]:
    """The two above HIGH. Raises OSError."""
    conn.setblocking(True)
    high = control if control >= HIGH else fcntl(control, F_DUPFD_CLOEXEC, HIGH)
    return _socket.socket(fileno=fcntl(conn.fileno(), F_DUPFD_CLOEXEC, HIGH)), high


def open_streams(encoding: str, errors: str) -> None:
    """Standard streams on descriptors 0, 1 and 2, as Python makes them when it starts; None where one is closed."""
    sys.stdin = sys.__stdin__ = _stream(0, encoding, errors)  # type: ignore[assignment, misc]
    sys.stdout = sys.__stdout__ = _stream(1, encoding, errors)  # type: ignore[assignment, misc]
    sys.stderr = sys.__stderr__ = _stream(2, encoding, "backslashreplace")  # type: ignore[assignment, misc]


def _stream(number: int, encoding: str, errors: str) -> TextIO | None:
    try:
        os.fstat(number)
    except OSError:
        return None
    raw = io.FileIO(number, "w" if number else "r", closefd=False)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    buffered = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
    at_once = number > 0 and os.environ.get("PYTHONUNBUFFERED", "") != ""
    return io.TextIOWrapper(buffered, encoding, errors, "\n", raw.isatty() or number == 2, at_once)


def hand_on(forked: thisprocess.Forked, name: str) -> None:
    """Let another process that keeps a model do the command, and wait until it has taken it. Raises OSError and
    wire.Closed."""
    request = forked.request
    to = wire.connect(name)
    try:
        to.settimeout(TAKEN_S)
        wire.send(to, wire.HANDED, request.body, [forked.conn.fileno(), request.folder, *request.fds])
        wire.receive(to)
    finally:
        to.close()


def tell_end(forked: thisprocess.Forked, code: int) -> None:
    """The command is done: tell the caller, who may have nobody else to tell it.

    On a CPU all that others could find is gone by then, files and memory of its own, and the caller need not wait until
    the system has taken apart what is shared.
    """
    if forked.kept is None or not forked.on_cpu:
        with suppress(OSError):
            wire.send(forked.conn, wire.DONE, str(code).encode())
        return
    forked.tell(thisprocess.DONE)
    close_all(range(sys.maxsize), but={forked.conn.fileno()})
    with suppress(OSError):
        wire.send(forked.conn, wire.ENDED, str((code & 0xFF) << 8).encode())
