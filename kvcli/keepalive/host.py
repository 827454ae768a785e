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
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kvcli import environment, startup
from kvcli.errors import KVError
from kvcli.keepalive import inheritance, kept, pages, pressure, socketfolder, spawn, thisprocess, wire
from kvcli.keepalive.door import STALL_S, Door
from kvcli.keepalive.forkedcommand import HIGH, Request, allow_descriptors
from kvcli.keepalive.holder import Holder
from kvcli.keepalive.rehearsal import rehearse
from kvcli.keepalive.spare import Child, Running, Spare
from kvcli.keepalive.spawn import FOREVER, Wanted
from kvcli.keepalive.taking import Model, do, stand_by
from kvcli.runtime.host.memory import CPU
from kvcli.runtime.host.processmemory import held_bytes

if TYPE_CHECKING:
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
        self.spare: Spare | None = None
        self.touched = pages.Touched([], [])  # by commands
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
        from kvcli.runtime.hub import modelfiles

        with suppress(KVError, OSError):  # so recipes are read, and modules imported, before commands are forked
            modelfiles.find_model(self.wanted.load.model, offline=True)
        main.prepare(("run", "chat"))
        if self.loaded.text.template is None:
            words.insert(1, "--raw")
        before, model = set(sys.modules), (self.wanted.key, self.loaded)
        code, names = rehearse(words, *model, lambda: sorted(set(sys.modules) - before))
        if code != 0:
            sys.exit(f"kv: the model in {self.wanted.path} is not kept: it does not answer")
        with startup.uncollected():
            for name in names:
                with suppress(Exception):  # it may be one that is made, not imported
                    __import__(name)
            if self.holder is not None:
                self.holder.prepare()
        if self.holder is None:  # else a command waits for a GPU, not for memory
            areas = pages.areas()
            _, touched = rehearse(words, *model, lambda: tuple(pages.touched(areas)))
            self.touched = pages.Touched(*touched) if touched else self.touched
        self.stamps = self._stamps()

    def listen(self) -> None:
        """From here on commands are taken."""
        self.door.take_over()
        self.listener = self.door.listener

    # ---- commands

    def serve(self) -> None:
        """Until there is a reason to leave, and then until the last command is done."""
        self.used_at = time.monotonic()
        self._fork_ahead()
        while self.listener is not None or self.running:
            waiting = select.poll()
            if self.listener is not None:
                waiting.register(self.listener, select.POLLIN)
            if self.spare is not None:
                waiting.register(self.spare.child.process, select.POLLIN)
            for one in self.running.values():
                waiting.register(one.child.process, select.POLLIN)
                if not one.silent:
                    waiting.register(one.child.control, select.POLLIN)
                if one.awaited:
                    waiting.register(one.conn, select.POLLRDHUP)
            if self.holder is not None:
                waiting.register(self.holder.process, select.POLLIN)
            ready = {fd for fd, _ in waiting.poll(1000 * self._patience())}
            if self.spare is not None and self.spare.child.process in ready:  # somebody has ended it
                self._end_spare()
            for one in list(self.running.values()):
                if one.child.process in ready:
                    self._finish(one)
                    continue
                if one.child.control in ready and thisprocess.DONE in one.listen():
                    self._fork_ahead()
                if one.conn.fileno() in ready:  # nobody waits for it any more
                    one.awaited = False
                    with suppress(ProcessLookupError):
                        if thisprocess.DONE not in one.listen():
                            os.killpg(one.child.pid, signal.SIGKILL)
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
        return [_stamp(each) for each in self._watched]

    @cached_property
    def _watched(self) -> list[bytes]:
        """The files of the model and those of `kv`, as new objects: to look at all modules each time would copy the
        memory of each, which a forked process shares."""
        modules = (module for name, module in sys.modules.items() if name.startswith("kvcli"))
        ours = sorted(module.__file__ for module in modules if module.__file__)
        return [os.fsencode(each) for each in (*map(str, self.files), *ours)]

    def leave(self) -> None:
        """Take no more commands."""
        if self.listener is not None:
            os.truncate(self.lock, 0)  # it is no more to be found
            self.door.remove()
            self.listener.close()
            self.listener = None
        self._end_spare()

    def _end_spare(self) -> None:
        if self.spare is not None:
            self.spare.end()
        self.spare = None

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
        """Let a forked process do what is asked, or tell the caller to do it."""
        taken = any(number >= HIGH or number in self.kept_open for number in request.numbers)
        child = None if taken else self._prepared(conn, caller, request)
        changed = self._changed()
        if child is None or changed or inheritance.refusal(caller):
            if child is not None:  # it waits for the caller's word
                child.end()
            request.close()
            if changed:
                self.leave()
            with suppress(OSError):
                wire.send(conn, wire.COLD)
            conn.close()
            return
        with suppress(OSError):  # it has done so itself
            os.setpgid(child.pid, child.pid)
        self.running[child.pid] = Running(child, conn)
        request.close()
        with suppress(OSError):  # the caller is gone, which is seen in a moment
            wire.send(conn, wire.PID, str(child.pid).encode())
        with suppress(OSError):
            os.utime(self.door.path)

    def _prepared(self, conn: socket.socket, caller: int, request: Request) -> Child:
        """A process that becomes what the caller's is, and waits for its word. Raises OSError."""
        spare = self.spare
        if spare is not None and len(request.fds) <= wire.MOST_FDS - 2:
            self.spare = None
            if spare.take(conn, request):
                return spare.child
        return self._fork(partial(do, self._model, conn, caller, request))

    @property
    def _model(self) -> Model:
        on_cpu = self.wanted.device == CPU
        return Model(self.wanted.key, self.loaded, on_cpu, self.kept_open, self.streams, self.touched)

    def _fork_ahead(self) -> None:
        """Have a process that waits for the next command, unless there are any now that are not done, which need the
        processor, or a command waits for a GPU much longer than for that."""
        busy = any(thisprocess.DONE not in one.said for one in self.running.values())
        if self.listener is None or busy or self.spare is not None or self.holder is not None:
            return
        with suppress(OSError):  # the next one is forked when it comes
            ours, theirs = socket.socketpair()
            ours.settimeout(STALL_S)
            with theirs:
                self.spare = Spare(self._fork(partial(stand_by, self._model, ours, theirs)), ours)

    def _fork(self, do: Callable[[int], NoReturn]) -> Child:
        """A process that does that, with the pipe on which it tells things. Raises OSError."""
        read, write = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
        except OSError:
            os.close(read)
            os.close(write)
            raise
        if pid == 0:
            do(write)
        os.close(write)
        try:
            return Child(pid, os.pidfd_open(pid), read)
        except OSError:  # nobody would see its end; it has not begun
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(read)
            raise

    def _finish(self, one: Running) -> None:
        """A command is done: its caller is told how."""
        _, status = os.waitpid(one.child.pid, 0)
        said = one.listen()
        if "keep" in said:
            self.keep_s = float(said["keep"])
        self.yield_vram = said.get("yield", self.yield_vram)
        if "away" not in said:  # else somebody else does the command
            with suppress(OSError):
                wire.send(one.conn, wire.ENDED, str(status).encode())
            self.answered += 1
        del self.running[one.child.pid]
        one.close()
        self.used_at = time.monotonic()
        self._fork_ahead()

    def as_object(self) -> dict[str, object]:
        """What `kv ps` shows."""
        left = self._left()
        found = _about(self.wanted, os.getpid(), socketfolder.READY)
        if self.spare is not None:
            found["memory_bytes"] = held_bytes(os.getpid()) + held_bytes(self.spare.child.pid)
        if self.holder is not None:
            found |= self.holder.as_object(held_bytes(os.getpid()))
        return found | {
            "commands": len(self.running),
            "answered": self.answered,
            "keep_alive_s": None if self.keep_s == FOREVER else self.keep_s,
            "left_s": None if left is None else max(0.0, left),
        }


def _stamp(path: bytes) -> tuple[int, int, int]:
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
