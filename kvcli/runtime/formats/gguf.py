"""GGUF files: a checked header and memory-mapped tensor data. No torch. A model may be several (splitgguf.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.runtime.formats import splitgguf
from kvcli.runtime.formats.ggufheader import Header, TensorInfo, parse_header
from kvcli.runtime.formats.ggufvalues import DAMAGED, quote
from kvcli.runtime.formats.localfile import LocalFile
from kvcli.runtime.formats.modelfile import ModelFile

if TYPE_CHECKING:
    import numpy as np


class GGUFFile(ModelFile):
    """An open, checked model in one GGUF file or several; `path` is the first."""

    def __init__(self, paths: Sequence[Path], header: Header, files: Sequence[LocalFile]) -> None:
        super().__init__(paths[0], paths, files)
        self.header = header

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GGUFFile:
        """Map the file (of a split model: every part) and check all of its header; a mere vocabulary is fine.

        Raises ModelError: missing, unreadable, not GGUF, damaged, truncated, a part of the model is not there.
        """
        paths = splitgguf.part_paths(Path(path))
        files = [LocalFile(each) for each in paths]
        headers = [parse_header(file.buffer, file.size, file.label) for file in files]
        return cls(paths, splitgguf.merge(headers, [file.label for file in files]), files)

    @property
    def metadata(self) -> dict[str, Any]:
        return self.header.metadata

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.header.tensors

    @property
    def alignment(self) -> int:
        return self.header.alignment

    def data(self, name: str) -> np.ndarray:
        """A view of the mapped file."""
        files, tensor = self.open_files(), self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {quote(name)}", DAMAGED)
        import numpy as np

        return np.frombuffer(files[tensor.part].buffer, np.uint8, tensor.nbytes, tensor.offset)
