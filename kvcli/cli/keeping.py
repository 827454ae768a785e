"""Commands and the processes that keep models: who does a command, what it finds loaded, and what stays behind it."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvcli.cli import render
from kvcli.cli.invocation import Invocation
from kvcli.errors import DoesNotFit, NotTaken
from kvcli.keepalive import socketfolder, spawn, thisprocess, wire
from kvcli.options import LoadOptions
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.host.processmemory import held_bytes

if TYPE_CHECKING:
    import _socket

    from kvcli.cli.flags.keeping import KeepFlags
    from kvcli.runtime.engine.held import HeldModel
    from kvcli.runtime.engine.loaded import LoadedModel

ASKED_TIMES = 3  # where a process is there and does not answer
_WSL = Path("/dev/dxg")
ANSWER_S = 5.0  # until a process that keeps a model has said what it is, or has left


def find_process(load: LoadOptions, seconds: float | None, alone: bool, invocation: Invocation) -> None:
    """In a process that was forked for a command: go on only where it is the right one. To be called before anything is
    read or written, for another process may begin anew.

    `alone`: the command measures its own process. Where something was said already, what is not loaded is loaded here.
    """
    forked = thisprocess.forked
    if forked is None:
        return
    by_itself, key = alone or seconds == 0, spawn.key(load)
    if forked.request is None or (key == forked.key and not by_itself):
        return
    if invocation.told:
        forked.kept = None
        return
    name = f"{socketfolder.kind()}-{key}{socketfolder.SOCKET}"
    if not by_itself and name in socketfolder.sockets():
        from kvcli.keepalive.forkedcommand import hand_on

        with suppress(OSError, wire.Closed):  # it has just left
            hand_on(forked, name)
            _go_away(forked)
    forked.tell("away")  # first: a caller that leaves has this process ended
    with suppress(OSError):
        wire.send(forked.conn, wire.COLD)
    os._exit(0)


def _go_away(forked: thisprocess.Forked) -> NoReturn:
    forked.tell("away")
    os._exit(0)


def kept_model(path: Path, load: LoadOptions) -> LoadedModel | HeldModel | None:
    """The model in that file as this process found it, with these options; None where it has to be loaded. A command
    that nobody asked for (see `Host.warm_up`) takes it whatever its options are."""
    forked = thisprocess.forked
    if forked is None or forked.kept is None or (forked.request is not None and forked.key != spawn.key(load)):
        return None
    kept: LoadedModel | HeldModel = forked.kept
    return kept if os.path.samefile(path, kept.path) else None


def stay(loaded: LoadedModel, load: LoadOptions, asked: KeepFlags, invocation: Invocation) -> None:
    """Let the model stay as it is asked, when this command has ended."""
    forked, seconds, least = thisprocess.forked, asked.seconds, asked.yield_vram or ""
    there = forked is not None and forked.kept is not None
    if least and (loaded.device.kind == CPU or not (seconds or there)):
        where = "the model is on the CPU" if loaded.device.kind == CPU else "no model stays without --keep-alive"
        render.notice(f"--yield-vram changes nothing: {where}", invocation)
    if forked is not None and forked.kept is not None:
        if seconds:
            forked.tell(f"keep {seconds:g}")
        if least:
            forked.tell(f"yield {least}")
        return
    if not seconds:
        return
    reason = _reason_against(loaded)
    if not reason:
        try:
            socketfolder.make()
        except OSError as error:
            reason = f"{socketfolder.folder()}: {error.strerror}"
    if reason:
        render.announce(f"--keep-alive: the model does not stay: {reason}", invocation)
        return
    model = os.path.abspath(load.model) if os.path.exists(load.model) else load.model
    lora = tuple(replace(each, path=os.path.abspath(each.path)) for each in load.lora)
    what = replace(spawn.weights_of(load), model=model, lora=lora)
    path, device = loaded.path.absolute(), str(loaded.device)
    atexit.register(_start, spawn.Wanted(path, what, spawn.key(load), seconds, device, least))


def _reason_against(loaded: LoadedModel) -> str:
    if loaded.device.kind != CPU:
        return "under WSL processes cannot share memory of a GPU" if _WSL.exists() else ""
    return "" if loaded.backend == "native" else "this needs the compiled kernels"


def _start(what: spawn.Wanted) -> None:
    with suppress(OSError):  # the command is done, and nobody waits for more
        spawn.start(what)


def ask(name: str, kind: bytes) -> tuple[dict[str, Any], _socket.socket] | None:
    """What the process of that socket says, and the connection; None where there is none."""
    for _ in range(ASKED_TIMES):
        try:
            conn = wire.connect(name)
            conn.settimeout(ANSWER_S)
            wire.send(conn, kind)
            return json.loads(wire.receive(conn)[1]), conn
        except (ConnectionRefusedError, FileNotFoundError, TimeoutError):
            return None  # nobody is there, or it does not answer
        except (OSError, ValueError, wire.Closed):  # it may be about to leave
            continue
    return None


def processes() -> list[tuple[str, dict[str, Any]]]:
    """The sockets of processes that keep models, and what they are; of any version of kv."""
    found = []
    for name in dict.fromkeys((*socketfolder.beginning(), *socketfolder.sockets())):  # some may begin meanwhile
        if asked := ask(name, wire.STATUS):
            found.append((name, asked[0]))
            asked[1].close()
        elif about := _silent(name):
            found.append((name, about))
    return found


def _silent(name: str) -> dict[str, Any] | None:
    """What the process of that socket is, which does not answer: it has just begun, or somebody has stopped it; None =
    there is none."""
    with suppress(OSError, ValueError):
        about: dict[str, Any] = json.loads(socketfolder.owner(name))
        state = socketfolder.SILENT if name in socketfolder.sockets() else socketfolder.STARTING
        return about | {"state": state, "memory_bytes": held_bytes(about["pid"])}
    return None


def stop(name: str) -> dict[str, Any] | None:
    """Ask the process of that socket to leave, and wait until it has, unless it is answering; what it was."""
    asked = ask(name, wire.STOP)
    if asked is None:
        return _end(name)
    found, conn = asked
    with suppress(OSError, wire.Closed):
        if not found["commands"]:
            wire.receive(conn)
    conn.close()
    return found


def _end(name: str) -> dict[str, Any] | None:
    """Let a process go on that does not answer, and leave; what it was."""
    about = _silent(name)
    if about is not None:
        with suppress(ProcessLookupError):
            process = os.pidfd_open(about["pid"])
            try:
                for number in (signal.SIGTERM, signal.SIGCONT):
                    signal.pidfd_send_signal(process, number)
                select.select([process], [], [], ANSWER_S)
            finally:
                os.close(process)
    return about


def make_room(missing: int, uuid: str = "") -> bool:
    """Ask all that are idle to leave, where they hold so many bytes at least, of the GPU of that UUID or ("") of main
    memory; whether there was one."""
    there = [
        (name, about) for name, about in processes() if about.get("state", socketfolder.READY) == socketfolder.READY
    ]
    idle = [
        (name, about) for name, about in there
        if not about["commands"] and (not uuid or about.get("gpu_uuid") == uuid)
    ]  # fmt: skip
    if not idle or sum(about["gpu_bytes" if uuid else "memory_bytes"] for _, about in idle) < missing:
        return False
    stopped = [stop(name) for name, _ in idle]
    return any(stopped)


def let_go(error: DoesNotFit | NotTaken, invocation: Invocation) -> bool:
    """Whether this command can do without the process that holds its model on a GPU, which is in its way; then nothing
    of it is used any more."""
    from kvcli.runtime.engine.held import HeldModel

    forked = thisprocess.forked
    if forked is None or not isinstance(forked.kept, HeldModel):
        return False
    if isinstance(error, NotTaken):
        render.announce(f"{error.message}; the model is loaded once more", invocation)
    elif not _end_holder(forked.kept, f"{socketfolder.kind()}-{forked.key}{socketfolder.SOCKET}", error.missing):
        return False
    forked.kept = None
    return True


def _end_holder(held: HeldModel, name: str, missing: int) -> bool:
    """End the process that holds the weights for the process of that socket, unless another command has them, or what
    it takes beside them, which are in the plan already, is less than is missing."""
    asked = ask(name, wire.STATUS)
    if asked is None:
        return False
    about, conn = asked
    conn.close()
    if about["commands"] != 1 or not 0 < missing <= about["gpu_bytes"] - held.weight_bytes:
        return False
    with suppress(ProcessLookupError):
        process = os.pidfd_open(held.holder)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], ANSWER_S)
        finally:
            os.close(process)
    return True
