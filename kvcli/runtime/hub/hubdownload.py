"""Models of the hub into the hub's cache: which files, what of them is here, and the rest of each."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import DownloadError
from kvcli.runtime.formats import safetensors
from kvcli.runtime.formats.safetensors import INDEX, SINGLE
from kvcli.runtime.hub import fetching, hubcache, hubnames
from kvcli.runtime.hub.fetching import Wanted
from kvcli.runtime.hub.hubnames import SAFETENSORS, Reference, Variant
from kvcli.runtime.hub.ranges import RemoteFile, read_document
from kvcli.runtime.hub.repository import HubFile, Listing, list_repository, stored_token
from kvcli.runtime.hub.store import Progress, check_disk, install
from kvcli.runtime.hub.websession import Session
from kvcli.runtime.text.foldernames import CONFIG, FILES, SENTENCEPIECE, TOKENIZER
from kvcli.words import human_bytes

Notice = Callable[[str], None]
Approve = Callable[[Sequence[RemoteFile]], None]


@dataclass(frozen=True)
class _File:
    """One file of the model. `version` names its content in the cache."""

    name: str
    version: str
    wanted: Wanted
    piece: Path
    blob: Path


def download(
    reference: Reference, force: bool, progress: Progress, notice: Notice, approve: Approve | None = None
) -> Path:
    """Bring the model that is meant into the hub's cache; the path of its (first) file, of safetensors of their folder.

    What is here of it stays and counts, except with `force`. `approve` sees the first bytes of its files before they
    are downloaded, and raises ModelError for a model that is of no use. Raises DownloadError, ModelError.
    """
    token, home = stored_token(), hubnames.endpoint()
    briefly = Session(home, token)
    listing = list_repository(briefly, reference.repo, reference.revision)
    variant = _choose(reference, listing)
    session = Session(home, token, fetching.LIMITS)
    place = hubcache.repo_folder(listing.repo)
    if variant.label == SAFETENSORS:
        variant = _folder_of(listing, briefly)
    files = [_file(session, listing, place, name) for name in variant.files]
    if approve is not None and any(not file.blob.exists() for file in files):
        approve([listing.open(briefly, name) for name in variant.files])
    try:
        hubcache.sweep(place, (file.version for file in listing.files.values()))
        _bring(session, place, variant, [f for f in files if force or not f.blob.exists()], force, progress, notice)
        links = [hubcache.publish(place, file.version, listing.revision, file.name) for file in files]
        hubcache.remember(place, reference.revision, listing.revision)
    except OSError as error:
        where = error.filename or place
        hint = "HF_HUB_CACHE sets where files of the hub are kept"
        raise DownloadError(f"cannot write to the hub's cache ({where}): {error.strerror or error}", hint) from error
    return links[0].parent if variant.label == SAFETENSORS else links[0]


def _choose(reference: Reference, listing: Listing) -> Variant:
    offered = hubnames.with_folder(reference, hubnames.variants(listing.files), listing.files)
    if not offered and not hubnames.in_pieces(listing.files, reference.wanted):
        what = f"the repository {listing.repo} has neither a GGUF file nor model.safetensors"
        raise DownloadError(what, "kv runs models in .gguf and .safetensors files")
    return hubnames.choose(reference, offered, listing.files)


def _folder_of(listing: Listing, session: Session) -> Variant:
    """The safetensors of a repository with all that belongs to them. Raises DownloadError, ModelError for its index."""
    names, there = [SINGLE], [name for name in FILES if name in listing.files]
    if INDEX in listing.files:
        label = f"{listing.repo}/{INDEX}"
        raw = read_document(session, f"{session.endpoint}/{listing.address(INDEX)}", label)
        names = sorted(set(safetensors.parse_index(raw, label).values()))
        there.append(INDEX)
    if missing := [name for name in (*names, CONFIG) if name not in listing.files]:
        raise DownloadError(f"the repository {listing.repo} lacks {missing[0]}", "its model is incomplete")
    if not {TOKENIZER, SENTENCEPIECE}.intersection(there):
        what = f"the repository {listing.repo} has neither {TOKENIZER} nor {SENTENCEPIECE}"
        raise DownloadError(what, "kv reads no other tokenizer")
    return Variant(SAFETENSORS, (*there, *names))


def _file(session: Session, listing: Listing, place: Path, name: str) -> _File:
    """What is to be known of a file, asked of the server where the list does not say it."""
    listed = listing.files[name]
    size, version = listed.size, listed.version
    if size is None or not version:
        remote = listing.open(session, name)
        remote.prefix(1)
        size, version = remote.size, version or _named(listing, listed, remote.etag)
        remote.keep(0)
    wanted = Wanted(f"{session.endpoint}/{listing.address(name)}", f"{listing.repo}/{name}", size, listed.sha256)
    return _File(name, version, wanted, hubcache.piece_path(place, version, name), place / "blobs" / version)


def _named(listing: Listing, file: HubFile, etag: str) -> str:
    """A name for content of which no checksum is known; not as long as one, so that nobody takes it for that."""
    known = "/".join((listing.repo, listing.revision, file.name, etag))
    return hashlib.sha256(known.encode()).hexdigest()[:32]


def _bring(
    session: Session,
    place: Path,
    variant: Variant,
    missing: list[_File],
    force: bool,
    progress: Progress,
    notice: Notice,
) -> None:
    """Download the files that are missing, one after the other; the progress is that of all."""
    if not missing:
        return
    whole = sum(file.wanted.size for file in missing)
    have = 0 if force else sum(fetching.held(file.piece) for file in missing)
    notice(_announcement(variant, missing, have))
    check_disk(place, whole - have, "HF_HUB_CACHE")
    before = 0
    for file in missing:
        with hubcache.writing(place, file.version, functools.partial(notice, _waiting(file))):
            if force:
                file.piece.unlink(missing_ok=True)
            if force or not file.blob.exists():  # another process may have brought it meanwhile
                file.blob.parent.mkdir(parents=True, exist_ok=True)
                fetching.fetch(session, file.wanted, file.piece, _part_of(progress, before, whole), notice)
                install(file.piece, file.blob)
        before += file.wanted.size


def _part_of(progress: Progress, before: int, whole: int) -> Progress:
    """The progress of one file as that of all."""

    def report(stage: str, done: int, total: int) -> None:
        if stage == "download":
            done, total = before + done, whole
        progress(stage, done, total)

    return report


def _waiting(file: _File) -> str:
    return f"another program is downloading {file.name}; waiting for it"


def _announcement(variant: Variant, missing: list[_File], have: int) -> str:
    count, label = len(variant.files), missing[0].wanted.label
    what = label if count == 1 else f"{variant.label}, {len(missing)} of {count} files"
    held = f", {human_bytes(have)} of it here already" if have else ""
    return f"downloading {what} ({human_bytes(sum(file.wanted.size for file in missing))}{held}) from the hub"
