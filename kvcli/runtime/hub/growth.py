"""How far a download is that another program or library writes: by looking at the file that grows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_S = 0.1


@contextmanager
def watching(folder: Path, report: Callable[[int], None]) -> Iterator[None]:
    """While inside, call `report` (from a thread) with the bytes of the file last written to below `folder`.

    Files older than the call do not count, and the number never falls.
    """
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(folder, report, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _watch(folder: Path, report: Callable[[int], None], stop: threading.Event) -> None:
    started, most = time.time(), 0
    while not stop.wait(_POLL_S):
        _, size = max(_files(folder, started - 1), default=(0.0, 0))
        if size > most:
            most = size
            report(most)


def _files(folder: Path, since: float) -> Iterator[tuple[float, int]]:
    """(time of the last write, bytes) of each file written to since then."""
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.lstat(os.path.join(parent, name))
            except FileNotFoundError:  # moved or removed since it was listed
                continue
            if status.st_mtime >= since:
                yield status.st_mtime, status.st_size
