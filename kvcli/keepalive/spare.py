"""A process that is forked before there is a command for it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
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
