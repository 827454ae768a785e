"""The server: sockets, connections that are too slow, and an orderly end."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcli.errors import UsageError
from kvcli.words import counted

LOG = logging.getLogger("kvcli")
HEADERS_S = 10.0  # that a client may take to send the head of a call
SLOW_S = 60.0  # that a client may take to read what it is sent
KEEP_S = 30  # that a connection stays open between calls
GRACE_S = 10.0  # that answers may go on for when the server is told to stop
TELL_S = 2.0  # that it may take to tell the clients of others
CONNECTIONS = 1024


class PromptProtocol(H11Protocol):
    """HTTP/1.1 that closes connections whose calls do not begin, or begin too slowly, or whose clients do not read."""

    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._head_came()
        elif self._late is None:
            self._await_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(SLOW_S, self._cut_off)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    def connection_lost(self, error: Exception | None) -> None:
        self._head_came()
        self._was_read()
        super().connection_lost(error)

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEADERS_S, self.transport.close)

    def _cut_off(self) -> None:
        LOG.warning("a client read nothing for %.0f s: its connection is closed", SLOW_S)
        self.transport.abort()  # what it does not read is not kept for it

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _head_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class _Server(uvicorn.Server):
    """One that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bound(host: str, port: int) -> socket.socket:
    """A listening socket: of a name and a port (0 = any that is free), or unix:PATH. Raises UsageError."""
    if host == "unix:":
        raise UsageError("--host unix: names no path", "write unix:PATH")
    if host.startswith("unix:"):
        return _unix(Path(host[len("unix:") :]))
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(256)
        return found
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        hint = (
            "name another --port"
            if error.errno in (errno.EADDRINUSE, errno.EACCES)
            else "--host names an address of this machine"
        )
        raise UsageError(f"cannot listen on {host}, port {port}: {reason}", hint) from None


def _unix(path: Path) -> socket.socket:
    """Only its owner may use it. One that nobody listens to any more is replaced."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(path.lstat().st_mode) and not _listens(path):
                path.unlink()
        before = os.umask(0o177)
        try:
            found.bind(str(path))
        finally:
            os.umask(before)
        found.listen(256)
        return found
    except OSError as error:
        found.close()
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot listen on {path}: {reason}", "name another path") from None


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
            return True
        except OSError:
            return False


def address(listening: socket.socket) -> str:
    """What to tell people: http://127.0.0.1:8080, or unix:PATH."""
    name = listening.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"http://{host}:{name[1]}"


def _nothing(record: logging.LogRecord) -> bool:
    """A filter that lets nothing through."""
    return False


def run(app: Starlette, listening: socket.socket, stopping: Callable[[], bool]) -> None:
    """Serve until `stopping`, and then until all answers are sent. Who waits for longer than GRACE_S is told that the
    server stops."""
    config = uvicorn.Config(
        app, http=PromptProtocol, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=KEEP_S, limit_concurrency=CONNECTIONS,
    )  # fmt: skip
    server, said = _Server(config), logging.getLogger("uvicorn.error")

    async def serve() -> None:
        async def watch() -> None:
            while not stopping():
                await asyncio.sleep(0.1)
            server.should_exit = True
            if count := len(server.server_state.tasks):
                LOG.warning("stopping: answers to %s may take %.0f s more", counted(count, "call"), GRACE_S)
            await asyncio.sleep(GRACE_S)
            app.state.over.set()
            await asyncio.sleep(TELL_S)  # not until a time: this process may be suspended meanwhile
            said.addFilter(_nothing)  # of clients that do not read it
            for connection in server.server_state.connections:
                connection.transport.abort()
            for call in server.server_state.tasks:
                call.cancel()

        watching = asyncio.ensure_future(watch())
        try:
            await server.serve(sockets=[listening])
        finally:
            watching.cancel()

    name = listening.getsockname()
    try:
        asyncio.run(serve())
    finally:
        said.removeFilter(_nothing)
        listening.close()
        if isinstance(name, str):
            with suppress(OSError):
                os.unlink(name)
