"""The process that keeps a model. It computes nothing: for each command it forks a process, which finds the model
loaded and everything imported, and becomes what the caller's process is (see forkedcommand.py)."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli import environment, startup
from kvcli.keepalive import inheritance, kept, pressure, socketfolder, spawn, thisprocess, wire
from kvcli.keepalive.door import STALL_S, Door
from kvcli.keepalive.forkedcommand import HIGH, Request, allow_descriptors, become, moved, open_streams
from kvcli.keepalive.holder import Holder
from kvcli.keepalive.spawn import FOREVER, Wanted
from kvcli.runtime.host.processmemory import held_bytes

if TYPE_CHECKING:
    import _socket

    from kvcli.runtime.engine.held import HeldModel
    from kvcli.runtime.engine.loaded import LoadedModel

LOOK_S = 2.0  # between looks at whether there is a reason to leave


def main(lock: int) -> None:
    """Keep the model that stdin names, whose `lock` this process has; in one that was forked for a command, do that."""
    thisprocess.started_with.update(os.environ)
    wanted: Wanted = pickle.load(sys.stdin.buffer)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.set_inheritable(lock, False)
    allow_descriptors()
    environment.prepare()
    startup.take_process()
    door = Door(f"{socketfolder.kind()}-{wanted.key}{socketfolder.SOCKET}")
    door.attend(partial(_about, wanted, os.getpid(), socketfolder.STARTING), lock)
    host = Host(wanted, *kept.load(wanted, {lock, *door.numbers}), lock, door)
    host.warm_up()
    host.listen()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before, they end it
        signal.signal(number, lambda *_: host.leave())
    host.serve()
    os._exit(0)  # in a hurry: whoever waits for the end waits for the memory


def _about(wanted: Wanted, pid: int, state: str) -> dict[str, object]:
    """What `kv ps` shows of process `pid` before it was asked anything."""
    return spawn.about(wanted, pid, state) | {"memory_bytes": held_bytes(pid)}


@dataclass
class Running:
    """A process that does a command, and its caller."""

    pid: int
    process: int  # a descriptor of it
    conn: socket.socket
    control: int  # a pipe of which it has the other end
    said: dict[str, str] = field(default_factory=dict)  # what it told, by the first word of each line

    def close(self) -> None:
        self.conn.close()
        os.close(self.process)
        os.close(self.control)


class Host:
    """The model, and the commands that are done with it."""

    def __init__(
        self, wanted: Wanted, loaded: LoadedModel | HeldModel, holder: Holder | None, lock: int, door: Door
    ) -> None:
        self.wanted, self.loaded, self.holder, self.lock, self.door = wanted, loaded, holder, lock, door
        self.files = [*loaded.file.paths] + [Path(x.path) for x in wanted.load.lora]
        self.stamps: list[tuple[int, int, int]] = []
        self.keep_s, self.yield_vram, self.used_at = wanted.keep_s, wanted.yield_vram, time.monotonic()
        self.running: dict[int, Running] = {}
        self.answered = 0
        self.parting: list[socket.socket] = []  # callers that wait for the end of this process
        self.listener: socket.socket | None = None
        self.streams = sys.stdout.encoding, sys.stdout.errors or "strict"
        self.kept_open = _open() - {0, 1, 2, lock} - door.numbers - ({holder.process} if holder else set())

    # ---- before the first command

    def warm_up(self) -> None:
        """Do a command for nobody, to find out what it imports, and import that here."""
        words = ["run", "-n", "1", "--no-cache", "--no-stdin", "--keep-alive", "0"]
        words += ["--device", str(self.loaded.device), "-m", str(self.wanted.path), "Hi"]
        from kvcli.cli import main

        main.prepared.update({name: main.command_of(name) for name in ("run", "chat")})
        if self.loaded.text.template is None:
            words.insert(1, "--raw")
        read, write = os.pipe2(os.O_CLOEXEC)
        before = set(sys.modules)
        if (pid := os.fork()) == 0:
            os.close(read)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            thisprocess.forked = thisprocess.Forked(self.wanted.key, self.loaded, None, None, thisprocess.NOBODY, 1)
            code = main.run_command(words)
            names = sorted(set(sys.modules) - before)
            with suppress(BrokenPipeError):  # `kv stop` has ended the process that would read it
                os.write(write, "\n".join([str(code), *names]).encode()[: 1 << 16])
            os._exit(0)
        os.close(write)
        with open(read, "rb") as told:
            answered, *names = told.read().decode().split("\n")
        os.waitpid(pid, 0)
        if answered != "0":
            sys.exit(f"kv: the model in {self.wanted.path} is not kept: it does not answer")
        with startup.uncollected():
            for name in names:
                with suppress(Exception):  # it may be one that is made, not imported
                    __import__(name)
            if self.holder is not None:
                self.holder.prepare()
        self.stamps = self._stamps()

    def listen(self) -> None:
        """From here on commands are taken."""
        self.door.take_over()
        self.listener = self.door.listener

    # ---- commands

    def serve(self) -> None:
        """Until there is a reason to leave, and then until the last command is done."""
        self.used_at = time.monotonic()
        while self.listener is not None or self.running:
            waiting = select.poll()
            if self.listener is not None:
                waiting.register(self.listener, select.POLLIN)
            for one in self.running.values():
                waiting.register(one.process, select.POLLIN)
                waiting.register(one.conn, select.POLLRDHUP)
            if self.holder is not None:
                waiting.register(self.holder.process, select.POLLIN)
            ready = {fd for fd, _ in waiting.poll(1000 * self._patience())}
            for one in list(self.running.values()):
                if one.process in ready:
                    self._finish(one)
                elif one.conn.fileno() in ready:  # nobody waits for it any more
                    with suppress(ProcessLookupError):
                        os.killpg(one.pid, signal.SIGKILL)
            if self.holder is not None and self.holder.process in ready:
                self._mourn(self.holder)
            if self.listener is not None and self.listener.fileno() in ready:
                self._accept()
            elif self.listener is not None and self._reason_to_leave():
                self.leave()
        if self.holder is not None:
            self.holder.end()
        with suppress(FileNotFoundError):  # somebody has removed the folder
            os.unlink(f"{socketfolder.folder()}/{self.door.name.removesuffix(socketfolder.SOCKET)}{socketfolder.LOCK}")

    def _patience(self) -> float:
        """Seconds until the next look, or until this process has been idle for as long as it may be."""
        left = self._left()
        return LOOK_S if left is None else min(LOOK_S, max(0.0, left))

    def _left(self) -> float | None:
        """Seconds that this process still stays if nothing is asked of it; None = no end is set, or a command is on."""
        if self.running or self.keep_s == FOREVER:
            return None
        return self.used_at + self.keep_s - time.monotonic()

    def _reason_to_leave(self) -> bool:
        left = self._left()
        if (left is not None and left <= 0) or self._changed() or not self.door.is_there:
            return True
        if self.running:
            return False
        return pressure.is_high() or (self.holder is not None and self.holder.is_pressed(self.yield_vram))

    def _mourn(self, holder: Holder) -> None:
        """The process that has the weights is gone: what has them may go on, and nothing is begun with them."""
        print(f"kv: {self.wanted.load.model}: {holder} was ended: it is not kept", file=sys.stderr, flush=True)
        holder.end()
        self.holder = None
        self.leave()

    def _changed(self) -> bool:
        """Whether the model's files are others, or those of kv itself are newer than what this process runs."""
        return self._stamps() != self.stamps

    def _stamps(self) -> list[tuple[int, int, int]]:
        modules = (module for name, module in sys.modules.items() if name.startswith("kvcli"))
        ours = sorted(module.__file__ for module in modules if module.__file__)
        return [_stamp(each) for each in (*map(str, self.files), *ours)]

    def leave(self) -> None:
        """Take no more commands."""
        if self.listener is not None:
            os.truncate(self.lock, 0)  # it is no more to be found
            self.door.remove()
            self.listener.close()
            self.listener = None

    def _accept(self) -> None:
        assert self.listener is not None
        conn, _ = self.listener.accept()
        pid, uid, _ = wire.peer(conn)
        if uid != os.getuid():
            conn.close()
            return
        conn.settimeout(STALL_S)
        try:
            kind, body, fds = wire.receive(conn)
        except (wire.Closed, TimeoutError):
            conn.close()
            return
        try:
            if kind == wire.RUN:
                self._run(conn, pid, Request.of(body, fds))
                return
            if kind == wire.HANDED and fds:
                self._take(fds, body)
                fds = []  # they are the command's, also where nobody waits for the answer any more
                wire.send(conn, wire.TOLD)
            if kind in (wire.STATUS, wire.STOP):
                wire.send(conn, wire.TOLD, json.dumps(self.as_object()).encode())
            if kind == wire.STOP:
                self.leave()
                self.parting.append(conn)  # it closes when this process ends
                return
        except (OSError, ValueError):
            for fd in fds:
                with suppress(OSError):
                    os.close(fd)
        conn.close()

    def _take(self, fds: list[int], body: bytes) -> None:
        """A command that another process was asked for: the first descriptor is the connection to its caller."""
        request, caller = Request.of(body, fds[1:]), socket.socket(fileno=fds[0])
        try:
            self._run(caller, wire.peer(caller)[0], request)
        except OSError:
            caller.detach()  # all of `fds` are still open
            raise

    def _run(self, conn: socket.socket, caller: int, request: Request) -> None:
        """Fork a process that does what is asked, or tell the caller to do it."""
        changed = self._changed()
        taken = any(number >= HIGH or number in self.kept_open for number in request.numbers)
        if changed or taken or inheritance.refusal(caller):
            wire.send(conn, wire.COLD)
            conn.close()
            request.close()
            if changed:
                self.leave()
            return
        pid, process, control = self._fork(conn, caller, request)
        with suppress(OSError):  # it has done so itself
            os.setpgid(pid, pid)
        self.running[pid] = Running(pid, process, conn, control)
        request.close()
        with suppress(OSError):  # the caller is gone, which is seen in a moment
            wire.send(conn, wire.PID, str(pid).encode())
        with suppress(OSError):
            os.utime(self.door.path)

    def _fork(self, conn: socket.socket, caller: int, request: Request) -> tuple[int, int, int]:
        """A process for the command, a descriptor of it, and the pipe on which it tells things. Raises OSError."""
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            _do(self, conn, write, caller, request)
        os.close(write)
        try:
            return pid, os.pidfd_open(pid), read
        except OSError:  # nobody would see its end; it has not begun
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            raise

    def _finish(self, one: Running) -> None:
        """A command is done: its caller is told how."""
        _, status = os.waitpid(one.pid, 0)
        os.set_blocking(one.control, False)
        with suppress(BlockingIOError):
            for line in os.read(one.control, 1 << 16).decode().splitlines():
                word, _, rest = line.partition(" ")
                one.said[word] = rest
        if "keep" in one.said:
            self.keep_s = float(one.said["keep"])
        self.yield_vram = one.said.get("yield", self.yield_vram)
        if "away" not in one.said:  # else somebody else does the command
            with suppress(OSError):
                wire.send(one.conn, wire.ENDED, str(status).encode())
            self.answered += 1
        del self.running[one.pid]
        one.close()
        self.used_at = time.monotonic()

    def as_object(self) -> dict[str, object]:
        """What `kv ps` shows."""
        left = self._left()
        found = _about(self.wanted, os.getpid(), socketfolder.READY)
        if self.holder is not None:
            found |= self.holder.as_object(held_bytes(os.getpid()))
        return found | {
            "commands": len(self.running),
            "answered": self.answered,
            "keep_alive_s": None if self.keep_s == FOREVER else self.keep_s,
            "left_s": None if left is None else max(0.0, left),
        }


def _do(host: Host, conn: socket.socket, control: int, caller: int, request: Request) -> None:
    """In the forked process: the command, of which this never returns."""
    to_caller: _socket.socket = conn
    try:
        to_caller, control = moved(conn, control)
        thisprocess.forked = forked = become(request, to_caller, control, caller, host.kept_open)
        forked.key, forked.kept = host.wanted.key, host.loaded
        open_streams(*host.streams)
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
    from kvcli import __main__

    __main__.command()


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _open() -> set[int]:
    """Descriptors of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of this listing
            os.fstat(int(name))
            found.add(int(name))
    return found
