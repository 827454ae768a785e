"""What was read of remote files, kept in `$XDG_CACHE_HOME/kv/headers`: an entry per URL, for one ETag."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcli import paths

MAX_FOLDER_BYTES = 256 << 20
_MAX_ENTRY_BYTES = 129 << 20
_MAX_LINE_BYTES = 1 << 15


@dataclass(frozen=True)
class Entry:
    """The first bytes (`body`) of a remote file of `total` bytes in all, as it was under `etag`."""

    etag: str
    total: int
    body: bytes


class HeaderCache:
    """A folder of entries, each whole or not there. If it cannot be used nothing fails: `warn` hears why."""

    def __init__(self, warn: Callable[[str], None], folder: Path | None = None) -> None:
        self._warn, self.folder = warn, folder or paths.cache_dir() / "headers"

    def _path(self, url: str) -> Path:
        return self.folder / hashlib.sha256(url.encode()).hexdigest()[:40]

    def get(self, url: str) -> Entry | None:
        """The entry of the URL; None if there is none that is whole."""
        try:
            with open(self._path(url), "rb") as file:
                if os.fstat(file.fileno()).st_size > _MAX_ENTRY_BYTES:
                    return None
                line, body = file.readline(_MAX_LINE_BYTES), file.read()
        except OSError:  # mostly: not there
            return None
        try:
            about = json.loads(line)
            entry = Entry(about["etag"], about["total"], body)
            whole = about["url"] == url and about["sha256"] == hashlib.sha256(body).hexdigest()
            typed = isinstance(entry.etag, str) and entry.etag.isascii() and type(entry.total) is int
        except (ValueError, LookupError, TypeError):
            return None
        return entry if whole and typed and entry.etag and entry.total >= len(body) else None

    def put(self, url: str, entry: Entry) -> None:
        """Keep an entry in place of the URL's last one."""
        if not paths.make_or_warn(self.folder, self._warn):
            return
        digest = hashlib.sha256(entry.body).hexdigest()
        about = {"url": url, "etag": entry.etag, "total": entry.total, "sha256": digest}
        line = json.dumps(about).encode() + b"\n"
        if len(line) > _MAX_LINE_BYTES or len(line) + len(entry.body) > _MAX_ENTRY_BYTES:
            return
        try:
            paths.replace_file(self._path(url), line + entry.body)
            self._prune()
        except OSError as error:
            self._warn(f"cannot keep a header in {self.folder}: {error.strerror or error}; going on without it")

    def _prune(self) -> None:
        """Remove the oldest entries until the rest is within MAX_FOLDER_BYTES."""
        files = []
        with os.scandir(self.folder) as listing:
            for item in listing:
                try:
                    status = item.stat(follow_symlinks=False)
                except FileNotFoundError:  # another process removed it meanwhile
                    continue
                files.append((status.st_mtime, status.st_size, item.path))
        excess = sum(size for _, size, _ in files) - MAX_FOLDER_BYTES
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            Path(path).unlink(missing_ok=True)
            excess -= size
