"""What a repository of the hub holds: its files at one revision, and the address of each."""

from __future__ import annotations

import os
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import DownloadError
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.hub.hubnames import MAIN, home
from kvcli.runtime.hub.ranges import MAX_FILE_BYTES, RemoteFile, read_document
from kvcli.runtime.hub.websession import Session

_MAX_TOKEN_BYTES = 1 << 12


@dataclass(frozen=True)
class HubFile:
    """One file of the list. `version` names its content, "" where the list does not say."""

    name: str
    size: int | None
    version: str

    @property
    def sha256(self) -> str:
        """The checksum of its content; "" where the list names that otherwise (git does, for small files)."""
        return self.version if len(self.version) == 64 else ""


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one revision: a commit where the hub names it."""

    repo: str
    revision: str
    files: dict[str, HubFile]

    def size(self, names: Iterable[str]) -> int | None:
        """Bytes of these files together; None where the list does not say."""
        sizes = [self.files[name].size for name in names]
        known = [size for size in sizes if size is not None]
        return sum(known) if len(known) == len(sizes) else None

    def address(self, name: str) -> str:
        """Where the named file is, after the hub's own address; the name need not be in the list."""
        return file_address(self.repo, self.revision, name)

    def open(self, session: Session, name: str) -> RemoteFile:
        """The named file, which need not be in the list, to read its first bytes."""
        file = self.files.get(name, HubFile(name, None, ""))
        url = f"{session.endpoint}/{self.address(name)}"
        return RemoteFile(session, url, f"{self.repo}/{name}", file.size, file.version)


def file_address(repo: str, revision: str, name: str) -> str:
    """Where a file of a repository is, after the hub's own address."""
    return "/".join(urllib.parse.quote(part, safe="/") for part in (repo, "resolve", revision, name))


def stored_token() -> str | None:
    """HF_TOKEN, else the token that `hf auth login` left: the rules of huggingface_hub without its import."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        return token.strip() or None
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    path = Path(os.environ.get("HF_TOKEN_PATH") or home() / "token").expanduser()
    try:
        if not path.is_file() or path.stat().st_size > _MAX_TOKEN_BYTES:
            return None
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise DownloadError(f"the hub's token in {path} cannot be read: {error}", "or set HF_TOKEN") from None


def list_repository(session: Session, repo: str, revision: str) -> Listing:
    """Ask the hub which files a repository has at a revision. Raises DownloadError."""
    label = repo if revision == MAIN else f"{repo} at {revision}"
    at = "" if revision == MAIN else f"/revision/{urllib.parse.quote(revision, safe='')}"
    raw = read_document(session, f"{session.endpoint}/api/models/{repo}{at}?blobs=true", label)
    answer = load_object(raw, label, DownloadError)
    siblings, commit = answer.get("siblings"), answer.get("sha")
    if not isinstance(siblings, list) or not all(isinstance(item, dict) for item in siblings):
        raise DownloadError(f"{label} lists no files", "HF_ENDPOINT may name something that is not a hub")
    files = [file for item in siblings if (file := _hub_file(item))]
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit)
    return Listing(repo, str(commit) if known else revision, {file.name: file for file in files})


def _hub_file(item: dict[str, Any]) -> HubFile | None:
    """An entry of the list; None for a name that no file of a model has."""
    name, size, lfs = item.get("rfilename"), item.get("size"), item.get("lfs")
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1024 or ".." in name.split("/"):
        return None
    version = lfs.get("sha256") if isinstance(lfs, dict) else item.get("blobId")
    usable = type(size) is int and 0 < size <= MAX_FILE_BYTES
    named = isinstance(version, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", version)
    return HubFile(name, size if usable else None, str(version) if named else "")
