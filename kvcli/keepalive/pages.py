"""Pages of memory that a command writes to, and those of code that it runs. A forked process shares the first with the
one before until then, and waits for a copy of each, and has none of the others, which it waits for, too; one that is
forked ahead of its command does that before it comes."""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

Ranges = list[tuple[int, int]]  # first addresses, and those behind the last ones
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # advice to madvise since Linux 5.14: as if each page were read, or written to
_STEP = 1 << 20  # bytes at a time, a fraction of a millisecond
_ENTRY = 8  # bytes that /proc/self/pagemap has of each page
_PRESENT, _OF_FILE, _ALONE = 1 << 63, 1 << 61, 1 << 56


class Touched(NamedTuple):
    """Pages that were written to, and pages of code that was run."""

    written: Ranges
    run: Ranges


def areas() -> Touched:
    """What this process may write to and shares only with what is forked from it, and where its code is."""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        words = [line.split(None, 2) for line in maps]
        return Touched(
            [_addresses(place) for place, rights, _ in words if rights.startswith(b"rw") and rights.endswith(b"p")],
            [_addresses(place) for place, rights, _ in words if rights == b"r-xp"],
        )
    return Touched([], [])


def touched(there: Touched) -> Touched:
    """In a process that was forked when the one before it had these areas: pages of them that it has copies of, and
    pages of code that it has."""
    return Touched(_those(there.written, _is_copy), _those(there.run, _is_of_file))


def have(ranges: Touched, until: Callable[[], bool] = lambda: False) -> None:
    """Have this code, and copies of these pages, or of some of them, if `until` comes true before that. Older systems
    do it where code is run, and pages are written to."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for some, advice in ((ranges.run, _POPULATE_READ), (ranges.written, _POPULATE_WRITE)):
        for first, end in some:
            for start in range(first, end, _STEP):
                if until():
                    return
                advise(start, min(_STEP, end - start), advice)


def _those(areas: Ranges, wanted: Callable[[int], bool]) -> Ranges:
    """Pages of these areas whose entries of /proc/self/pagemap are `wanted`."""
    found: Ranges = []
    with suppress(OSError), open("/proc/self/pagemap", "rb", 0) as pages:
        for first, end in areas:
            pages.seek(first // mmap.PAGESIZE * _ENTRY)
            entries = array("Q", pages.read((end - first) // mmap.PAGESIZE * _ENTRY))
            found += ((first + a * mmap.PAGESIZE, first + b * mmap.PAGESIZE) for a, b in _runs(map(wanted, entries)))
    return found


def _addresses(place: bytes) -> tuple[int, int]:
    first, end = place.split(b"-")
    return int(first, 16), int(end, 16)


def _is_copy(entry: int) -> bool:
    return entry & (_PRESENT | _OF_FILE | _ALONE) == _PRESENT | _ALONE


def _is_of_file(entry: int) -> bool:
    return entry & (_PRESENT | _OF_FILE) == _PRESENT | _OF_FILE


def _runs(flags: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Where flags are set: from, to."""
    begun, n = -1, 0
    for n, flag in enumerate((*flags, False)):
        if flag and begun < 0:
            begun = n
        elif not flag and begun >= 0:
            yield begun, n
            begun = -1
