"""Metadata values of a GGUF header: a bounds-checked cursor and the lazy arrays it yields.

Nothing is allocated by a number read from the file before that number was compared with the bytes that are
left, so time and memory are bounded by the size of the file. Long arrays are checked when the file is opened
and decoded when they are first used; numpy, which takes longer to import than a header to read, comes in then.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, overload

from kvcli.errors import ModelError

if TYPE_CHECKING:
    import numpy as np

Buffer = bytes | mmap.mmap

# Value types of the format: numbers by their struct (and numpy) code, and three that are not numbers.
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
U8, U32, BOOL, STRING, ARRAY, U64 = 0, 4, 7, 8, 9, 10
SCALARS = {number: struct.Struct(code) for number, code in NUMBERS.items()}
LEAST_BYTES = {**{number: s.size for number, s in SCALARS.items()}, BOOL: 1, STRING: 8, ARRAY: 12}

MAX_DEPTH = 4  # arrays of arrays of arrays of arrays
LIST_LIMIT = 1024  # arrays up to this long (per-layer settings) are lists, longer ones (vocabularies) lazy
DAMAGED = "the file is damaged or was cut short; download or convert it again"


class NeedMoreBytes(Exception):
    """The given prefix ends inside the header; the first `needed` bytes of the file or more must be there."""

    def __init__(self, needed: int) -> None:
        super().__init__(f"the header needs at least {needed} bytes")
        self.needed = needed


def quote(name: str) -> str:
    """A name from the file, fit for one line of an error message."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


def _errors(key: str) -> str:
    """What to do with bytes of a string that are not UTF-8: a name or note about a model is no reason to refuse it."""
    return "replace" if key.startswith("general.") else "strict"


class NumberArray(Sequence[Any]):
    """A long read-only array of numbers or booleans; items are Python's, `numpy.asarray` gives the array."""

    def __init__(self, buffer: Buffer, code: str, count: int, offset: int, boolean: bool = False) -> None:
        """`count` numbers of the struct code `code` from `offset` on."""
        self._buffer, self._code, self._count, self._offset, self._boolean = buffer, code, count, offset, boolean

    @cached_property
    def _values(self) -> np.ndarray:
        """[n], little-endian, maybe unaligned."""
        import numpy as np

        values = np.frombuffer(self._buffer, np.dtype(self._code), self._count, self._offset)
        return values != 0 if self._boolean else values

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._values[index].tolist()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        import numpy as np

        return np.array(self._values, dtype, copy=True) if copy else np.asarray(self._values, dtype)

    def __repr__(self) -> str:
        return f"<{len(self)} values of {self._values.dtype}>"


class StringArray(Sequence[str]):
    """A long read-only array of strings, decoded when they are used; ModelError then if one is not UTF-8."""

    def __init__(self, buffer: Buffer, starts: array[int], end: int, where: str, errors: str = "strict") -> None:
        """`starts`: where each string's 8-byte length is in `buffer`; `end`: where the last string ends."""
        self._buffer, self._starts, self._end, self._where, self._errors = buffer, starts, end, where, errors
        self._strings: list[str] | None = None

    def _decoded(self) -> list[str]:
        raw = self._buffer[self._starts[0] : self._end]
        try:
            several = len(self._starts) > LIST_LIMIT and self._errors == "strict"
            return (several and _split_at_nul(raw, self._starts)) or self._split_one_by_one(raw)
        except UnicodeDecodeError:
            raise ModelError(f"{self._where} holds a string that is not UTF-8", DAMAGED) from None

    def _split_one_by_one(self, raw: bytes) -> list[str]:
        cuts = [*(start - self._starts[0] for start in self._starts), len(raw)]
        return [raw[start + 8 : end].decode("utf-8", self._errors) for start, end in pairwise(cuts)]

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, int):
            return self._one(range(len(self))[index])
        if self._strings is None:
            self._strings = self._decoded()
        return self._strings[index]

    def _one(self, index: int) -> str:
        """A string without those before it."""
        last = index == len(self) - 1
        raw = bytes(self._buffer[self._starts[index] + 8 : self._end if last else self._starts[index + 1]])
        try:
            return raw.decode("utf-8", self._errors)
        except UnicodeDecodeError:
            raise ModelError(f"{self._where} holds a string that is not UTF-8", DAMAGED) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._strings or self._decoded())  # not kept: whoever walks through all wants them once

    def __repr__(self) -> str:
        return f"<{len(self)} strings>"


def _split_at_nul(raw: bytes, starts: array[int]) -> list[str] | None:
    """Cut at a NUL in place of each 8-byte length, twice as fast as one by one; None if one has a NUL."""
    import numpy as np

    chars = np.frombuffer(raw, np.uint8).copy()
    places = np.frombuffer(starts, np.uint64).astype(np.int64) - starts[0]
    chars[places] = 0
    keep = np.ones(len(chars), bool)
    for byte in range(1, 8):
        keep[places + byte] = False
    text = chars[keep].tobytes().decode()
    return text.split("\0")[1:] if text.count("\0") == len(starts) else None


class Cursor:
    """Reads a header from `buffer`, the first bytes of a file of `size` bytes; `label` names the file.

    A read past the end of the file raises ModelError, one past the end of a mere prefix NeedMoreBytes.
    """

    def __init__(self, buffer: Buffer, size: int, label: str) -> None:
        self.buffer, self.size, self.label = buffer, size, label
        self.pos = 0

    def error(self, message: str, hint: str = DAMAGED) -> ModelError:
        return ModelError(f"{self.label}: {message}", hint)

    def in_file(self, n_bytes: int, what: str) -> int:
        """Check that the next `n_bytes` lie inside the file, in the prefix or not; returns where they end."""
        end = self.pos + n_bytes
        if end > self.size:
            figures = f"{end:,} bytes needed, {self.size:,} there"
            raise self.error(f"{what} runs past the end of the file ({figures})")
        return end

    def need(self, n_bytes: int, what: str) -> None:
        """Check that the next `n_bytes` are there."""
        end = self.in_file(n_bytes, what)
        if end > len(self.buffer):
            raise NeedMoreBytes(end)

    def number(self, number_type: int, what: str) -> Any:
        form = SCALARS[number_type]
        self.need(form.size, what)
        value = form.unpack_from(self.buffer, self.pos)[0]
        self.pos += form.size
        return value

    def u32(self, what: str) -> int:
        return int(self.number(U32, what))

    def u64(self, what: str) -> int:
        return int(self.number(U64, what))

    def count(self, least_bytes: int, what: str) -> int:
        """A u64 count of things of at least `least_bytes` each; refused if the file has no room for them."""
        count = self.u64(f"the number of {what}")
        if count * least_bytes > self.size - self.pos:
            raise self.error(f"it claims {count:,} {what}, more than its {self.size:,} bytes can hold")
        return count

    def string(self, what: str, errors: str = "strict") -> str:
        """`errors`: what to do with bytes that are not UTF-8, as for `bytes.decode`."""
        length = self.u64(f"the length of {what}")
        self.need(length, what)
        raw = self.buffer[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise self.error(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        """The value of a key: a Python scalar, a list, or for long arrays a NumberArray or StringArray."""
        return self._typed(self.u32(f"the type of key {quote(key)}"), key, 0)

    def _typed(self, value_type: int, key: str, depth: int) -> Any:
        what = f"the value of key {quote(key)}"
        if value_type in SCALARS:
            return self.number(value_type, what)
        if value_type == STRING:
            return self.string(what, _errors(key))
        if value_type == BOOL:
            value = self.number(U8, what)
            if value > 1:
                raise self.error(f"{what} is a boolean of {value}, not 0 or 1")
            return value == 1
        if value_type == ARRAY:
            return self._array(key, depth + 1)
        raise self.error(f"key {quote(key)} has the unknown value type {value_type}")

    def _array(self, key: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise self.error(f"key {quote(key)} nests arrays more than {MAX_DEPTH} deep")
        item_type = self.u32(f"the element type of key {quote(key)}")
        if item_type not in LEAST_BYTES:
            raise self.error(f"key {quote(key)} is an array of the unknown value type {item_type}")
        count = self.count(LEAST_BYTES[item_type], f"elements in key {quote(key)}")
        self.need(count * LEAST_BYTES[item_type], f"the array of key {quote(key)}")
        if item_type == ARRAY:
            return [self._array(key, depth + 1) for _ in range(count)]
        if count == 0:
            return []
        if item_type == STRING:
            strings = self._strings(key, count)
            return list(strings) if count <= LIST_LIMIT else strings
        return self._numbers(item_type, key, count)

    def _numbers(self, item_type: int, key: str, count: int) -> list[Any] | NumberArray:
        code, start = NUMBERS[U8 if item_type == BOOL else item_type], self.pos
        size = struct.calcsize(code)
        self.pos += count * size
        if item_type == BOOL and (largest := max(self.buffer[start : self.pos])) > 1:
            raise self.error(f"key {quote(key)} has a boolean of {largest}, not 0 or 1")
        if count > LIST_LIMIT:
            return NumberArray(self.buffer, code, count, start, item_type == BOOL)
        values = struct.unpack_from(f"<{count}{code[1:]}", self.buffer, start)
        return [value != 0 for value in values] if item_type == BOOL else list(values)

    def _strings(self, key: str, count: int) -> StringArray:
        starts = array("Q")
        length_at, add, end = SCALARS[U64].unpack_from, starts.append, self.pos
        try:
            with memoryview(self.buffer) as view:
                for _ in repeat(None, count):  # a vocabulary has 10^5 of them: nothing else in this loop
                    add(end)
                    end += 8 + length_at(view, end)[0]
            overrun = end > len(self.buffer)
        except (struct.error, OverflowError):
            overrun = True
        if overrun:
            self._find_overrun(count, f"the strings of key {quote(key)}")
        self.pos = end
        return StringArray(self.buffer, starts, end, f"{self.label}: key {quote(key)}", _errors(key))

    def _find_overrun(self, count: int, what: str) -> None:
        """Walk strings that leave the buffer again, with care: always raises ModelError or NeedMoreBytes."""
        while count and self.pos + 8 <= len(self.buffer):
            length = self.u64(what)
            self.pos = self.in_file(length, what)
            count -= 1
        self.need(8 * count, what)
