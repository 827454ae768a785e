"""How many cores there are to compute with."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cpus() -> list[int]:
    """The CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once where that can be told."""
    cores = set()
    for cpu in usable_cpus():
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))


def too_many(threads: int) -> str:
    """A notice where more threads are asked for than can ever run at once; "" = nothing to say."""
    cpus = len(usable_cpus())
    if threads <= cpus:
        return ""
    have = "there is 1 CPU" if cpus == 1 else f"there are {cpus} CPUs"
    return f"`threads={threads}` is no faster than {cpus}: {have} for it"
