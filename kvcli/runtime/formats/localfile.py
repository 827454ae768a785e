"""A file of a model on disk: mapped, so that only what is looked at is read."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from kvcli.errors import ModelError
from kvcli.runtime.formats.mapped import MappedFile


class LocalFile(MappedFile):
    """A regular file, mapped for reading. `size` in bytes; `label` names it in messages."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError: missing, unreadable, empty, a folder or a device."""
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a FIFO must not block
        try:
            if os.path.isdir(path):
                raise ModelError(f"{path} is a directory, not a model file", "give the file inside it")
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            raise ModelError(f"no such file: {path}", "check the path; kv models ls lists the known names") from None
        except PermissionError:
            raise ModelError(f"{path} cannot be read: permission denied", "check its owner and mode (ls -l)") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ModelError(f"{str(path)!r} cannot be opened: {reason}", "check the path") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ModelError(f"{path} is not a regular file", "it is memory-mapped, so a pipe will not do")
            if status.st_size == 0:
                raise ModelError(f"{path} is empty (0 bytes)", "download it again")
            super().__init__(descriptor, str(path))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be memory-mapped: {error}") from None
        finally:
            os.close(descriptor)

    def prefix(self, n_bytes: int) -> mmap.mmap:
        """The whole file, of which only what is looked at gets read."""
        return self.buffer

    def keep(self, n_bytes: int) -> None:
        """Nothing to keep: the file is here."""
