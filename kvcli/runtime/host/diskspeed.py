"""How fast a folder's disk is read: a file is written there, put out of the page cache, read, and gone."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.runtime.host.machine import ProbeFailed

FILE_BYTES = 256 << 20
KEEP_FREE_BYTES = 1 << 30
_STEP = 8 << 20
ATTEMPTS = 5  # a page that was used just now may stay once


def disk_speed(folder: Path, size: int = FILE_BYTES) -> dict[str, Any]:
    """Bytes free, and GB/s of reading `size` bytes in order. Raises ProbeFailed.

    The file has no name while it exists, so that nothing is left behind whatever happens.
    """
    try:
        paths.make_private(folder)
        free = shutil.disk_usage(folder).free
        if free < size + KEEP_FREE_BYTES:
            raise ProbeFailed(f"only {free >> 20:,} MiB are free in {folder}")
        name = folder / f"disk-speed.tmp-{os.getpid()}"
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            name.unlink()
            return {"folder": str(folder), "free_bytes": free, "read_gb_s": _read_speed(handle, size)}
        finally:
            os.close(handle)
    except OSError as error:
        raise ProbeFailed(f"{folder}: {error.strerror or error}") from None


def _read_speed(handle: int, size: int) -> float:
    for start in range(0, size, _STEP):
        os.pwrite(handle, os.urandom(min(_STEP, size - start)), start)
    os.fsync(handle)
    put_out(handle, size)
    buffer = bytearray(_STEP)
    began = time.perf_counter()
    for start in range(0, size, _STEP):
        if os.preadv(handle, [buffer], start) <= 0:
            raise ProbeFailed("the file that was written cannot be read")
    return size / (time.perf_counter() - began) / 1e9


def put_out(handle: int, size: int) -> None:
    """Have a file that was flushed read from the disk next time, not from the system's page cache. Raises ProbeFailed
    where that cannot be had."""
    if not hasattr(os, "posix_fadvise"):
        raise ProbeFailed("this system cannot put a single file out of its page cache")
    for attempt in range(ATTEMPTS):
        time.sleep(0.02 * attempt)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        if not _in_memory(handle, size):
            return
    raise ProbeFailed("the page cache keeps the file, so its disk cannot be measured")


def _in_memory(handle: int, size: int) -> bool:
    """Whether the middle of the file can be read without waiting for the disk."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(handle, [bytearray(4096)], size // 2 & -4096, os.RWF_NOWAIT) > 0
    except OSError:  # it would have to wait, or this filesystem cannot say
        return False
