"""Pages of memory that a command writes to. A forked process shares them with the one before until then, and waits for
a copy of each; one that is forked ahead of its command makes these copies before it comes."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress

Ranges = list[tuple[int, int]]  # first addresses, and those behind the last ones
_POPULATE_WRITE = 23  # advice to madvise since Linux 5.14: as if each page were written to
_ENTRY = 8  # bytes that /proc/self/pagemap has of each page
_PRESENT, _OF_FILE, _ALONE = 1 << 63, 1 << 61, 1 << 56


def writable() -> Ranges:
    """What this process may write to and shares only with what is forked from it."""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        words = [line.split(None, 2) for line in maps]
        return [_addresses(place) for place, rights, _ in words if rights.startswith(b"rw") and rights.endswith(b"p")]
    return []


def written(areas: Ranges) -> Ranges:
    """In a process that was forked when the one before it had these areas: pages of them that it has copies of."""
    found: Ranges = []
    with suppress(OSError), open("/proc/self/pagemap", "rb", 0) as pages:
        for first, end in areas:
            pages.seek(first // mmap.PAGESIZE * _ENTRY)
            entries = array("Q", pages.read((end - first) // mmap.PAGESIZE * _ENTRY))
            found += ((first + a * mmap.PAGESIZE, first + b * mmap.PAGESIZE) for a, b in _runs(map(_is_copy, entries)))
    return found


def copy(ranges: Ranges) -> None:
    """Have copies of these pages. Older systems make each when it is written to."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for first, end in ranges:
        advise(first, end - first, _POPULATE_WRITE)


def _addresses(place: bytes) -> tuple[int, int]:
    first, end = place.split(b"-")
    return int(first, 16), int(end, 16)


def _is_copy(entry: int) -> bool:
    return entry & (_PRESENT | _OF_FILE | _ALONE) == _PRESENT | _ALONE


def _runs(flags: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Where flags are set: from, to."""
    begun, n = -1, 0
    for n, flag in enumerate((*flags, False)):
        if flag and begun < 0:
            begun = n
        elif not flag and begun >= 0:
            yield begun, n
            begun = -1
