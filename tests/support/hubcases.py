"""A repository of an imitated hub, and what downloads of it leave."""

from __future__ import annotations

import hashlib
from pathlib import Path

from toyworld import CONTENT, REPO

from kvcli.runtime.hub import hubcache

NAME = "toy-Q4_K_M.gguf"
FILES = {
    NAME: CONTENT,
    "toy-Q8_0.gguf": CONTENT[::-1],
    "mmproj-toy-f16.gguf": b"vision",
    "big-Q2_K-00001-of-00002.gguf": CONTENT[:90_000],
    "big-Q2_K-00002-of-00002.gguf": CONTENT[90_000:],
    "README.md": b"text",
}
TOTAL = len(CONTENT)


def place() -> Path:
    return hubcache.repo_folder(REPO)


def rests() -> list[str]:
    """Names of the pieces in the hub's cache, checksums cut short."""
    return sorted(path.name[:4] + path.name[path.name.index(".") :] for path in place().glob("blobs/*.incomplete"))


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def left_of(content: bytes, n_bytes: int, name: str = NAME) -> Path:
    """What a download that was interrupted after `n_bytes` leaves."""
    piece = hubcache.piece_path(place(), checksum(content), name)
    piece.parent.mkdir(parents=True, exist_ok=True)
    piece.write_bytes(content[:n_bytes])
    return piece
