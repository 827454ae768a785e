"""How much memory this process takes, as the system counts it. No torch."""

from __future__ import annotations

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

GROWTH_BYTES = 36 << 20  # of a run beyond its model: code that is read again, and what Python's own memory grows by
_STATUS, _SMAPS = Path("/proc/self/status"), Path("/proc/self/smaps")


def peak_bytes() -> int:
    """The most main memory that this process has had resident.

    Linux's own count for this program comes first: the one of getrusage starts at what the parent had before exec.
    """
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) << 10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def reset_peak() -> bool:
    """Let `peak_bytes` begin anew with what is resident now; False where the system does not do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return True
    except OSError:
        return False


def mapped_bytes(path: Path) -> int | None:
    """Resident bytes of this file's memory maps; None where the system does not tell."""
    try:
        inode, lines = os.stat(path).st_ino, _SMAPS.read_text().splitlines()
    except OSError:
        return None
    total, ours = 0, False
    for line in lines:
        key, _, rest = line.partition(" ")
        if not key.endswith(":"):  # "start-end perms offset dev inode path" opens the next map
            words = rest.split(maxsplit=4)
            ours = len(words) > 3 and words[3] == str(inode)
        elif ours and key == "Rss:":
            total += int(rest.split()[0]) << 10
    return total


def held_bytes(pid: int | str = "self") -> int:
    """What a process holds of main memory, each page that it shares with others counted in proportion."""
    with suppress(OSError):
        found = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        if found:
            return int(found[1]) << 10
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
