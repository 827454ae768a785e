"""Kernel calls that are noted, to be made again by one call of C: on a CPU what a CUDA graph is on a GPU."""

from __future__ import annotations

import ctypes
import struct
from array import array
from typing import Any

import torch

ARGUMENTS = 12  # of a call, at most; as in cpu_calls.h


class Calls:
    """Stands for the library of kernels while a step is noted: makes its calls and keeps them, with all that they read.

    `parts`: the parts (kv_part) of the calls, whose first positions may be changed before `run`. `keep`: what must live
    as long. `others`: calls that cannot be made again; with any of them the list is of no use.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._numbers = array("q")
        self.parts: list[array[int]] = []
        self.keep: list[object] = []
        self.others: list[str] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        number = self._library.kv_call_number(name.encode())
        if number < 0:
            self.others.append(name)
            return function

        def noted(*arguments: Any) -> None:
            self._note(number, function.argtypes, arguments)
            function(*arguments)

        setattr(self, name, noted)
        return noted

    def _note(self, number: int, kinds: list[type], arguments: tuple[Any, ...]) -> None:
        words = [number, *map(self._word, kinds, arguments)]
        self._numbers.extend(words + [0] * (1 + ARGUMENTS - len(words)))

    def _word(self, kind: type, value: Any) -> int:
        """An argument as kv_arg has it: 64 bits."""
        if kind is ctypes.c_float:
            return int(struct.unpack("q", struct.pack("d", value))[0])
        if value is None or isinstance(value, int):
            return int(value or 0)
        self.keep.append(value)
        return ctypes.addressof(getattr(value, "_obj", value))

    def new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """An empty tensor that stays where it is."""
        made = torch.empty(*shape, dtype=dtype)
        self.keep.append(made)
        return made

    def run(self) -> None:
        """Make all calls again, in order."""
        self._library.kv_run(self._numbers.buffer_info()[0], len(self._numbers) // (1 + ARGUMENTS))
