"""What a command's process has of the process that started it, and how a fork of another one comes to have it, too.

What cannot be had (more rights, other namespaces, a smaller control group) is a reason for the command to run by
itself. Everything is read from /proc, of a caller that waits.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from functools import cache
from pathlib import PurePosixPath
from typing import NamedTuple

_GROUPS = "/sys/fs/cgroup"
_RIGHTS = ("Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
_LINKS = (*(f"ns/{space}" for space in ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")), "root")
_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
_GROUP_LIMITS = ("memory.max", "memory.high", "memory.swap.max", "cpu.max", "pids.max")


def refusal(pid: int) -> str:
    """Why a fork of this process cannot be what process `pid` is; "" = it can."""
    try:
        theirs, ours = _status(pid), _own(os.getpid())
        if differs := next((name for name in _RIGHTS if theirs.get(name) != ours.rights.get(name)), ""):
            return f"{differs} of the two differs"
        for name, link in zip(_LINKS, ours.links, strict=True):
            if os.readlink(f"/proc/{pid}/{name}") != link:
                return f"{name} of the two differs"
        if os.getpriority(os.PRIO_PROCESS, pid) < os.getpriority(os.PRIO_PROCESS, 0):
            return "its priority is higher"
        if os.sched_getscheduler(pid) != os.sched_getscheduler(0):
            return "its scheduler is another one"
        if any(_above(resource.prlimit(pid, each)[1], resource.getrlimit(each)[1]) for each in _LIMITS):
            return "its limits are higher"
        return _group_limit(pid)
    except (OSError, ValueError) as error:
        return f"it cannot be told what it is ({error})"


class _Own(NamedTuple):
    """What nobody but this process itself could change, and it does not: rights, and what `_LINKS` lead to."""

    rights: dict[str, str]
    links: list[str]


@cache
def _own(pid: int) -> _Own:
    """Of this process, which is `pid`: one that was forked from it asks for itself."""
    return _Own(_status(pid), [os.readlink(f"/proc/{pid}/{name}") for name in _LINKS])


def take(pid: int) -> int:
    """Become what process `pid` is, as far as no file is concerned; the process that started it. Raises OSError."""
    theirs = _status(pid)
    os.umask(int(theirs["Umask"], 8))
    for each in _LIMITS:
        if (limits := resource.prlimit(pid, each)) != resource.getrlimit(each):
            resource.setrlimit(each, limits)
    os.sched_setaffinity(0, os.sched_getaffinity(pid))
    if (nice := os.getpriority(os.PRIO_PROCESS, pid)) != os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    with suppress(OSError):  # to be ended sooner than others is everybody's right, later is not
        if (score := _read(f"/proc/{pid}/oom_score_adj")) != _read("/proc/self/oom_score_adj"):
            _write("/proc/self/oom_score_adj", score)
    ignored, blocked = (_signals(theirs[name]) for name in ("SigIgn", "SigBlk"))
    for number in ignored - {signal.SIGPIPE}:  # which Python ignores
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return int(theirs["PPid"])


def _status(pid: int) -> dict[str, str]:
    lines = _read(f"/proc/{pid}/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _signals(mask: str) -> set[int]:
    """Of a mask in hexadecimal digits, without those that no process may handle."""
    bits = int(mask, 16)
    return {n for n in range(1, signal.NSIG) if bits >> (n - 1) & 1} & set(map(int, signal.valid_signals())) - {9, 19}


def _above(limit: int, other: int) -> bool:
    infinite = resource.RLIM_INFINITY
    return other != infinite and (limit == infinite or limit > other)


def _group_limit(pid: int) -> str:
    """What says that a control group of that process, in which this one is not, limits what it may use."""
    theirs, ours = (_groups(each) for each in (str(pid), "self"))
    for group in theirs:
        if group in ours:
            return ""  # and so are those above it
        for name in _GROUP_LIMITS:
            with suppress(OSError):
                if not _read(f"{_GROUPS}/{group}/{name}").startswith("max"):
                    return f"{name} of its control group"
    return ""


def _groups(process: str) -> list[str]:
    """Its control group (version 2) and those above it, by their paths, the innermost first."""
    for line in _read(f"/proc/{process}/cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            inner = PurePosixPath(path.lstrip("/"))
            return [str(each) for each in (inner, *inner.parents)]
    return []
