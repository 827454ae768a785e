"""GGUF files: a checked header and memory-mapped tensor data. No torch. A model may be several (splitgguf.py)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.runtime.formats import splitgguf
from kvcli.runtime.formats.ggufheader import Header, TensorInfo, parse_header
from kvcli.runtime.formats.ggufvalues import DAMAGED, quote
from kvcli.runtime.formats.localfile import LocalFile

if TYPE_CHECKING:
    import numpy as np


class GGUFFile:
    """An open, checked model in one GGUF file or several, whose tensor data stays on disk until it is touched.

    `paths` are its files, `path` the first; `size` is the bytes of all.
    """

    def __init__(self, paths: Sequence[Path], header: Header, files: Sequence[LocalFile]) -> None:
        self.paths, self.path, self.header = tuple(paths), paths[0], header
        self.size = sum(file.size for file in files)
        self._files: Sequence[LocalFile] | None = files

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
        """Keys to Python scalars and sequences (list; for long arrays NumberArray, StringArray)."""
        return self.header.metadata

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.header.tensors

    @property
    def alignment(self) -> int:
        return self.header.alignment

    def data(self, name: str) -> np.ndarray:
        """The packed bytes of a tensor: uint8 [nbytes], a read-only view. ModelError if there is none."""
        if self._files is None:
            raise ValueError(f"{self.path} is closed")
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.path} has no tensor {quote(name)}", DAMAGED)
        import numpy as np

        return np.frombuffer(self._files[tensor.part].buffer, np.uint8, tensor.nbytes, tensor.offset)

    def check(self) -> None:
        """Raises ModelError if a file was truncated since it was opened: what was read of it since may be zeros."""
        for file in self._files or ():
            file.check()

    def close(self) -> None:
        """Let go of the files. The memory stays mapped until the last view or lazy array of it is gone."""
        self._files = None

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
