"""`ModelFile`: what the rest of kv sees of an open model, whichever files it lies in. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from kvcli.runtime.formats.localfile import LocalFile


class Tensor(Protocol):
    """A tensor under llama.cpp's name. `shape` is row-major; `type` a key of `blockformats.FORMATS`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


class ModelFile(ABC):
    """An open, checked model in the terms of a GGUF file: keys, and tensors that stay on disk until they are read.

    `paths` are its files, `path` is what a user calls it by, `size` the bytes of all. `form` says what is made of
    tensors while they are read, "" = nothing that is not in the files. `notices` are for the user.
    """

    form = ""

    def __init__(self, path: Path, paths: Sequence[Path], files: Sequence[LocalFile]) -> None:
        self.path, self.paths = path, tuple(paths)
        self.size = sum(file.size for file in files)
        self.notices: list[str] = []
        self._files: Sequence[LocalFile] | None = files

    @property
    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """Keys to Python scalars and sequences (list; for long arrays NumberArray, StringArray)."""

    @property
    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """What `data` has, by name."""

    @abstractmethod
    def data(self, name: str) -> np.ndarray:
        """The packed bytes of a tensor: uint8 [nbytes], not to be written to. ModelError if there is none."""

    def stored(self) -> Mapping[str, Tensor]:
        """The tensors as they lie in the files, under the files' own names and types: by these a model is known."""
        return self.tensors

    def stored_bytes(self, name: str) -> np.ndarray:
        """The bytes of one of them."""
        return self.data(name)

    def open_files(self) -> Sequence[LocalFile]:
        """The files while they are open. Raises ValueError later."""
        if self._files is None:
            raise ValueError(f"{self.path} is closed")
        return self._files

    def check(self) -> None:
        """Raises ModelError if a file was truncated since it was opened: what was read of it since may be zeros."""
        for file in self._files or ():
            file.check()

    def close(self) -> None:
        """Let go of the files. The memory stays mapped until the last view or lazy array of it is gone."""
        self._files = None

    def __enter__(self):
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
