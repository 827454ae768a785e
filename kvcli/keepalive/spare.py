"""Processes that were forked for commands: one that waits for its command, and those that do theirs."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.keepalive import wire

if TYPE_CHECKING:
    import socket

    from kvcli.keepalive.forkedcommand import Request


@dataclass(frozen=True)
class Child:
    """A forked process, a descriptor of it, and a pipe on which it tells things."""

    pid: int
    process: int
    control: int

    def end(self) -> None:
        """It has not begun, or is of no use any more."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.process)
        os.close(self.control)


@dataclass(frozen=True)
class Spare:
    """One that waits for a command. `to`: where it waits for it; it ends when that is closed."""

    child: Child
    to: socket.socket

    def take(self, conn: socket.socket, request: Request) -> bool:
        """Let it do this command of the caller at the other end of `conn`; False where it cannot, and is ended."""
        try:
            wire.send(self.to, wire.RUN, request.body, [conn.fileno(), request.folder, *request.fds])
            return True
        except OSError:
            self.child.end()
            return False
        finally:
            self.to.close()

    def end(self) -> None:
        self.to.close()
        self.child.end()


@dataclass
class Running:
    """A process that does a command, and its caller."""

    child: Child
    conn: socket.socket
    said: dict[str, str] = field(default_factory=dict)  # what it told, by the first word of each line
    awaited: bool = True  # by its caller
    silent: bool = False  # it will tell nothing more

    def listen(self) -> dict[str, str]:
        """All that it has told until now."""
        os.set_blocking(self.child.control, False)
        with suppress(BlockingIOError):
            told = os.read(self.child.control, 1 << 16)
            self.silent = not told
            for line in told.decode().splitlines():
                word, _, rest = line.partition(" ")
                self.said[word] = rest
        return self.said

    def close(self) -> None:
        self.conn.close()
        os.close(self.child.process)
        os.close(self.child.control)
