"""Headers of models in repositories of the hub: which files to look at, and how little of them."""

from __future__ import annotations

import re
from dataclasses import replace

from kvcli.errors import DownloadError
from kvcli.runtime.formats import safetensors
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object
from kvcli.runtime.formats.safetensors import INDEX, SINGLE
from kvcli.runtime.headers.modelheaders import (
    MAX_CONFIG_BYTES,
    Alternative,
    ModelHeader,
    document,
    gguf_model,
    safetensors_model,
)
from kvcli.runtime.hub import hubnames
from kvcli.runtime.hub.hubnames import SAFETENSORS, Reference, Variant
from kvcli.runtime.hub.repository import Listing, list_repository, stored_token
from kvcli.runtime.hub.websession import Session
from kvcli.runtime.text.foldernames import CONFIG

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors", re.ASCII)


def read_remote(reference: Reference, offline: bool) -> ModelHeader:
    """The header of a model on the hub. Raises ModelError (damaged, hostile) or DownloadError."""
    session = Session(hubnames.endpoint(), stored_token(), offline=offline)
    listing = list_repository(session, reference.repo, reference.revision)
    offered = _offered(listing)
    chosen = _choose(reference, offered, listing)
    read = _read_remote_safetensors if chosen.label == SAFETENSORS else _read_remote_gguf
    header = read(session, listing, chosen)
    others = [variant for variant in offered if variant is not chosen]
    return replace(
        header,
        source=f"{reference.repo}:{chosen.label}",
        bytes_read=session.bytes_read,
        alternatives=tuple(Alternative(other.label, listing.size(other.files)) for other in others),
        notices=tuple(session.notices),
    )


def _offered(listing: Listing) -> list[Variant]:
    """The GGUF models of a repository, and its safetensors as one more."""
    found = hubnames.variants(listing.files)
    weights = tuple(name for name in listing.files if _WEIGHTS.fullmatch(name))
    if weights or INDEX in listing.files:
        found.append(Variant(SAFETENSORS, weights))
    if not found:
        what = "has neither GGUF files nor model.safetensors"
        raise DownloadError(f"the repository {listing.repo} {what}", "its model is in a form kv does not read")
    return found


def _choose(reference: Reference, offered: list[Variant], listing: Listing) -> Variant:
    """As `kv run` chooses; where nothing is asked for and nothing is usual, the first: to plan costs little."""
    if not reference.wanted and len(hubnames.matching(offered, "")) != 1:
        return offered[0]
    return hubnames.choose(reference, offered, listing.files)


def _read_remote_gguf(session: Session, listing: Listing, chosen: Variant) -> ModelHeader:
    files = [listing.open(session, name) for name in chosen.files]
    return replace(gguf_model(files), etag=files[0].etag)


def _read_remote_safetensors(session: Session, listing: Listing, chosen: Variant) -> ModelHeader:
    label = listing.repo
    weight_map: dict[str, str] = {}
    if INDEX in listing.files:
        raw = document(listing.open(session, INDEX), MAX_DOCUMENT_BYTES)
        weight_map = safetensors.parse_index(raw, f"{label}/{INDEX}")
        names = list(dict.fromkeys(weight_map.values()))
        if missing := [name for name in names if name not in listing.files]:
            raise DownloadError(f"the repository {label} lacks {missing[0]}, which its index names")
    else:
        names = [SINGLE]
    config = {}
    if CONFIG in listing.files:
        raw = document(listing.open(session, CONFIG), MAX_CONFIG_BYTES)
        config = load_object(raw, f"{label}/{CONFIG}")
    opened = {name: listing.open(session, name) for name in names}
    header = safetensors_model(label, opened, weight_map, config)
    return replace(header, etag=opened[names[0]].etag)
