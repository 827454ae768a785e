"""How many cores there are to compute with."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores this process may run on, hyper-threads counted once where that can be told."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = set()
    for cpu in allowed:
        try:
            siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return max(1, len(cores))
