"""A copy of a GGUF file whose matrices are packed in fewer bits: a draft model of the same vocabulary.

python benchmarks/requantized.py MODEL.gguf q4_0 COPY.gguf
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from kvcli.blockformats import FORMATS
from kvcli.kernels.reference import ggml
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.modelfile import ModelFile
from kvcli.runtime.formats.packing import named, pack, packed_types
from kvcli.runtime.headers.ggufwriter import write_gguf


@dataclass(frozen=True)
class Packed:
    """A tensor as it is to be written."""

    name: str
    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        form = FORMATS[self.type]
        return prod(self.shape) // form.elements * form.bytes


class Copy(ModelFile):
    """A file whose matrices are stored as another type."""

    def __init__(self, file: GGUFFile, type: str) -> None:
        super().__init__(file.path, file.paths, file.open_files())
        self.file = file
        shapes = {name: (x.shape, "F32") for name, x in file.tensors.items()}
        types = packed_types(shapes, type)
        self._tensors = {
            name: Packed(name, x.shape, types[name] if types[name] != "F32" else x.type)
            for name, x in file.tensors.items()
        }

    @property
    def metadata(self) -> dict:
        return dict(self.file.metadata)

    @property
    def tensors(self) -> dict[str, Packed]:
        return self._tensors

    def data(self, name: str) -> np.ndarray:
        """The packed bytes of a tensor."""
        stored, wanted = self.file.tensors[name], self._tensors[name]
        bytes = self.file.data(name)
        if stored.type == wanted.type:
            return bytes
        rows = torch.from_numpy(np.array(bytes)).view(prod(stored.shape[:-1]), -1)
        values = ggml.decode(stored.type, rows).view(stored.shape).numpy()
        return np.ascontiguousarray(pack(wanted.type, values, "F32")).reshape(-1).view(np.uint8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("type")
    parser.add_argument("copy", type=Path)
    options = parser.parse_args()
    write_gguf(Copy(GGUFFile.open(options.model), named(options.type)), options.copy)


if __name__ == "__main__":
    main()
