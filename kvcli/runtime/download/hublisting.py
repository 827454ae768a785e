"""What a repository of the hub offers to a reader of headers: its files, and the models they form."""

from __future__ import annotations

import os
import re
import urllib.parse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import DownloadError
from kvcli.runtime.download import hubrepo
from kvcli.runtime.download.ranges import MAX_FILE_BYTES, RemoteFile, read_document
from kvcli.runtime.download.websession import Session
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.formats.safetensors import MAX_SHARDS
from kvcli.runtime.formats.splitgguf import part_of
from kvcli.runtime.planning.headers import GGUF, INDEX, SAFETENSORS

DEFAULT_ENDPOINT = "https://huggingface.co"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors", re.ASCII)
_MAX_TOKEN_BYTES = 1 << 12


@dataclass(frozen=True)
class HubFile:
    """One file of the list. `version` names its content, "" where the list does not say."""

    name: str
    size: int | None
    version: str


@dataclass(frozen=True)
class Choice:
    """One model of a repository, in one file or in several. `label` is its quantization or file name."""

    label: str
    container: str
    files: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one revision: a commit where the hub names it."""

    repo: str
    revision: str
    files: dict[str, HubFile]

    def open(self, session: Session, name: str) -> RemoteFile:
        """The named file, which need not be in the list."""
        file = self.files.get(name, HubFile(name, None, ""))
        quoted = "/".join(urllib.parse.quote(part) for part in (self.repo, "resolve", self.revision, name))
        label = f"{self.repo}/{name}"
        return RemoteFile(session, f"{session.endpoint}/{quoted}", label, file.size, file.version)


def endpoint() -> str:
    """HF_ENDPOINT, else the public hub."""
    return os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT


def stored_token() -> str | None:
    """HF_TOKEN, else the token that `hf auth login` left: the rules of huggingface_hub without its import."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        return token.strip() or None
    if os.environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in ("1", "ON", "YES", "TRUE"):
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    path = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()
    try:
        if not path.is_file() or path.stat().st_size > _MAX_TOKEN_BYTES:
            return None
        return path.read_text().strip() or None
    except (OSError, UnicodeDecodeError) as error:
        raise DownloadError(f"the hub's token in {path} cannot be read: {error}", "or set HF_TOKEN") from None


def list_repository(session: Session, repo: str) -> Listing:
    """Ask the hub which files a repository has on its main branch. Raises DownloadError."""
    label = f"the file list of {repo}"
    raw = read_document(session, f"{session.endpoint}/api/models/{repo}?blobs=true", label)
    answer = load_object(raw, label, DownloadError)
    siblings, commit = answer.get("siblings"), answer.get("sha")
    if not isinstance(siblings, list) or not all(isinstance(item, dict) for item in siblings):
        raise DownloadError(f"{label} lists no files", "HF_ENDPOINT may name something that is not a hub")
    files = [file for item in siblings if (file := _hub_file(item))]
    known = isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{40}", commit)
    return Listing(repo, str(commit) if known else "main", {file.name: file for file in files})


def _hub_file(item: dict[str, Any]) -> HubFile | None:
    """An entry of the list; None for a name that no file of a model has."""
    name, size, lfs = item.get("rfilename"), item.get("size"), item.get("lfs")
    if not isinstance(name, str) or not name.isprintable() or len(name) > 1024 or ".." in name.split("/"):
        return None
    version = (lfs.get("sha256") if isinstance(lfs, dict) else None) or item.get("blobId")
    usable = type(size) is int and 0 < size <= MAX_FILE_BYTES
    named = isinstance(version, str) and re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", version)
    return HubFile(name, size if usable else None, str(version) if named else "")


def choices(listing: Listing) -> list[Choice]:
    """The models of a repository: each GGUF file or complete set of parts as listed, then safetensors."""
    groups: dict[tuple[str, int], dict[int, HubFile]] = {}
    for name, file in listing.files.items():
        stem, number, total = part_of(name) or (name, 1, 1)
        if total <= MAX_SHARDS and hubrepo.choose_file([stem], stem):  # a model, not a projector or the like
            groups.setdefault((stem, total), {})[number] = file
    found = []
    for (stem, total), parts in groups.items():
        if sorted(parts) == list(range(1, total + 1)):
            files = tuple(parts[number] for number in sorted(parts))
            found.append(Choice(hubrepo.quant_of(stem) or stem, GGUF, files))
    labels = [choice.label for choice in found]
    found = [c if labels.count(c.label) == 1 else Choice(c.files[0].name, GGUF, c.files) for c in found]
    weights = tuple(file for name, file in listing.files.items() if _WEIGHTS.fullmatch(name))
    if weights or INDEX in listing.files:
        found.append(Choice(SAFETENSORS, SAFETENSORS, weights))
    return found


def choose(listing: Listing, quant: str) -> tuple[Choice, list[Choice]]:
    """The model that is meant and the others: by quantization or file name, else Q4_K_M, else the first.

    Raises DownloadError naming what there is.
    """
    offered = choices(listing)
    if not offered:
        what = "has neither GGUF files nor model.safetensors"
        raise DownloadError(f"the repository {listing.repo} {what}", "its model is in a form kv does not read")
    wanted = quant or hubrepo.DEFAULT_QUANT
    match = next((choice for choice in offered if _is_named(choice, wanted)), None)
    if match is None and quant:
        there = ", ".join(choice.label for choice in offered[:40])
        hint = f"choose one as {listing.repo}:QUANT; there are {there}"
        raise DownloadError(f"the repository {listing.repo} has no file for '{quant}'", hint)
    chosen = match or offered[0]
    return chosen, [choice for choice in offered if choice is not chosen]


def _is_named(choice: Choice, wanted: str) -> bool:
    names = {choice.label.lower()}
    for file in choice.files[:1]:
        base = file.name.rsplit("/", 1)[-1]
        part = part_of(base)
        names |= {
            file.name.lower(),
            base.lower(),
            hubrepo.quant_of(part[0] if part else base).lower(),
        }
    return wanted.lower() in names
