"""The first bytes of a file on disk, for the readers of headers: mapped, so that nothing else is read."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from kvcli.errors import ModelError


class LocalFile:
    """A regular file, mapped for reading. `size` in bytes; `label` names it in messages."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError: missing, unreadable, empty, a folder or a device."""
        self.label = str(path)
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a FIFO must not block
        try:
            descriptor = os.open(path, flags)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelError(f"{self.label!r} cannot be opened: {reason}", "check the path") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a regular file", "give a model's file or folder")
            if status.st_size == 0:
                raise ModelError(f"{path} is empty (0 bytes)", "download it again")
            self.size = status.st_size
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be memory-mapped: {error}") from None
        finally:
            os.close(descriptor)

    def prefix(self, n_bytes: int) -> mmap.mmap:
        """The whole file, of which only what is looked at gets read."""
        return self._map

    def keep(self, n_bytes: int) -> None:
        """Nothing to keep: the file is here."""
