"""The socket of a process that keeps a model, which is there before the model is: until it is loaded, a small process
answers at it, that it starts."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

from kvcli.keepalive import socketfolder, wire

STALL_S = 2.0  # until a caller must have said what it wants


class Door:
    """A socket that listens under its name, in `places.folder()`; one that was killed may have left another, which the
    lock says is nobody's."""

    def __init__(self, name: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._porter = self._word = 0
        path, place = socketfolder.reached(name)
        fresh = f"{path.removesuffix(socketfolder.SOCKET)}.new"
        try:
            with suppress(FileNotFoundError):
                os.unlink(fresh)
            self.listener.bind(fresh)
            self.listener.listen(128)
            os.replace(fresh, path)
        finally:
            os.close(place)
        self.name, self.path = name, f"{socketfolder.folder()}/{name}"
        self._number = os.stat(self.path).st_ino

    @property
    def numbers(self) -> set[int]:
        """Descriptors that it has."""
        return {self.listener.fileno(), self._word} - {0}

    def attend(self, about: Callable[[], Mapping[str, Any]], lock: int) -> None:
        """Fork the process that answers until `take_over`. `about`: what it says; `lock`: which it must not have."""
        os.utime(self.path, (0, 0))  # others are asked first
        read, self._word = os.pipe2(os.O_CLOEXEC)
        keeper = os.getpid()
        self._porter = os.fork()
        if self._porter == 0:
            os.close(self._word)
            os.close(lock)
            self._answer(read, about, keeper)
        os.close(read)

    def take_over(self) -> None:
        """From here on this process answers."""
        if self._porter:
            with suppress(BrokenPipeError):  # somebody has killed it
                os.write(self._word, b"x")
            os.waitpid(self._porter, 0)
            os.close(self._word)
        self._porter = self._word = 0
        with suppress(OSError):
            os.utime(self.path)

    @property
    def is_there(self) -> bool:
        """Whether its name still leads to it."""
        with suppress(OSError):
            return os.stat(self.path).st_ino == self._number
        return False

    def remove(self) -> None:
        """Its name, unless that is another's by now."""
        if self.is_there:
            with suppress(OSError):
                os.unlink(self.path)

    def _answer(self, word: int, about: Callable[[], Mapping[str, Any]], keeper: int) -> NoReturn:
        """Until something comes by the pipe `word`, or it ends, since the keeper has."""
        kept = []  # callers that wait for its end
        waiting = select.poll()
        waiting.register(word, select.POLLIN)
        waiting.register(self.listener, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll()}
            if word in ready:
                if not os.read(word, 1):
                    self.remove()
                os._exit(0)
            conn, kind = self._asked()
            with suppress(OSError):
                if kind == wire.RUN:
                    wire.send(conn, wire.COLD)
                elif kind in (wire.STATUS, wire.STOP):
                    wire.send(conn, wire.TOLD, json.dumps(about()).encode())
            if kind == wire.STOP:
                kept.append(conn)
                os.kill(keeper, signal.SIGKILL)
            else:
                conn.close()

    def _asked(self) -> tuple[socket.socket, bytes]:
        """A caller, and what it asks; b"" = nothing that is to be answered."""
        conn, _ = self.listener.accept()
        if wire.peer(conn)[1] != os.getuid():
            return conn, b""
        conn.settimeout(STALL_S)
        try:
            kind, _, fds = wire.receive(conn)
        except (wire.Closed, TimeoutError):
            return conn, b""
        for fd in fds:
            os.close(fd)
        return conn, kind
