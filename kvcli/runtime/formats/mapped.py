"""Files mapped for reading, which may be truncated meanwhile by another program. No torch.

Reading what is gone would end the process with a bus error. Where mapped.c was compiled it reads as zeros instead. With
or without it `check` says what happened: ask it after every use, before anything is made of what was read.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.libraries import compiled


class _Buffer(ctypes.Structure):
    """Python's Py_buffer."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("format", "shape", "strides", "suboffsets", "internal")),
    ]


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = compiled("_mapped")
    if library is None:
        return None
    library.kv_watch.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.kv_watch.restype = ctypes.POINTER(ctypes.c_int)
    library.kv_forget.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.kv_forget.restype = None
    return library


class MappedFile:
    """A file as memory: `buffer`, of `size` bytes."""

    def __init__(self, descriptor: int, label: str) -> None:
        """Map an open file, which may be closed then. `label` names it in messages. Raises OSError and ValueError."""
        self.label = label
        self.buffer = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        self.size = len(self.buffer)
        self._truncated: Any = [0]  # one flag
        library = _library()
        if library is not None and (flag := library.kv_watch(_address(self.buffer), self.size)):
            self._truncated = flag
            weakref.finalize(self.buffer, library.kv_forget, flag)

    def release(self) -> None:
        """Give back the memory of what was read so far; what is read again comes from the file."""
        if hasattr(self.buffer, "madvise"):
            self.buffer.madvise(mmap.MADV_DONTNEED)

    def has(self, address: int, nbytes: int) -> bool:
        """Whether that memory is a part of it."""
        first = _address(self.buffer)
        return first <= address and address + nbytes <= first + self.size

    def check(self) -> None:
        """Raises ModelError if the file was truncated since it was mapped."""
        if self._truncated[0] or self.buffer.size() < self.size:
            raise ModelError(f"{self.label} was truncated while kv was using it", "put the whole file back")


def _address(mapped: mmap.mmap) -> int:
    """Where it stands: ctypes itself tells that of writable memory only."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(mapped), ctypes.byref(buffer), 0)
    address = buffer.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return address
