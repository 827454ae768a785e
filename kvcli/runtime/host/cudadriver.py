"""CUDA's driver, called without torch: memory of a card, and what other processes open it by."""

from __future__ import annotations

import ctypes
from typing import Any


class Failed(Exception):
    """The driver refuses, or there is none, or a file ends early."""


class Driver:
    """What of CUDA's driver is needed. Every call leaves Python to other threads."""

    def __init__(self) -> None:
        """Raises Failed where there is none."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Failed(str(error)) from None
        self._context = ctypes.c_void_p()

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise Failed(f"{name} gives {code}")

    def open(self, index: int) -> None:
        """Take part in the card's primary context, which is made for it and stays."""
        device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self.enter()

    def enter(self) -> None:
        """Have this thread use that context."""
        self._call("cuCtxSetCurrent", self._context)

    def allocate(self, size: int) -> int:
        """The address of so many bytes of the card."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def pin(self, size: int) -> memoryview:
        """Memory of the host that the card reads by itself; it stays until the process ends or `unpin`."""
        address = ctypes.c_void_p()
        self._call("cuMemAllocHost_v2", ctypes.byref(address), ctypes.c_size_t(size))
        assert address.value is not None
        return memoryview((ctypes.c_char * size).from_address(address.value)).cast("B")

    def unpin(self, pinned: memoryview) -> None:
        self._call("cuMemFreeHost", _address(pinned))

    def send(self, to: int, pinned: memoryview, size: int) -> None:
        """Copy the first `size` bytes to the card; it is done when this returns."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(to), _address(pinned), ctypes.c_size_t(size))

    def range_of(self, address: int) -> tuple[int, int]:
        """Where the allocation begins that this address of the card is in, and its bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value

    def handle_of(self, base: int) -> bytes:
        """What another process of this user opens an allocation by that begins there."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def opened(self, handle: bytes) -> int:
        """Where another process's allocation begins here; it stays open until this process ends."""
        address, lazily = ctypes.c_uint64(), ctypes.c_uint(1)  # the one flag that there is
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, lazily)
        return address.value


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


def _address(pinned: memoryview) -> ctypes.c_void_p:
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(pinned)))


class OnDevice:
    """Bytes on a card, as torch takes them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
