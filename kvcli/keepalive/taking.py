"""A process that was forked, ahead or for a command that is there: it takes the command, and does it."""

from __future__ import annotations

import _socket
import os
import select
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from kvcli import __main__
from kvcli.keepalive import pages, thisprocess, wire
from kvcli.keepalive.forkedcommand import HIGH, Request, become, close_all, moved, open_streams, reset_signals

if TYPE_CHECKING:
    from kvcli.runtime.engine.held import HeldModel
    from kvcli.runtime.engine.loaded import LoadedModel


@dataclass(frozen=True)
class Model:
    """What a forked process has of the one that keeps a model. `kept_open`: descriptors that libraries have; `streams`:
    encoding and errors of standard streams; `touched`: pages that commands write to, and whose code they run."""

    key: str
    kept: LoadedModel | HeldModel
    on_cpu: bool
    kept_open: set[int]
    streams: tuple[str, str]
    touched: pages.Touched


def stand_by(model: Model, theirs: _socket.socket, asked: _socket.socket, control: int) -> NoReturn:
    """In a process that was forked ahead: wait at `asked`, of which `theirs` is the other end, for a command, and
    do it."""
    try:
        own, control = moved(asked, control)
        theirs.close()
        asked.close()
        reset_signals()
        close_all(range(HIGH), but=model.kept_open)
        pages.have(model.touched, until=partial(_is_asked, own))
        _, body, fds = wire.receive(own)
        own.close()
        conn, request = _socket.socket(fileno=fds[0]), Request.of(body, fds[1:])
        caller = wire.peer(conn)[0]
    except (OSError, ValueError, wire.Closed):  # nobody will ask any more
        os._exit(0)
    _do(model, conn, caller, request, control)


def _is_asked(own: _socket.socket) -> bool:
    return bool(select.select([own], [], [], 0)[0])


def do(model: Model, conn: _socket.socket, caller: int, request: Request, control: int) -> NoReturn:
    """In a process that was forked for a command that is there: do it."""
    reset_signals()
    _do(model, conn, caller, request, control)


def _do(model: Model, conn: _socket.socket, caller: int, request: Request, control: int) -> NoReturn:
    """The command, of which this never returns."""
    to_caller = conn
    try:
        to_caller, control = moved(conn, control)
        thisprocess.forked = forked = become(request, to_caller, control, caller, model.kept_open)
        forked.key, forked.kept, forked.on_cpu = model.key, model.kept, model.on_cpu
        open_streams(*model.streams)
    except Exception:  # it cannot be what the caller's process is, which does the command itself
        # First, for a caller that leaves ends this.
        thisprocess.Forked("", None, None, to_caller, control, caller).tell("away")
        with suppress(OSError):
            wire.send(to_caller, wire.COLD)
        os._exit(0)
    try:
        if wire.receive(to_caller)[0] != wire.GO:
            os._exit(1)
    except (OSError, wire.Closed):  # the caller is gone
        os._exit(1)
    __main__.command()
    os._exit(0)
