"""Models of safetensors in the hub's cache: their files in a snapshot, and what is said of them."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats import safetensors
from kvcli.runtime.formats.boundedjson import load_object
from kvcli.runtime.formats.safetensors import INDEX
from kvcli.runtime.text.foldernames import CONFIG, FILES

SUFFIXES = (".safetensors", ".json", ".model", ".jinja")  # of files of a folder


def of_folder(folder: Path) -> tuple[Path, ...]:
    """The files of the model of safetensors in a snapshot; () where it is not whole."""
    if not safetensors.is_model_folder(folder) or not (folder / CONFIG).exists():
        return ()
    try:
        weights = list(safetensors.weight_files(folder)[0])
    except ModelError:
        return ()
    there = [folder / name for name in (*FILES, INDEX) if (folder / name).is_file()]
    return (*there, *(folder / name for name in weights))


def facts(folder: Path) -> dict[str, Any]:
    """What is said of such a folder: arch, parameters, context_length; of a damaged one `runs` and the problem."""
    try:
        config = load_object((folder / CONFIG).read_bytes(), CONFIG)
        opened = safetensors.weight_files(folder)[0].values()
        headers = [safetensors.parse_header(file.buffer, file.size, file.label) for file in opened]
    except (ModelError, OSError) as error:
        return {"runs": "no", "problem": getattr(error, "message", str(error))}
    length, arch = config.get("max_position_embeddings"), config.get("model_type")
    return {
        "arch": arch if isinstance(arch, str) else "",
        "parameters": sum(prod(tensor.shape) for header in headers for tensor in header.tensors.values()),
        "context_length": length if type(length) is int else 0,
    }
