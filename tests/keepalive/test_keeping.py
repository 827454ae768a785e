"""The parts of keep-alive: who is asked, what a process can become, when one leaves."""

from __future__ import annotations

import json
import marshal
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from conftest import KvHere

from kvcli.cli import keeping
from kvcli.errors import UsageError
from kvcli.keepalive import (
    client,
    door,
    forkedcommand,
    host,
    inheritance,
    kept,
    pressure,
    socketfolder,
    spawn,
    thisprocess,
    wire,
)
from kvcli.keepalive.forkedcommand import Request
from kvcli.options import ChatOptions, LoadOptions, LoraOption


@pytest.mark.parametrize(
    ("args", "variable", "asked"),
    [
        ("run hello", "", True),
        ("run hello", "5m", True),
        ("run hello", "0", False),
        ("run --keep-alive 0 hello", "5m", False),
        ("run --keep-alive=0 hello", "", False),
        ("run --keep-alive 5m hello", "0", True),
        ("run -- --keep-alive 0", "", True),
        ("chat --script", "", True),
        ("chat", "5m", False),
        ("bench", "5m", False),
        ("", "5m", False),
    ],
)
def test_which_commands_may_be_done_by_another_process(args: str, variable: str, asked: bool) -> None:
    assert client.may_be_asked(args.split(), variable) == asked


@pytest.mark.parametrize(
    ("text", "seconds"), [("5m", 300), ("30s", 30), ("1h", 3600), ("1d", 86400), ("90", 90), ("0", 0), ("-1", -1)]
)
def test_times(text: str, seconds: float) -> None:
    assert spawn.parse_time(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "5 minutes", "1w", "5mm", "1e3", "9999999999s"])
def test_times_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="--keep-alive must be a time"):
        spawn.parse_time(text)


def test_keys_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    monkeypatch.chdir(tmp_path)
    one = spawn.key(LoadOptions("a.gguf"))
    for alike in (
        LoadOptions(str(tmp_path / "b.gguf")),
        LoadOptions("a.gguf", threads=3, offline=True, memory_limit="6G", chat=ChatOptions("x"), chat_anyway=True),
    ):
        assert spawn.key(alike) == one
    others = (
        LoadOptions("c.gguf"),
        LoadOptions("a.gguf", exact=True),
        LoadOptions("a.gguf", device="cpu"),
        LoadOptions("a.gguf", lora=(LoraOption("x.gguf"),)),
        LoadOptions("a.gguf", lora=(LoraOption("x.gguf", 2.0),)),
    )
    assert len({one, *map(spawn.key, others)}) == 1 + len(others)


def test_a_folder_that_others_may_enter_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Path(socketfolder.make()).stat().st_mode & 0o777 == 0o700
    (tmp_path / "kv/x-1.sock").touch()
    assert socketfolder.sockets() == ["x-1.sock"] and socketfolder.sockets("y") == []
    os.chmod(tmp_path / "kv", 0o750)
    assert socketfolder.sockets() == []
    with pytest.raises(PermissionError):
        socketfolder.make()


def test_a_kind_is_one_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thisprocess, "started_with", {"HOME": "/a", "LC_ALL": "C", "KV_MODEL": "a"})
    one = socketfolder.kind()
    monkeypatch.setattr(thisprocess, "started_with", {"HOME": "/b", "LC_ALL": "C", "KV_MODEL": "b"})
    assert socketfolder.kind() == one
    for name in ("LC_ALL", "OMP_NUM_THREADS", "KV_CPU_ISA", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"):
        monkeypatch.setattr(thisprocess, "started_with", {"LC_ALL": "C", name: "7"})
        assert socketfolder.kind() != one


def test_messages_and_descriptors() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    wire.send(ours, wire.RUN, b"x" * 100_000, [write])
    kind, body, fds = wire.receive(theirs)
    assert (kind, body, len(fds)) == (wire.RUN, b"x" * 100_000, 1) and not os.get_inheritable(fds[0])
    os.write(fds[0], b"y")
    assert os.read(read, 1) == b"y"
    for wrong in (b"kv\x09R\0\0\0\0", b"GET / HT", b"kv\x01R\xff\xff\xff\xff", b"kv"):
        ours, theirs = socket.socketpair()
        ours.sendall(wrong)
        ours.close()
        with pytest.raises(wire.Closed):
            wire.receive(theirs)
    for fd in (read, write, *fds):
        os.close(fd)


@pytest.mark.parametrize("body", [b"", b"?", marshal.dumps((1, 2)), marshal.dumps(([], {}, [1]))])
def test_requests_that_make_no_sense(body: bytes) -> None:
    with pytest.raises(ValueError):
        Request.of(body, [5])


def test_what_a_process_can_become() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert inheritance.refusal(process.pid) == ""
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        if hard == resource.RLIM_INFINITY:  # then ours can be lower
            child = os.fork()
            if child == 0:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                os._exit(not inheritance.refusal(process.pid))
            assert os.waitpid(child, 0)[1] == 0
        child = os.fork()
        if child == 0:  # nicer than the other one
            os.nice(1)
            os._exit("priority" not in inheritance.refusal(process.pid))
        assert os.waitpid(child, 0)[1] == 0
        process.kill()
    assert "it cannot be told" in inheritance.refusal(process.pid)


@pytest.fixture
def idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> host.Host:
    """A process that listens, of a model that is a file."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(thisprocess, "started_with", {})
    socketfolder.make()
    model = tmp_path / "m.gguf"
    model.write_bytes(b"model")
    there: Any = SimpleNamespace(file=SimpleNamespace(paths=(model,)), device="cpu")
    lock = socketfolder.only_one("key")
    assert lock is not None
    made = host.Host(
        spawn.Wanted(model, LoadOptions(str(model)), "key", 60.0, "cpu"),
        there,
        None,
        lock,
        door.Door(f"{socketfolder.kind()}-key{socketfolder.SOCKET}"),
    )
    made.stamps = made._stamps()
    made.listen()
    return made


@pytest.mark.parametrize("reason", ["", "file", "gone file", "socket", "other socket", "idle", "memory"])
def test_reasons_to_leave(reason: str, idle: host.Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "is_high", lambda: reason == "memory")
    path = tmp_path / "kv" / idle.door.name
    if reason == "file":
        (tmp_path / "m.gguf").write_bytes(b"model.")
    elif reason == "gone file":
        (tmp_path / "m.gguf").unlink()
    elif "socket" in reason:
        path.rename(tmp_path / "kept")
        if reason == "other socket":
            path.touch()
    elif reason == "idle":
        idle.used_at -= 61.0
    assert idle._reason_to_leave() == bool(reason)
    idle.leave()
    assert path.exists() == (reason == "other socket")


def test_it_stays_while_it_is_used_and_for_ever(idle: host.Host) -> None:
    assert 0 < (idle._left() or 0) <= 60
    idle.running[1] = None  # type: ignore[assignment]
    assert idle._left() is None
    idle.running.clear()
    idle.keep_s = spawn.FOREVER
    assert idle._left() is None
    idle.leave()


def test_a_folder_for_sockets_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nowhere"))
    assert socketfolder.folder() == f"/tmp/kv-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socketfolder.make() == socketfolder.make() == f"{tmp_path}/kv"


@pytest.mark.parametrize("options", [(), ("-O",), ("-P", "-u"), ("-X", "utf8", "-X", "pycache_prefix=/nowhere", "-B")])
def test_a_process_has_the_options_of_python_that_its_caller_has(options: tuple[str, ...], tmp_path: Path) -> None:
    code = "import json; from kvcli.keepalive import socketfolder, spawn\n"
    code += "print(json.dumps([socketfolder.kind(), spawn._options()]))"
    first = json.loads(subprocess.check_output([sys.executable, *options, "-c", code]))
    again = json.loads(subprocess.check_output([sys.executable, *first[1], "-c", code]))
    assert first[0] == again[0]


@pytest.mark.parametrize("ack", [True, False])
def test_a_command_is_handed_on_once_the_other_process_has_taken_it(ack: bool, idle: host.Host) -> None:
    """It is not where the other one leaves."""
    ours, theirs = socket.socketpair()
    asked = Request(marshal.dumps(([], {}, [])), os.open(".", os.O_PATH), (), (), {}, ())
    child = os.fork()
    if child == 0:
        try:
            forkedcommand.hand_on(thisprocess.Forked("", None, asked, theirs, -1, 0), idle.door.name)
            os._exit(0)
        finally:
            os._exit(1)
    if ack:
        idle._run = lambda conn, caller, request: (conn.close(), request.close())  # type: ignore[assignment, func-returns-value, misc]
        idle._accept()
    else:
        assert idle.listener
        idle.listener.accept()[0].close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (not ack)
    for each in (ours, theirs):
        each.close()
    asked.close()
    idle.leave()


def test_a_command_keeps_its_descriptors_where_who_handed_it_on_is_gone(idle: host.Host) -> None:
    ours, theirs = socket.socketpair()
    begun: list[socket.socket] = []
    idle._run = lambda conn, caller, request: (begun.append(conn), request.close())  # type: ignore[assignment, func-returns-value, misc]
    asking, folder = wire.connect(idle.door.name), os.open(".", os.O_PATH)
    wire.send(asking, wire.HANDED, marshal.dumps(([], {}, [])), [theirs.fileno(), folder])
    asking.close()
    idle._accept()
    wire.send(begun[0], wire.DONE, b"0")
    assert wire.receive(ours)[:2] == (wire.DONE, b"0")
    for each in (ours, theirs, *begun):
        each.close()
    os.close(folder)
    idle.leave()


def test_a_command_that_cannot_be_watched_is_not_begun(idle: host.Host, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    fork, begun = os.fork, []

    def refuse(*_: int) -> int:
        raise OSError(24, "Too many open files")

    def forked() -> int:
        begun.append(fork())
        return begun[-1]

    for refused in ({"fork": refuse}, {"fork": forked, "pidfd_open": refuse}):
        with monkeypatch.context() as patch:
            for name, instead in refused.items():
                patch.setattr(os, name, instead)
            patch.setattr(host, "do", lambda *_: signal.pause())
            asked = Request.of(marshal.dumps(([], {}, [])), [os.open(".", os.O_PATH)])
            with pytest.raises(OSError, match="Too many"):
                idle._run(theirs, os.getpid(), asked)
            asked.close()
        assert len(os.listdir("/proc/self/fd")) == before and not idle.running
    assert len(begun) == 1
    with pytest.raises(ChildProcessError):  # ended, and waited for
        os.waitpid(begun[0], os.WNOHANG)
    for each in (ours, theirs):
        each.close()
    idle.leave()


def test_a_process_whose_folder_is_gone_ends(idle: host.Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "LOOK_S", 0.01)
    shutil.rmtree(tmp_path / "kv")
    idle.serve()
    assert idle.listener is None


def test_a_lock_says_nothing_of_who_had_it_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name = f"{socketfolder.kind()}-a{socketfolder.SOCKET}"
    for told in (b'{"pid": 1234567}', b'{"pid": 8}'):
        lock = socketfolder.only_one("a")
        assert lock is not None and socketfolder.owner(name) == b""
        os.pwrite(lock, told, 0)
        assert socketfolder.owner(name) == told
        os.close(lock)  # as one that is killed leaves it
    assert socketfolder.owner(name) == b""


def test_who_asks_for_an_owner_keeps_nobody_from_being_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    name, over = f"{socketfolder.kind()}-a{socketfolder.SOCKET}", threading.Event()

    def ask() -> None:
        while not over.is_set():
            socketfolder.owner(name)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(300):
            lock = socketfolder.only_one("a")
            assert lock is not None
            os.close(lock)
    finally:
        over.set()
        asking.join()


def test_a_process_is_found_and_ended_from_its_beginning_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(thisprocess, "started_with", {})
    monkeypatch.setattr(
        spawn, "_options", lambda: ["-c", "import time; time.sleep(60)"]
    )  # long before its door is there
    for _ in range(2):
        spawn.start(spawn.Wanted(tmp_path / "m.gguf", LoadOptions("m"), "key", 60.0, "cpu"))
    [(name, about)] = keeping.processes()
    assert (about["model"], about["state"]) == ("m", "starting")
    assert keeping.stop(name) is not None
    assert os.waitstatus_to_exitcode(os.waitpid(about["pid"], 0)[1]) == -signal.SIGTERM
    assert keeping.processes() == []


def test_what_is_said_where_no_model_is_loaded(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "processes", list)
    for command in ("ps", "stop"):
        assert kv_here(command) == (0, "", "kv: no model is loaded\n")
    code, _, err = kv_here("stop", "smollm2")
    assert (code, err) == (3, "kv: error: smollm2 is not loaded\n  no model is\n")


def test_what_is_said_of_models_that_are_told_to_exit(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    there = [(f"s{n}", {"model": f"m{n}", "path": f"/m{n}.gguf", "pid": n, "commands": n}) for n in range(2)]
    monkeypatch.setattr(keeping, "processes", lambda: there)
    monkeypatch.setattr(keeping, "stop", lambda name: True)
    told = "kv: m0 (process 0) exits\nkv: m1 (process 1) will exit after its answer\n"
    assert kv_here("stop", "--all") == (0, "", told)


def test_an_end_while_the_model_warms_up_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that finds out what is imported has nobody to tell it."""
    from kvcli.cli import main

    warming: Any = SimpleNamespace(
        wanted=SimpleNamespace(path=tmp_path, key="", load=SimpleNamespace(model=str(tmp_path))),
        loaded=SimpleNamespace(text=SimpleNamespace(template="x"), device="cpu"),
        holder=None,
    )
    monkeypatch.setattr(main, "prepare", lambda names: None)
    monkeypatch.setattr(main, "run_command", lambda words: 0)
    monkeypatch.setattr(thisprocess, "forked", None)
    if (pid := os.fork()) == 0:
        monkeypatch.setattr(os, "fork", lambda: 0)
        try:
            host.Host.warm_up(warming)
        except BaseException:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_a_model_answers_while_it_warms_up_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KV_YIELD_VRAM is said to every command, and what this one says is what it imports."""
    from kvcli.cli import main

    def run(words: list[str]) -> int:
        assert thisprocess.forked
        thisprocess.forked.tell("yield 4G")
        return 0

    warming: Any = SimpleNamespace(
        wanted=SimpleNamespace(path=tmp_path, key="", load=SimpleNamespace(model=str(tmp_path))),
        loaded=SimpleNamespace(text=SimpleNamespace(template="x"), device="cpu"),
        holder=None,
        _stamps=list,
    )
    monkeypatch.setattr(main, "prepare", lambda names: None)
    monkeypatch.setattr(main, "run_command", run)
    host.Host.warm_up(warming)
    assert warming.stamps == []


def test_a_process_that_cannot_be_forked_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, "Too many open files")

    path = tiny.make("gemma3").path
    load = LoadOptions(str(path), device="cpu")
    monkeypatch.setattr(kept, "Holder", refuse)
    monkeypatch.setattr(kept, "is_held", lambda wanted: True)
    with pytest.raises(SystemExit) as ended:
        kept.load(spawn.Wanted(path, load, "key", 60.0, "cuda:0"), ())
    assert ended.value.code == f"kv: {path} is not kept: no process can hold it: Too many open files"
