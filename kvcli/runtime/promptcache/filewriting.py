"""Writing prompt-cache files (promptcache.py describes them): a file is there whole or not at all. No torch.

It is written under another name, flushed to the disk and renamed. A process that is killed leaves that other name,
which nobody has locked any more.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvcli.runtime.promptcache.file import ALIGN, FORMAT, VERSION, Contents

PART = ".part-"  # in the names of files that are being written
PART_AGE_S = 60  # a file in the making that is older, and that nobody has locked, was left by a killed process
Checkpoint = Callable[[str], None]


def nothing(point: str) -> None:
    """The `Checkpoint` of those who want none."""


def write(
    path: Path,
    contents: Contents,
    blocks: Iterable[Any],
    checkpoint: Checkpoint = nothing,
    place: Callable[[str, Path], None] = os.replace,
) -> None:
    """Write a file in place of what is at `path`. `blocks`: a buffer for each of `contents.pages`, in that order.

    `checkpoint(name)` is called between steps; what it raises ends the writing, and nothing is left. `place` is called
    with the name of the whole file and `path`. Raises OSError, and what `place` raises.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}{PART}", dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who cleans up sees that somebody is at work
            checkpoint("opened")
            _write_to(file, contents, blocks, checkpoint)
            file.flush()
            checkpoint("written")
            os.fsync(file.fileno())
            checkpoint("flushed")
            place(temporary, path)
        checkpoint("renamed")
        _flush_folder(path.parent)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_to(file: Any, contents: Contents, blocks: Iterable[Any], checkpoint: Checkpoint) -> None:
    header, plan = _header(contents)
    file.write(header)
    checkpoint("header")
    sums: list[int] = []
    arena = -1
    for (own, _), block in zip(contents.pages, blocks, strict=True):
        if own != arena:
            file.write(bytes(-file.tell() % ALIGN))
            arena = own
        view = memoryview(block).cast("B")
        if view.nbytes != contents.page_bytes[own]:
            raise ValueError(f"a page of {view.nbytes} bytes, not {contents.page_bytes[own]}")
        sums.append(zlib.crc32(view))
        file.write(view)
        checkpoint("page")
    file.write(bytes(-file.tell() % ALIGN))
    values = {"crc32": struct.pack(f"<{len(sums)}I", *sums), **_small(contents)}
    tail = b"".join(values[name] for name, *_ in plan)
    file.write(tail)
    file.write(hashlib.sha256(header + tail).digest())


def _small(contents: Contents) -> dict[str, bytes]:
    """The tensors that are no pages, but for the sums of the pages."""
    tokens = struct.pack(f"<{len(contents.tokens)}i", *contents.tokens)
    return {"tokens": tokens, **{name: value.astype("<f4").tobytes() for name, value in contents.basis.items()}}


def _header(contents: Contents) -> tuple[bytes, list[tuple[str, str, list[int]]]]:
    """The bytes before the first page, and (name, dtype, shape) of the tensors behind the last one."""
    numbers: dict[int, list[int]] = {}
    for arena, number in contents.pages:
        numbers.setdefault(arena, []).append(number)
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "identity": json.dumps(contents.identity),
        "about": json.dumps(contents.about),
        "pages": json.dumps({str(arena): runs(ns) for arena, ns in numbers.items()}),
        "start": str(contents.start),
        "parent": contents.parent,
    }
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0

    def place(name: str, dtype: str, shape: list[int], size: int) -> None:
        nonlocal at
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size

    for arena, listed in numbers.items():
        size = contents.page_bytes[arena]
        place(f"arena{arena}", "U8", [len(listed), size], len(listed) * size)
        if padding := -at % ALIGN:  # safetensors files have no holes
            place(f"padding{arena}", "U8", [padding], padding)
    tail = [("crc32", "U32", [len(contents.pages)]), ("tokens", "I32", [len(contents.tokens)])]
    tail += [(name, "F32", list(value.shape)) for name, value in contents.basis.items()]
    for name, dtype, shape in tail:
        place(name, dtype, shape, 4 * math.prod(shape))
    place("digest", "U8", [32], 32)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return struct.pack("<Q", len(text)) + text, tail


def runs(numbers: list[int]) -> list[list[int]]:
    """Ascending numbers as [first, count] pairs."""
    found: list[list[int]] = []
    for number in numbers:
        if found and sum(found[-1]) == number:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def remove_parts(folder: Path, now: float, name: str = "") -> None:
    """Remove files that were being written, of `name` or of any, and that nobody is writing any more."""
    for path in folder.glob(f".{glob.escape(name[:80]) or '*'}{PART}*"):
        try:
            with path.open("rb") as file:
                if now - os.fstat(file.fileno()).st_mtime > PART_AGE_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink(missing_ok=True)
        except OSError:  # gone, locked, or of another user
            continue
