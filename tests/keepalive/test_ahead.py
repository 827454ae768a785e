"""Processes that are forked before there is a command for them, and what a caller need not wait for."""

from __future__ import annotations

import marshal
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from staying import Staying, children, is_alive, until

from kvcli.keepalive import pages, thisprocess, wire
from kvcli.keepalive.forkedcommand import Request
from kvcli.keepalive.spare import Child, Spare

slow = pytest.mark.slow
RUN = ("run", "-m", str(tiny.path_of("gemma3")), "--raw", "--no-cache", "-s", "7", "-n", "4", "hello")
LONG = (*RUN[:-2], "300", "--ignore-eos", "Pack my box")


@pytest.fixture(scope="module")
def staying(kv_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staying]:
    own = {n: v for n, v in os.environ.items() if n == "KV_CPU_ISA" or not n.startswith(("KV_", "NO_COLOR"))}
    made = Staying(kv_command, own, tmp_path_factory.mktemp("ahead"))
    made.keep(tiny.make("gemma3").path)
    yield made
    made.end()


def in_a_fork(do: Callable[[], Any]) -> Any:
    """What `do` finds in a forked process."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        with open(write, "wb") as told:
            told.write(marshal.dumps(do()))
        os._exit(0)
    os.close(write)
    with open(read, "rb") as told:
        found = marshal.loads(told.read())
    os.waitpid(pid, 0)
    return found


def spare_of(staying: Staying) -> int:
    """The process that waits for a command."""
    (found,) = until(lambda: children(staying.about["pid"]))
    return found


@slow
def test_a_command_is_done_by_the_process_that_waits_for_it(staying: Staying) -> None:
    waits = spare_of(staying)
    process = staying.start(*LONG)
    assert process.stdout
    process.stdout.read(1)
    assert os.getpgid(waits) == waits and process.poll() is None
    process.communicate()
    assert process.returncode == 0
    until(lambda: not is_alive(waits))
    assert spare_of(staying) != waits


@slow
def test_commands_at_a_time_are_processes_at_a_time(staying: Staying) -> None:
    """The first one has the process that waits, and the others are forked when they come."""
    spare_of(staying)
    begun = [staying.start(*LONG) for _ in range(3)]
    answers = {process.communicate()[0] for process in begun}
    assert len(answers) == 1 and [process.returncode for process in begun] == [0, 0, 0]


@slow
def test_a_process_that_waits_may_be_killed(staying: Staying) -> None:
    answer = staying.run(*RUN)
    os.kill(waits := spare_of(staying), signal.SIGKILL)
    until(lambda: not children(staying.about["pid"]))  # no other one before there was a command
    assert staying.run(*RUN) == answer and spare_of(staying) != waits


@slow
def test_it_ends_with_the_process_that_forked_it(kv_command: list[str], tmp_path: Path) -> None:
    for end in ("kill", "stop"):
        folder = tmp_path / end
        folder.mkdir()
        staying = Staying(kv_command, dict(os.environ), folder)
        pid = staying.keep(tiny.make("gemma3").path)
        (waits,) = until(lambda pid=pid: children(pid))
        if end == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            assert staying.run("stop", "--all")[0] == 0
        until(lambda waits=waits: not is_alive(waits))


@slow
def test_memory_is_that_of_both(staying: Staying) -> None:
    """Each page that the two share is counted in half for each."""
    spare, about = spare_of(staying), staying.about
    alone = int(Path(f"/proc/{about['pid']}/smaps_rollup").read_text().partition("Pss:")[2].split()[0]) << 10
    assert is_alive(spare) and about["memory_bytes"] > 1.5 * alone


@slow
def test_exit_codes_and_files_are_there_when_the_caller_ends(staying: Staying, tmp_path: Path) -> None:
    """It ends before the process that did the command is gone."""
    for nth in range(5):
        out = tmp_path / f"{nth}.txt"
        code, text, _ = staying.run(*RUN[:-1], "-o", str(out), "hello")
        assert code == 0 and out.read_bytes() == text
    assert staying.run(*RUN[:-2], "x", "hello")[0] == 2


def test_one_that_takes_nothing_more_is_ended() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    process = subprocess.Popen(["sleep", "60"])
    child = Child(process.pid, os.pidfd_open(process.pid), os.open(os.devnull, os.O_RDONLY))
    folder, (conn, other) = os.open(".", os.O_PATH), socket.socketpair()
    request = Request.of(marshal.dumps(([], {}, [])), [folder])
    assert not Spare(child, ours).take(conn, request)
    assert not is_alive(process.pid) and ours.fileno() == -1
    process.returncode = -signal.SIGKILL
    for each in (conn, other, request):
        each.close()


def test_a_done_command_is_not_ended_when_its_caller_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it told says so, before its caller hears of it."""
    from kvcli.keepalive import host

    read, write = os.pipe()
    conn, caller = socket.socketpair()
    one = host.Running(Child(os.getpid(), -1, read), conn)
    assert thisprocess.DONE not in one.listen()
    os.write(write, b"keep 5\ndone\n")
    assert one.listen() == {"keep": "5", "done": ""} == one.listen()
    for fd in (read, write):
        os.close(fd)
    for each in (conn, caller):
        each.close()


def test_the_next_one_is_forked_when_a_command_is_done() -> None:
    """Its process need not be gone."""
    from kvcli.keepalive import host

    read, write = os.pipe()
    conn, caller = socket.socketpair()
    one, child = host.Running(Child(os.getpid(), -1, read), conn), object()
    kept: Any = SimpleNamespace(
        listener=conn, running={1: one}, spare=None, holder=None, _model=None, _fork=lambda do: child
    )
    host.Host._fork_ahead(kept)
    assert kept.spare is None
    os.write(write, b"done\n")
    assert one.listen() and not one.silent
    os.close(write)
    assert one.listen() and one.silent
    host.Host._fork_ahead(kept)
    assert kept.spare.child is child
    os.close(read)
    for each in (conn, caller, kept.spare.to):
        each.close()


@pytest.mark.parametrize("device", ["cpu", "cuda:0", ""])  # "": what was kept is not used
def test_what_a_caller_is_told_at_the_end(device: str) -> None:
    """On a CPU that it may end, with every file of the command closed; else it waits for the end of the process."""
    from kvcli.keepalive import forkedcommand

    ours, theirs = socket.socketpair()
    control, write = os.pipe()
    kept = "a model" if device else None
    if (pid := os.fork()) == 0:
        forked = thisprocess.Forked("", kept, None, theirs, write, 1)
        forked.on_cpu = device == "cpu"
        forkedcommand.tell_end(forked, 258)
        os._exit(len(os.listdir("/proc/self/fd")) > 2 if device == "cpu" else 0)
    theirs.close()
    os.close(write)
    kind, body, _ = wire.receive(ours)
    at_once = device == "cpu"
    assert (kind, body) == ((wire.ENDED, b"512") if at_once else (wire.DONE, b"258"))
    with open(control, "rb") as told:
        assert told.read() == (b"done\n" if at_once else b"")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ours.close()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_pages_that_were_written_are_found_and_copied() -> None:
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(bytes(64 * mmap.PAGESIZE - 1) + b"x")
    areas = pages.areas()

    def written() -> tuple[pages.Ranges, bytes]:
        for page in (3, 4, 60):
            memory[page * mmap.PAGESIZE] = 1
        before = pages.touched(areas).written
        pages.have(pages.Touched([(first, end + mmap.PAGESIZE) for first, end in before[-1:]], []))
        return before, memory[-1:]

    found, last = in_a_fork(written)
    sizes = {(end - first) // mmap.PAGESIZE for first, end in found}
    assert {1, 2} <= sizes and all(any(a <= x and y <= b for a, b in areas.written) for x, y in found)
    assert last == b"x"
    memory.close()


@pytest.mark.skipif(
    sys.platform != "linux" or [int(each) for each in os.uname().release.split(".")[:2]] < [5, 14],
    reason="needs an advice to madvise",
)
def test_code_that_was_run_is_found_and_there() -> None:
    """A forked process has none of it until it runs, or has it beforehand, up to the moment when it is asked."""
    areas = pages.areas()
    run = in_a_fork(lambda: pages.touched(areas).run)
    assert run and all(any(a <= x and y <= b for a, b in areas.run) for x, y in run)
    first, end = max(areas.run, key=lambda area: area[1] - area[0])
    end = min(end, first + (4 << 20))
    whole = pages.Touched([], [(first, end)])

    def bytes_had(until: bool) -> int:
        pages.have(whole, lambda: until)
        return sum(b - a for a, b in pages.touched(whole).run)

    there, not_there = (in_a_fork(lambda until=until: bytes_had(until)) for until in (False, True))
    assert not_there < there == end - first
