"""`PromptStore`: a folder of prompt-cache files that are found by the tokens of a prompt. No torch.

A file is a segment: rows of some pages of a prompt, under a name that says where it fits: the hash of all blocks of
tokens before it, and that of its first block. Hashes are SHA-256, chained from block to block, and begin with what the
rows depend on (sameness.py), which is the folder's name. Blocks are as long as the smallest page, so that files with
pages of any size fit together. So a longer prompt adds only its new pages, prompts share what they have in common,
and nothing is ever changed: files are added, touched when they are used, and removed when they are old or too many, or
when a chat has gone on from them (chatfiles.py). The end of a prompt is of no use without its beginning, so that one
goes last.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.errors import CacheFileError
from kvcli.runtime.cache.layout import PAGE_SIZES
from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.file import Checkpoint, Contents, PromptCacheFile, nothing, remove_parts, write
from kvcli.runtime.promptcache.found import Found, Kept
from kvcli.runtime.promptcache.prefixpages import common_length
from kvcli.runtime.promptcache.sameness import ALL, Identity, row_fields
from kvcli.words import human_bytes

SUFFIX, PIN = ".safetensors", ".pin"  # an empty file X.pin beside X pins it
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# What kv keeps of prompts; see kv cache. It may be deleted.\n"
NEAR_MISSES = 32  # files opened for part of a block, or to tell how far they agree
OWNER = "owner"  # in what a file tells of its making: the chat whose next files replace it
BLOCK = min(PAGE_SIZES)  # tokens that are hashed together: pages of any size begin where one does
STORE_VERSION = "2"  # of what hashes are made of
_HEX = 32  # digits of a hash in a file's name


@dataclass(frozen=True)
class Limits:
    """How much is kept, and for how long after its last use."""

    max_bytes: int
    ttl_s: float


class PromptStore:
    """The segments whose rows are alike: those of one folder ROOT/KEY. `identity`: how rows are made here; `page_size`:
    of the pages that are wanted. `warn` is told which damaged files were removed.

    `seed` and `block`: what the hashes begin with, and the tokens of a block, in the folder of an earlier version.
    """

    def __init__(
        self,
        root: Path,
        identity: Identity,
        page_size: int,
        limits: Limits,
        warn: Callable[[str], None],
        seed: str = "",
        block: int = BLOCK,
    ) -> None:
        self.root, self.identity, self.page_size, self.limits = root, dict(identity), page_size, limits
        self.warn, self.block = warn, block
        self.seed = seed or seed_of(identity)
        self.folder = root / self.seed[:_HEX]

    def chain(self, tokens: list[int]) -> list[str]:
        """Hashes at the start and behind every whole block of `tokens`."""
        whole = len(tokens) // self.block
        return _chained(self.seed, tokens[: whole * self.block], self.block)[: whole + 1]

    def find(self, tokens: list[int], up_to: int = ALL) -> Found:
        """What there is of the first `up_to` rows of a prompt. Damaged files are removed, and `warn` says so. The use
        of a file counts for what it goes on from, as in `prune`."""
        found = Found(self.page_size)
        listed = list(entries(self.folder))
        if not listed:
            return found
        hashes = self.chain(tokens)
        places = {h[:_HEX]: i for i, h in enumerate(hashes)}
        sure: list[Entry] = []
        near: list[Entry] = []
        fitting = [(places[entry.parent], entry) for entry in listed if entry.parent in places]
        uses = [0.0] * (len(hashes) + 1)  # by the block that a file begins with: the last one
        for at, entry in fitting:
            uses[at] = max(uses[at], float("inf") if entry.pinned else entry.used_at)
        from_here_on = list(accumulate(reversed(uses), max))[::-1]
        for at, entry in fitting:
            begins_alike = at + 1 < len(hashes) and entry.first == hashes[at + 1][:_HEX]
            if entry.pinned or time.time() - max(entry.used_at, from_here_on[at + 1]) <= self.limits.ttl_s:
                (sure if begins_alike else near).append(entry)
            elif begins_alike:
                found.expired = max(found.expired, _shared(entry, tokens))
        for entry in sure + sorted(near, key=lambda e: -e.used_at)[:NEAR_MISSES]:
            self._open(entry, tokens, hashes, found, up_to)
        return found

    def _open(self, entry: Entry, tokens: list[int], hashes: list[str], found: Found, up_to: int) -> None:
        try:
            file = found.stack.enter_context(PromptCacheFile(entry.path, self.identity))
        except CacheFileError as error:
            if not error.passing and os.path.lexists(entry.path):  # else another process has just removed it
                self.warn(discard(entry.path, error))
            return
        contents = file.contents
        block = contents.start // self.block
        if contents.start % self.block or block >= len(hashes) or contents.parent != hashes[block]:
            return
        agrees = contents.start + common_length(contents.tokens, tokens[contents.start : contents.end])
        found.add(file, min(agrees, up_to))
        if agrees > found.closest:
            found.closest = agrees
            found.closest_next = contents.tokens[agrees - contents.start] if agrees < contents.end else None

    def touch(self, files: Iterable[PromptCacheFile | Kept]) -> None:
        """These were of use now."""
        for path in {file.path for file in files}:
            with suppress(OSError):  # gone, or a folder that cannot be written
                os.utime(path)

    def add(
        self,
        contents: Contents,
        blocks: Iterable[Any],
        checkpoint: Checkpoint = nothing,
        replaced: Iterable[Path] = (),
    ) -> Path:
        """Write a segment, then remove those that it replaces (chatfiles.py).

        Raises OSError, and CacheFileError for one larger than the whole store may be, or with a folder in its place.
        """
        if contents.payload_bytes > self.limits.max_bytes:
            size, most = contents.payload_bytes, self.limits.max_bytes
            raise CacheFileError(
                f"it takes {human_bytes(size)}, more than the {human_bytes(most)} of the store (`max_bytes`)"
            )
        self.open_folder()
        path = self.path_of(contents)
        if path.is_dir():
            raise CacheFileError(f"{path} is a directory, which kv does not remove")
        try:
            os.utime(path)  # it is there, and of use now
        except OSError:
            write(path, contents, blocks, checkpoint)
        for old in replaced:
            if old != path:
                with suppress(OSError):  # it is of no use, and does no harm
                    if not is_pinned(old):
                        old.unlink()
                checkpoint("removed")
        prune(self.root, self.limits)
        return path

    def open_folder(self) -> None:
        """Make the folder of the store, for this user only. Raises OSError."""
        paths.make_private(self.folder)
        tag = self.root / "CACHEDIR.TAG"
        if not tag.exists():
            tag.write_text(TAG, "utf-8")

    def path_of(self, contents: Contents) -> Path:
        """Where a segment lies: PARENT-FIRST-CONTENT, the hashes of what comes before it, of its first block, and of
        all that it holds."""
        digests = _chained(contents.parent, contents.tokens, self.block)
        held = json.dumps([contents.identity.get("page_size"), contents.about.get(OWNER), contents.pages])
        last = hashlib.sha256((digests[-1] + held).encode()).hexdigest()
        return self.folder / ("-".join(h[:_HEX] for h in (contents.parent, digests[1], last)) + SUFFIX)


def seed_of(identity: Identity) -> str:
    """What hashes begin with: the hash of all that the rows depend on, with the policy where there is one."""
    fields = {"store": STORE_VERSION, **row_fields(identity)}
    if (policy := identity.get("eviction", "none")) != "none":
        fields["eviction"] = policy
    return _hash(fields)


def seed_of_version_1(identity: Identity) -> str:
    """The same in a store of version 1, where every field counted, and blocks were pages."""
    return _hash(dict(identity))


def _hash(fields: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _chained(parent: str, tokens: list[int], block_size: int) -> list[str]:
    """The hash `parent` of what comes before `tokens`, and those behind each of their blocks, of which the last one may
    be short, and the only one empty."""
    hashes = [parent]
    for at in range(0, max(1, len(tokens)), block_size):
        block = tokens[at : at + block_size]
        data = bytes.fromhex(hashes[-1]) + struct.pack(f"<{len(block)}i", *block)
        hashes.append(hashlib.sha256(data).hexdigest())
    return hashes


def chain_of(contents: Contents, first: str) -> list[tuple[int, str]]:
    """The tokens, and the hash of them, behind which other files may go on from this one, in whose name `first` is the
    hash of its first block. Raises ValueError for nonsense."""
    size, hashes = BLOCK, _chained(contents.parent, contents.tokens, BLOCK)
    if hashes[1][:_HEX] != first:  # of version 1, where blocks were pages
        size = max(1, int(contents.identity.get("page_size", "")))
        hashes = _chained(contents.parent, contents.tokens, size)
    return [(contents.start + size * number, each) for number, each in enumerate(hashes) if number]


def _shared(entry: Entry, tokens: list[int]) -> int:
    """How many tokens of a prompt a segment agrees with, those before it included; 0 for a damaged one."""
    try:
        with PromptCacheFile(entry.path) as file:
            start, held = file.contents.start, file.contents.tokens
    except CacheFileError:
        return 0
    return start + common_length(held, tokens[start:])


@dataclass(frozen=True)
class Entry:
    """One file of a store, judged by its name. `used_at`: time of its last use. `pinned`: it stays."""

    path: Path
    parent: str
    first: str
    size: int
    used_at: float
    pinned: bool = False


def entries(folder: Path) -> Iterator[Entry]:
    """The segments in one folder."""
    try:
        listing = list(os.scandir(folder))
    except OSError:  # mostly: not there
        return
    pins = {item.name for item in listing if item.name.endswith(PIN)}
    for item in listing:
        parts = item.name.removesuffix(SUFFIX).split("-")
        try:
            if len(parts) != 3 or not item.name.endswith(SUFFIX) or item.is_dir(follow_symlinks=False):
                continue
            status = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # removed meanwhile
            continue
        pinned = f"{item.name}{PIN}" in pins
        yield Entry(Path(item.path), parts[0], parts[1], status.st_size, status.st_mtime, pinned)


def folders(root: Path) -> list[Path]:
    """The folders of a store's models."""
    try:
        return sorted(Path(item.path) for item in os.scandir(root) if item.is_dir(follow_symlinks=False))
    except OSError:
        return []


def discard(path: Path, error: CacheFileError) -> str:
    """Remove a file of the store that is not what it should be; what to tell."""
    try:
        remove(path)
    except OSError as failure:
        return f"{error.message}; it could not be removed: {failure.strerror or failure}"
    return f"{error.message}; it was removed"


def pin(path: Path, wanted: bool) -> bool:
    """Pin a file of the store, or no longer; whether that changed anything. Raises OSError."""
    beside = path.with_name(f"{path.name}{PIN}")
    before = beside.exists()
    if wanted:
        beside.touch(0o600)
    else:
        beside.unlink(missing_ok=True)
    return before != wanted


def is_pinned(path: Path) -> bool:
    """Whether a file of the store stays whatever happens."""
    return path.with_name(f"{path.name}{PIN}").exists()


def _remove_pins(folder: Path) -> None:
    """Remove pins of files that are gone."""
    for left in folder.glob(f"*{PIN}"):
        if not left.with_name(left.name.removesuffix(PIN)).exists():
            with suppress(OSError):
                left.unlink()


def remove(path: Path) -> None:
    """Remove a file of the store, with its pin. Raises OSError."""
    path.unlink(missing_ok=True)
    pin(path, False)


def prune(root: Path, limits: Limits, dry_run: bool = False) -> list[Entry]:
    """Remove what was not used for `ttl_s`; then, until the rest is within `max_bytes`, what is worth least (see
    `worth.ranking`). Nothing that is pinned, and nothing that what stays goes on from.

    Also what killed processes left. Returns the segments removed (or, `dry_run`, that would be). Raises OSError.
    """
    now = time.time()
    kept: list[Entry] = []
    for folder in folders(root):
        kept += entries(folder)
        if not dry_run:
            remove_parts(folder, now)
            _remove_pins(folder)
    unused = takewhile(lambda entry: now - entry.used_at > limits.ttl_s, _ends_first(kept, lambda entry: entry.used_at))
    gone = {entry.path: entry for entry in unused}
    kept = [entry for entry in kept if entry.path not in gone]
    excess = sum(entry.size for entry in kept) - limits.max_bytes
    if excess > 0:
        value = worth.ranking(worth.read(root), ((entry.path, entry.size) for entry in kept), now)
        for entry in _ends_first(kept, lambda entry: value(entry.path, entry.size, entry.used_at)):
            gone[entry.path] = entry
            excess -= entry.size
            if excess <= 0:
                break
    if not dry_run:
        for path in gone:
            remove(path)
    return list(gone.values())


def _ends_first(kept: Iterable[Entry], value: Callable[[Entry], float]) -> Iterator[Entry]:
    """Segments in the order in which they may go: the one of the least value first, but none before all that go on from
    it, and none that is pinned."""
    left: dict[Path, dict[str, set[Entry]]] = defaultdict(lambda: defaultdict(set))  # by folder and parent
    for entry in kept:
        left[entry.path.parent][entry.parent].add(entry)
    waiting: dict[Entry, list[Entry]] = defaultdict(list)  # those that may not go before one that goes on from them
    heap = [(value(entry), entry.path, entry) for entry in kept if not entry.pinned]
    heapify(heap)
    while heap:
        *_, entry = heappop(heap)
        behind = _behind(entry, left[entry.path.parent])
        if behind is not None:
            waiting[behind].append(entry)
            continue
        yield entry
        siblings = left[entry.path.parent]
        siblings[entry.parent].remove(entry)
        if not siblings[entry.parent]:
            del siblings[entry.parent]
        for other in waiting.pop(entry, ()):
            heappush(heap, (value(other), other.path, other))


def _behind(entry: Entry, others: Mapping[str, set[Entry]]) -> Entry | None:
    """One of the segments of a folder, by their parents, that goes on from this one; None = there is none."""
    if entry.first in others:
        return next(iter(others[entry.first]))
    if not any(parent not in (entry.parent, entry.path.parent.name) for parent in others):
        return None  # all begin with the prompt, or where this one does
    try:
        with PromptCacheFile(entry.path) as file:
            contents = file.contents
        hashes = chain_of(contents, entry.first)
    except (CacheFileError, ValueError):  # damaged: nothing can go on from it
        return None
    return next((other for _, h in hashes for other in others.get(h[:_HEX], ())), None)
