"""`PromptCacheFile`: rows of a prompt on disk, as a safetensors file. No torch.

The header's `__metadata__` has FORMAT and a version, how the rows were made (`identity`; see sameness.py), and what is
only told (`about`). Tensors: "arena0", "arena1", ...: whole pages, uint8 [pages, page bytes], each aligned to
4 KiB, which page stands where in the metadata's `pages`; "tokens" int32; "basis...": means and scales; "selected...":
positions of rows that were selected by score, int32; "crc32" uint32, one for each page; "digest": SHA-256 of all but
the pages. Numbers are little-endian; pages are as the machine had them, which is part of the identity.

A file covers the tokens from `start` on. Those before it are named by `parent`, the chained hash of their blocks
(store.py). A file is there whole or not at all: it is written under another name, flushed to the disk and renamed. A
process that is killed leaves that other name, which nobody has locked any more.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import math
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import CacheFileError, ModelError
from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.formats.ggufvalues import NeedMoreBytes
from kvcli.runtime.formats.safetensors import Header, TensorInfo, parse_header
from kvcli.runtime.promptcache.rowsettings import differences, sentence
from kvcli.runtime.promptcache.sameness import alike

if TYPE_CHECKING:
    import numpy as np

FORMAT, VERSION, SELECTED = "kv-prompt-cache", "1", "2"  # versions: of all rows of a prompt, and of selected ones
ALIGN = 4096
MAX_TOKENS = 1 << 28
_MARK_BYTES = 80  # at the start of a file, which say whether it is one of ours
_REDO = "kv cache build --force makes a new one"
PART = ".part-"  # in the names of files that are being written
PART_AGE_S = 60  # a file in the making that is older, and that nobody has locked, was left by a killed process
Checkpoint = Callable[[str], None]


@dataclass(frozen=True)
class Contents:
    """What a file says: everything but the pages themselves, whose order is that of `pages`."""

    identity: dict[str, str]
    tokens: list[int]  # from `start` on
    pages: list[PageKey]  # sorted
    page_bytes: dict[int, int]  # by arena
    basis: dict[str, np.ndarray] = field(default_factory=dict)  # float32; which rows are "selected...", int32
    about: dict[str, str] = field(default_factory=dict)
    start: int = 0
    parent: str = ""

    @property
    def end(self) -> int:
        """Tokens in all, those before `start` included."""
        return self.start + len(self.tokens)

    @property
    def payload_bytes(self) -> int:
        return sum(self.page_bytes[arena] for arena, _ in self.pages)


class PromptCacheFile:
    """An open file, of which all but the pages was read and checked. Close it, or use it in a `with`."""

    def __init__(self, path: Path, expected: Mapping[str, str] | None = None) -> None:
        """`expected`: the identity whose rows the file must have, as far as nothing was evicted (sameness.py).

        Raises CacheFileError, which names what is other than in this run, or what is wrong with the file.
        """
        self.path = path
        self._fd = open_regular(path)
        try:
            self.status = os.fstat(self._fd)
            self._parse(expected)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PromptCacheFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _parse(self, expected: Mapping[str, str] | None) -> None:
        header, raw = self._read_header()
        metadata = header.metadata
        if metadata.get("version") not in (VERSION, SELECTED):
            raise foreign(self.path, f"format version {metadata.get('version')}, this kv reads up to {SELECTED}")
        try:
            self.contents = self._contents(header)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise damaged(self.path, f"its header makes no sense ({type(error).__name__})") from None
        if expected is not None and not alike(self.contents.identity, expected):
            raise foreign(self.path, sentence(differences(self.contents.identity, expected)))
        self._check_digest(header, raw)

    def _read_header(self) -> tuple[Header, bytes]:
        size = self.status.st_size
        raw = self._pread(min(_MARK_BYTES, size), 0)
        if not raw:
            raise damaged(self.path, "it is empty")
        if not _marked(raw):
            raise CacheFileError(f"{self.path} is not a prompt cache", "kv cache build makes one")
        while True:
            try:
                header = parse_header(raw, size, str(self.path))
                return header, raw[: header.data_offset]
            except NeedMoreBytes as more:
                raw = self._pread(min(more.needed, size), 0)
            except ModelError as error:
                told = error.message if str(self.path) in error.message else f"{self.path}: {error.message}"
                raise CacheFileError(told, _REDO) from None

    def _contents(self, header: Header) -> Contents:
        """Raises KeyError, ValueError and the like where things do not fit together."""
        metadata, tensors = header.metadata, header.tensors
        identity, about = (_strings(json.loads(metadata[name])) for name in ("identity", "about"))
        pages: list[PageKey] = []
        page_bytes: dict[int, int] = {}
        self._places: dict[PageKey, tuple[int, int]] = {}  # where a page stands, and the number of its checksum
        for name, listed in json.loads(metadata["pages"]).items():
            info, arena = tensors[f"arena{int(name)}"], int(name)
            count, size = info.shape
            if info.dtype != "U8" or size < 1 or sum(n for _, n in listed) != count or min(map(min, listed)) < 0:
                raise ValueError("pages")
            numbers = [number for first, n in listed for number in range(first, first + n)]
            page_bytes[arena] = size
            for i, number in enumerate(numbers):
                self._places[arena, number] = info.offset + i * size, len(pages)
                pages.append((arena, number))
        if len(self._places) != len(pages) or tensors["crc32"].shape != (len(pages),):
            raise ValueError("pages")
        tokens = self._values(tensors["tokens"], "I32", "<i4").tolist()
        self._sums = self._values(tensors["crc32"], "U32", "<u4")
        basis = {n: self._values(t, *_kind(n)) for n, t in tensors.items() if n.startswith(("basis", "selected"))}
        start = int(metadata["start"])
        if not 0 <= start <= MAX_TOKENS:
            raise ValueError("start")
        return Contents(identity, tokens, pages, page_bytes, basis, about, start, metadata["parent"])

    def _values(self, info: TensorInfo, dtype: str, kind: str) -> np.ndarray:
        import numpy as np

        if info.dtype != dtype or info.nbytes > 4 * MAX_TOKENS:
            raise ValueError(info.name)
        return np.frombuffer(self._pread(info.nbytes, info.offset), kind).reshape(info.shape)

    def _check_digest(self, header: Header, raw: bytes) -> None:
        """Raises CacheFileError unless header and small tensors are as they were written."""
        first = header.tensors["crc32"].offset
        tail = self._pread(self.status.st_size - first, first)
        if hashlib.sha256(raw + tail[:-32]).digest() != tail[-32:]:
            raise damaged(self.path, "the checksum of its header is wrong")

    def read(self, key: PageKey, into: memoryview) -> None:
        """One page into memory of its size. Raises CacheFileError where it is not as it was written."""
        offset, number = self._places[key]
        done = 0
        while done < len(into):
            try:
                n = os.preadv(self._fd, [into[done:]], offset + done)
            except OSError as error:
                raise damaged(self.path, error.strerror or str(error)) from None
            if n == 0:
                raise damaged(self.path, "it was cut off while it was read")
            done += n
        if zlib.crc32(into) != int(self._sums[number]):
            raise damaged(self.path, f"the checksum of page {key[1]} (arena {key[0]}) is wrong")

    def copy(self, key: PageKey) -> memoryview:
        """One page in memory of its own. Raises CacheFileError."""
        memory = memoryview(bytearray(self.contents.page_bytes[key[0]]))
        self.read(key, memory)
        return memory

    def _pread(self, count: int, offset: int) -> bytes:
        try:
            data = os.pread(self._fd, count, offset)
        except OSError as error:
            raise damaged(self.path, error.strerror or str(error)) from None
        if len(data) != count:
            raise damaged(self.path, "it is cut off")
        return data


_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def open_regular(path: Path) -> int:
    """A descriptor of a file of this user. Raises CacheFileError for anything else, and never waits."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        refused = CacheFileError(f"cannot open {path}: {reason}", _REDO)
        refused.passing = isinstance(error, OSError) and error.errno in _PASSING
        raise refused from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise CacheFileError(f"{path} is not a regular file", "name a file")
    raise CacheFileError(f"{path} belongs to another user", "kv reads prompt caches of the user that runs it only")


def is_prompt_cache(path: Path) -> bool:
    """Whether a file begins as ours do: whole or damaged, it may be replaced. An empty file counts."""
    try:
        descriptor = open_regular(path)
    except CacheFileError:
        return False
    try:
        start = os.read(descriptor, _MARK_BYTES)
    finally:
        os.close(descriptor)
    return _marked(start) or not start


def _marked(start: bytes) -> bool:
    """Whether these are the first bytes of a file of ours."""
    return start[8:].startswith(b'{"__metadata__":{"format":"' + FORMAT.encode())


def foreign(path: Path, with_what: str) -> CacheFileError:
    """The error for a file that is another's: of another model, another cache type and so on."""
    error = CacheFileError(f"{path} cannot be used in this run: it was made with {with_what}", _REDO)
    error.foreign = True
    return error


def damaged(path: Path, what: str) -> CacheFileError:
    error = CacheFileError(f"{path} is damaged: {what}", _REDO)
    error.path = str(path)
    return error


def _strings(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ValueError("not a table of strings")
    return value


# --- writing


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
    return {"tokens": tokens, **{n: value.astype(_kind(n)[1]).tobytes() for n, value in contents.basis.items()}}


def _kind(name: str) -> tuple[str, str]:
    """Of a tensor that is no page: its type, and that of its numbers."""
    return ("F32", "<f4") if name.startswith("basis") else ("I32", "<i4")


def _header(contents: Contents) -> tuple[bytes, list[tuple[str, str, list[int]]]]:
    """The bytes before the first page, and (name, dtype, shape) of the tensors behind the last one."""
    arenas = dict.fromkeys(arena for arena, _ in contents.pages)
    numbers = {arena: [number for own, number in contents.pages if own == arena] for arena in arenas}
    metadata = {
        "format": FORMAT,
        "version": SELECTED if any(name.startswith("selected") for name in contents.basis) else VERSION,
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
    tail += [(name, _kind(name)[0], list(value.shape)) for name, value in contents.basis.items()]
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
