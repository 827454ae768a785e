"""Headers of models in repositories of the hub: which files to look at, and how little of them."""

from __future__ import annotations

from dataclasses import replace

from kvcli.errors import DownloadError
from kvcli.runtime.download import hubrepo
from kvcli.runtime.download.hublisting import Choice, Listing, choose, endpoint, list_repository, stored_token
from kvcli.runtime.download.websession import Limits, Session
from kvcli.runtime.formats import safetensors
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object
from kvcli.runtime.planning.headers import (
    CONFIG,
    GGUF,
    INDEX,
    MAX_CONFIG_BYTES,
    SINGLE,
    Alternative,
    ModelHeader,
    document,
    gguf_model,
    safetensors_model,
)


def read_remote(reference: hubrepo.Reference, offline: bool = False, limits: Limits | None = None) -> ModelHeader:
    """The header of a model on the hub. Raises ModelError (damaged, hostile) or DownloadError."""
    session = Session(endpoint(), stored_token(), limits, offline)
    listing = list_repository(session, reference.repo)
    chosen, others = choose(listing, reference.quant)
    read = _read_remote_gguf if chosen.container == GGUF else _read_remote_safetensors
    header = read(session, listing, chosen)
    return replace(
        header,
        source=f"{reference.repo}:{chosen.label}",
        bytes_read=session.bytes_read,
        alternatives=tuple(Alternative(other.label, other.nbytes) for other in others),
        notices=tuple(session.notices),
    )


def _read_remote_gguf(session: Session, listing: Listing, chosen: Choice) -> ModelHeader:
    files = [listing.open(session, file.name) for file in chosen.files]
    return replace(gguf_model(files), etag=files[0].etag)


def _read_remote_safetensors(session: Session, listing: Listing, chosen: Choice) -> ModelHeader:
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
