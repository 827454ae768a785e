"""The header of a model by name: a file or folder here, or a repository of the hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvcli.errors import ModelError
from kvcli.runtime.formats import safetensors, splitgguf
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object
from kvcli.runtime.formats.localfile import LocalFile
from kvcli.runtime.headers.modelheaders import (
    CONFIG,
    INDEX,
    MAX_CONFIG_BYTES,
    SINGLE,
    ModelHeader,
    Prefix,
    document,
    gguf_model,
    safetensors_model,
)
from kvcli.runtime.hub import hubcache, modelfiles
from kvcli.runtime.hub.modelref import ModelRef


def read_header(ref: ModelRef, *, offline: bool = False) -> ModelHeader:
    """The header of a .gguf file, a safetensors file or folder, or a repository of the hub; not of a recipe.

    `offline` allows the hub's cache and headers that were kept. Raises ModelError (missing, damaged, hostile) or
    DownloadError (network, no such name).
    """
    reference = ref.reference
    if reference is None:
        return _read_local(ref.name)
    if offline and (cached := hubcache.find(reference, loose=True)):
        return _read_local(str(cached.paths[0]))
    from kvcli.runtime.headers.remote import read_remote  # TLS and HTTP: nothing that a local file needs

    return read_remote(reference, offline)


def _read_local(name: str) -> ModelHeader:
    path = Path(name).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".safetensors":
        return _local_safetensors(path.parent, {path.name: LocalFile(path)}, {})
    modelfiles.check_path(name)
    return gguf_model([LocalFile(each) for each in splitgguf.part_paths(path)])


def _read_folder(folder: Path) -> ModelHeader:
    if (folder / INDEX).exists():
        label = str(folder / INDEX)
        raw = document(LocalFile(folder / INDEX), MAX_DOCUMENT_BYTES)
        weight_map = safetensors.parse_index(raw, label)
        opened = {file: LocalFile(folder / file) for file in dict.fromkeys(weight_map.values())}
        return _local_safetensors(folder, opened, weight_map)
    if (folder / SINGLE).exists():
        return _local_safetensors(folder, {SINGLE: LocalFile(folder / SINGLE)}, {})
    found = sorted(folder.glob("*.gguf"))
    hint = f"it holds {found[0]}" if found else "give a .gguf file, or a folder with model.safetensors"
    raise ModelError(f"{folder} is a folder without {SINGLE} and {INDEX}", hint)


def _local_safetensors(folder: Path, opened: Mapping[str, Prefix], weight_map: dict[str, str]) -> ModelHeader:
    path, config = folder / CONFIG, {}
    if path.exists():
        config = load_object(document(LocalFile(path), MAX_CONFIG_BYTES), str(path))
    return safetensors_model(str(folder), opened, weight_map, config)
