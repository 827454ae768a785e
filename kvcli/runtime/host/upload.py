"""`Upload`: a model's file on its way to a GPU while torch is imported. No torch.

Threads read the file into pinned memory and send it, by the driver itself, in the context that torch will use; they
hold no lock of Python meanwhile. The file lies on the card as it is until its tensors have been taken from there.
Nothing here fails: what could not be sent is read as ever.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcli.runtime.host.cudadriver import Driver, Failed, OnDevice

CHUNK = 32 << 20  # bytes that a thread reads and sends at a time
THREADS = 4  # as measured on an H200: they read 18 GB/s of what the system has in memory
MARGIN = 4 << 30  # bytes that stay free beside twice the file: a model takes about as much as its file
WAIT_S = 60.0  # for a chunk that is on its way


def begin(path: Path, size: int, index: int, free: int) -> Upload | None:
    """Begin to send a file of `size` bytes to GPU `index`, which has `free` bytes; None where there is no room for that
    or no way."""
    if sys.platform != "linux" or 2 * size + MARGIN > free:
        return None
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as torch is to count
    with suppress(Failed, OSError):
        return Upload(path, size, index, Driver())
    return None


class Upload:
    """The bytes of one file. Not for use by several threads at once."""

    def __init__(self, path: Path, size: int, index: int, driver: Driver) -> None:
        """Raises OSError."""
        self.size, self._index, self._driver = size, index, driver
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._base, self._failed, self._stopped = 0, False, False
        self._next, self._there = 0, bytearray(-(-size // CHUNK))  # the next chunk to read; which are on the card
        self._changed, self._running = threading.Condition(), THREADS
        atexit.register(self.close)  # a process that ends while threads are in the driver would crash
        _thread.start_new_thread(self._open, ())

    def bytes_at(self, first: int, size: int) -> Any:
        """Bytes [first, first + size) of the file as a CUDA array for torch, when they are there; None where they could
        not be sent."""
        wanted = slice(first // CHUNK, -(-(first + size) // CHUNK))
        with self._changed:
            self._changed.wait_for(lambda: self._failed or all(self._there[wanted]), WAIT_S)
            if self._failed or not all(self._there[wanted]):
                return None
            return OnDevice(self._base + first, size)

    def close(self) -> None:
        """Give the memory back. Nothing of it is in use any more, and the device has done what was asked of it."""
        with self._changed:
            self._stopped = True
            self._changed.wait_for(lambda: self._running == 0, WAIT_S)
            if self._running:
                return
            base, self._base, self._failed = self._base, 0, True
        atexit.unregister(self.close)
        if base:
            with suppress(Failed):
                self._driver.enter()
                self._driver.free(base)

    def _open(self) -> None:
        """The first thread: have the others send."""
        try:
            self._driver.open(self._index)
            self._base = self._driver.allocate(self.size)
        except Failed:
            self._failed = True
        for _ in range(THREADS - 1):
            _thread.start_new_thread(self._send, ())
        self._send()

    def _send(self) -> None:
        pinned: memoryview | None = None
        try:
            if not self._failed:
                self._driver.enter()
                pinned = self._driver.pin(CHUNK)
            while pinned is not None and (number := self._taken()) is not None:
                first = number * CHUNK
                size = self._read(first, pinned)
                self._driver.send(self._base + first, pinned, size)
                with self._changed:
                    self._there[number] = 1
                    self._changed.notify_all()
        except (Failed, OSError):
            self._failed = True
        finally:
            with suppress(Failed):
                if pinned is not None:
                    self._driver.unpin(pinned)
            with self._changed:
                self._running -= 1
                if not self._running:
                    os.close(self._file)
                self._changed.notify_all()

    def _taken(self) -> int | None:
        """The number of a chunk that no other thread reads; None = there are no more."""
        with self._changed:
            number = self._next
            self._next += 1
        return None if self._stopped or self._failed or number >= len(self._there) else number

    def _read(self, first: int, into: memoryview) -> int:
        size, done = min(CHUNK, self.size - first), 0
        while done < size:
            read = os.preadv(self._file, [into[done:size]], first + done)
            if not read:
                raise Failed("the file ends early")
            done += read
        return size
