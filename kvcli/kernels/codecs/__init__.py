"""KV storage formats, one a file; the file name is the value of `--cache-type-k/-v`.

A codec turns float32 rows into bytes and back. Its plain-torch `encode` and `decode` are the specification; kernels
that read pages must agree with them. How many bytes a row takes is known without torch: `runtime.layout.CodecSpec`.
"""

from __future__ import annotations

import importlib
from typing import Protocol

import torch


class KVCodec(Protocol):
    """One storage format. Rows have any leading dims; D is the head dim."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [..., D] -> uint8 [..., row bytes]."""
        ...

    def decode(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        """uint8 [..., row bytes] -> float32 [..., dim]."""
        ...


def load(name: str) -> KVCodec:
    """The codec of that name (a module of this package with an object `CODEC`)."""
    return importlib.import_module(f"{__name__}.{name}").CODEC
