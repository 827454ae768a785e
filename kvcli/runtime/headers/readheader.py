"""The header of a model by name: a file or folder here, or a repository of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvcli.runtime.formats import safetensors, splitgguf
from kvcli.runtime.formats.localfile import LocalFile
from kvcli.runtime.headers.modelheaders import ModelHeader, Prefix, gguf_model, safetensors_model
from kvcli.runtime.headers.safetensorsmodel import read_object
from kvcli.runtime.hub import hubcache, modelfiles
from kvcli.runtime.hub.modelref import ModelRef
from kvcli.runtime.text.foldernames import CONFIG


def read_header(ref: ModelRef, *, offline: bool = False) -> ModelHeader:
    """The header of a .gguf file, a safetensors file or folder, or a repository of the hub; not of a recipe.

    `offline` allows the hub's cache and headers that were kept. Raises ModelError (missing, damaged, hostile) or
    DownloadError (network, no such name).
    """
    reference = ref.reference
    if reference is None:
        return _read_local(ref.name)
    if offline and (cached := hubcache.find(reference, loose=True)):
        return _read_local(str(cached.path))
    from kvcli.runtime.headers.remote import read_remote  # TLS and HTTP: nothing that a local file needs

    return read_remote(reference, offline)


def _read_local(name: str) -> ModelHeader:
    path = Path(name).expanduser()
    if path.is_dir():
        return _local_safetensors(path, *safetensors.weight_files(path))
    if path.suffix == ".safetensors":
        return _local_safetensors(path.parent, {path.name: LocalFile(path)}, {})
    modelfiles.check_path(name)
    return gguf_model([LocalFile(each) for each in splitgguf.part_paths(path)])


def _local_safetensors(folder: Path, opened: Mapping[str, Prefix], weight_map: dict[str, str]) -> ModelHeader:
    config = read_object(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return safetensors_model(str(folder), opened, weight_map, config)
