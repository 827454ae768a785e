"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them. No torch.

For the matrix NAME [rows, cols] of a model there are NAME.lora_a [rank, cols] and NAME.lora_b [rows, rank]; for the
token embedding [tokens, width] they are lora_a [tokens, rank] and lora_b [width, rank]. What is added to the matrix is
scale * alpha / rank * lora_b . lora_a, with `adapter.lora.alpha` of the file (none or 0: without alpha / rank).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvcli.errors import ModelError
from kvcli.options import LoraOption
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.formats.ggufheader import TensorInfo
from kvcli.runtime.formats.ggufvalues import quote

EMBEDDING = "token_embd.weight"
_OTHER_MODEL = "use the adapter with the model that it was trained for"


class Tensor(Protocol):
    """What a header says of a tensor."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class Header(Protocol):
    """What is asked of a model."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Pair:
    """What changes one matrix: `scale` * b . a, of `a` and `b` as above."""

    a: TensorInfo
    b: TensorInfo
    scale: float

    @property
    def rank(self) -> int:
        return self.b.shape[1]


@dataclass(frozen=True)
class Adapter:
    """An open adapter file, and its pairs by the name of the matrix that each changes."""

    file: GGUFFile
    pairs: Mapping[str, Pair]

    @classmethod
    def open(cls, path: Path, scale: float, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """The adapter in that file, for a model with that header. Raises ModelError if it is not one for it."""
        if not path.exists():
            raise ModelError(f"no such file: {path}", "check the path of the adapter; `lora` takes FILE or FILE:SCALE")
        if path.is_dir():
            raise ModelError(f"{path} is a directory, not an adapter", "give the .gguf file inside it")
        file = GGUFFile.open(path)
        _check_kind(file, metadata)
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
            raise ModelError(f"{path}: adapter.lora.alpha must be a number, not {str(alpha)[:40]}")
        names = dict.fromkeys(_changed(file, name) for name in file.tensors)
        return cls(file, {name: _pair(file, name, tensors, scale, alpha) for name in names})


def open_all(options: Sequence[LoraOption], model: Header) -> tuple[Adapter, ...]:
    """The adapters for the model of that header, in order. Raises ModelError."""
    return tuple(Adapter.open(Path(x.path), x.scale, model.metadata, model.tensors) for x in options)


def _check_kind(file: GGUFFile, metadata: Mapping[str, Any]) -> None:
    """Raises ModelError for a file that is no LoRA adapter, or one for another architecture."""
    kind, adapter = file.metadata.get("general.type", "model"), file.metadata.get("adapter.type")
    if kind != "adapter" or adapter != "lora":
        found = f"an adapter of the kind {quote(str(adapter))}" if kind == "adapter" else f"a {kind}"
        raise ModelError(
            f"{file.path} is {found}, not a LoRA adapter", "convert_lora_to_gguf.py of llama.cpp makes them"
        )
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise ModelError(f"{file.path} is an activated LoRA, which changes a model from certain tokens on; kv has none")
    own, other = metadata.get("general.architecture"), file.metadata.get("general.architecture")
    if own != other:
        raise ModelError(f"{file.path} is for {other} models, and this one is {own}", _OTHER_MODEL)
    if not file.tensors:
        raise ModelError(f"{file.path} has no tensors", "the file is incomplete; convert it again")


def _changed(file: GGUFFile, name: str) -> str:
    """The matrix that a tensor of the adapter is for."""
    matrix, _, part = name.rpartition(".")
    if part not in ("lora_a", "lora_b"):
        raise ModelError(f"{file.path} has the tensor {quote(name)}, which is no part of a LoRA adapter")
    return matrix


def _pair(file: GGUFFile, name: str, tensors: Mapping[str, Tensor], scale: float, alpha: float) -> Pair:
    a, b, matrix = file.tensors.get(f"{name}.lora_a"), file.tensors.get(f"{name}.lora_b"), tensors.get(name)
    if a is None or b is None:
        raise ModelError(f"{file.path} lacks one of the two parts of {quote(name)}", "the file is incomplete")
    if matrix is None:
        raise ModelError(f"{file.path} changes {quote(name)}, which this model does not have", _OTHER_MODEL)
    if len(matrix.shape) != 2:
        raise ModelError(f"{file.path} changes {quote(name)}, which is no matrix; kv changes matrices only")
    rank, (rows, cols) = b.shape[-1], matrix.shape
    wanted = ((rows, rank), (cols, rank)) if name == EMBEDDING else ((rank, cols), (rows, rank))
    if (a.shape, b.shape) != wanted:
        found = f"parts of {list(a.shape)} and {list(b.shape)} for {quote(name)}"
        raise ModelError(f"{file.path} has {found}, which is {list(matrix.shape)} in this model", _OTHER_MODEL)
    return Pair(a, b, scale * (alpha / rank if alpha else 1.0))
