"""Files of the prompt-cache store for people: found by id or path, and told as rows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import CacheFileError, UsageError
from kvcli.render import human_bytes
from kvcli.runtime.promptcaches.promptcache import PromptCacheFile
from kvcli.runtime.promptcaches.promptstore import SUFFIX, entries, folders
from kvcli.runtime.promptcaches.settings import pair, types_of

ID_LENGTH = 10


def id_of(path: Path) -> str:
    """How a file of the store is called: the first digits of the hash of its contents."""
    return path.name.removesuffix(SUFFIX).split("-")[-1][:ID_LENGTH]


def stored(root: Path) -> list[Path]:
    """Every file of the store, the one used last first."""
    found = [entry for folder in folders(root) for entry in entries(folder)]
    return [entry.path for entry in sorted(found, key=lambda e: (-e.used_at, e.path))]


def locate(name: str, root: Path) -> Path:
    """The file that a user means by a path or the beginning of an id. Raises UsageError."""
    if "/" in name or Path(name).exists():
        return Path(name)
    if len(name) < 4:
        raise UsageError(f"'{name}' is too short for an id", "give at least 4 digits of one in kv cache ls, or a path")
    found = [path for path in stored(root) if id_of(path).startswith(name.lower())]
    if len(found) != 1:
        many = f"{len(found)} stored prompts have ids that begin with '{name}'"
        raise UsageError(many if found else f"there is no file and no stored prompt '{name}'", "kv cache ls lists ids")
    return found[0]


@dataclass(frozen=True)
class Described:
    """What a file says of itself. Times are seconds since the epoch; `problem`: why it says nothing."""

    path: Path
    size: int
    used_at: float
    model: str = ""
    start: int = 0
    tokens: int = 0
    types: str = ""
    about: dict[str, str] | None = None
    identity: dict[str, str] | None = None
    problem: str = ""

    def row(self, ttl_s: float) -> list[str]:
        """Cells of `kv cache ls`."""
        left = max(0.0, self.used_at + ttl_s - time.time())
        span = f"{self.start:,}-{self.start + self.tokens:,}" if self.start else f"{self.tokens:,}"
        lossless = (self.about or {}).get("lossless", "").partition(":")[0]
        cells = ["damaged", "-", "-", "-"] if self.problem else [self.model, span, self.types, lossless]
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.used_at))
        return [id_of(self.path), *cells, human_bytes(self.size), used, f"{left / 86400:.1f} d"]

    def as_json(self, ttl_s: float) -> dict[str, Any]:
        return {
            "id": id_of(self.path),
            "path": str(self.path),
            "bytes": self.size,
            "model": self.model or None,
            "first_token": self.start,
            "tokens": self.tokens,
            "types": self.types or None,
            "about": self.about,
            "identity": self.identity,
            "used_at": self.used_at,
            "expires_at": self.used_at + ttl_s,
            "problem": self.problem or None,
        }


HEADERS = ["id", "model", "tokens", "type", "lossless", "size", "last use", "expires in"]


def describe(path: Path) -> Described:
    """What `kv cache ls` tells of a file, whole or not. Raises UsageError if it is not there."""
    try:
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"cannot look at {path}: {error.strerror or error}") from None
    try:
        with PromptCacheFile(path) as file:
            c = file.contents
    except CacheFileError as error:
        return Described(path, status.st_size, status.st_mtime, problem=error.message)
    model, types = c.about.get("model", ""), pair(types_of(c.identity))
    return Described(path, status.st_size, status.st_mtime, model, c.start, len(c.tokens), types, c.about, c.identity)


def check_pages(path: Path) -> int:
    """Read every page of a file against its checksum; how many there are. Raises CacheFileError."""
    with PromptCacheFile(path) as file:
        for key in file.contents.pages:
            file.copy(key)
        return len(file.contents.pages)
