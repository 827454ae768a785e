"""`open_model`: a model's files, whatever form they have."""

from __future__ import annotations

from pathlib import Path

from kvcli.errors import UsageError
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.modelfile import ModelFile


def open_model(path: Path, quantize: str = "") -> ModelFile:
    """The model in a .gguf file or in a folder of safetensors (which a file in it names, too), its header checked.

    `quantize`: see `SafetensorsModel`. Raises ModelError, and UsageError for a GGUF file that is to be quantized.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        from kvcli.runtime.headers.safetensorsmodel import SafetensorsModel

        return SafetensorsModel(path if path.is_dir() else path.parent, quantize)
    if quantize:
        raise UsageError(f"`quantize` packs the weights of a folder, and {path.name} is a file", "leave it out")
    return GGUFFile.open(path)
