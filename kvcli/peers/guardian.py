"""A process between this one and a program that it starts: whatever ends this one, `kill -9` too, ends the program with
all that it has started. Imports nothing of ours."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE_S = 10.0  # that the program has to end when it is asked to
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
_LOOK_S = 0.05


def start(words: Sequence[str], environment: Mapping[str, str], log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    """Start the program beneath a guardian. When the guardian's stdin is closed, the program ends, then the guardian;
    it has the program's exit code. `log`: where both write; None = where this process does. Raises OSError."""
    root = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path[0] = {root!r}; from kvcli.peers.guardian import main; main()"
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code, *words], stdin=subprocess.PIPE, stdout=log or sys.stderr, stderr=log,
        env=dict(environment), start_new_session=True,  # Ctrl-C is for this process, which ends the other
    )  # fmt: skip


def main() -> None:
    """Run the program that the arguments name until it ends, or stdin does."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # what the program leaves behind is ours, too
    try:
        program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_as_usual)
    except OSError as error:
        sys.exit(f"{sys.argv[1]}: {error.strerror}")
    select.select([0, os.pidfd_open(program.pid)], [], [])
    _end()
    code = program.wait()
    os._exit(code if code >= 0 else 128 - code)


def _as_usual() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _end() -> None:
    """End all that are below this process."""
    until = time.monotonic() + GRACE_S
    for pid in below(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    while left := below(os.getpid()):
        if time.monotonic() > until:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def below(pid: int) -> list[int]:
    """The processes that it has started, and those that these have, without such as have ended."""
    started: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    started.setdefault(int(parent), []).append(int(entry))
    found, waiting = list[int](), [pid]
    while waiting:
        children = started.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
