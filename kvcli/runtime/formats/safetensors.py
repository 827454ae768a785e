"""safetensors files: a checked header, from the bytes alone. No torch.

Layout: u64 (little-endian) length of the header, the header, the data. The header is a JSON object: name ->
{"dtype", "shape", "data_offsets": [start, end] counted from the start of the data}, and "__metadata__".
A model in several files comes with an index: {"weight_map": {tensor name: file name}}.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES, load_object
from kvcli.runtime.formats.ggufvalues import DAMAGED, Buffer, NeedMoreBytes, quote
from kvcli.runtime.formats.localfile import LocalFile

# Bits of one element. Where they are not eight or more, whole tensors must still fill whole bytes.
DTYPES = {
    "BOOL": 8,
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS, MAX_DIMS, MAX_DIM = 1 << 17, 8, 1 << 48  # far above any real file
MAX_SHARDS = 1024
LENGTH_BYTES = 8
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def is_model_folder(folder: Path) -> bool:
    """Whether a folder holds the weights of a model."""
    return (folder / INDEX).exists() or (folder / SINGLE).exists()


@dataclass(frozen=True)
class TensorInfo:
    """One tensor. `shape` is row-major, () for a scalar; `offset` counts bytes from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a key of DTYPES
    offset: int
    nbytes: int

    @property
    def type(self) -> str:
        """`dtype`, under the name that tensors of other files have it by."""
        return self.dtype


@dataclass(frozen=True)
class Header:
    """All that stands before the data. `data_offset` is where the data starts in the file."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_offset: int


def parse_header(buffer: Buffer, size: int, label: str) -> Header:
    """Parse and check the header of a safetensors file of `size` bytes from its first bytes.

    `label` names the file in errors. Every tensor of the result lies inside the file and overlaps no other.
    Raises NeedMoreBytes if `buffer` ends inside the header, ModelError for anything wrong with the file.
    """
    length = _header_length(buffer, size, label)
    end = LENGTH_BYTES + length
    if len(buffer) < end:
        raise NeedMoreBytes(end)
    entries = load_object(bytes(buffer[LENGTH_BYTES:end]), f"{label}: the header")
    metadata = _metadata(entries.pop("__metadata__", {}), label)
    if len(entries) > MAX_TENSORS:
        raise ModelError(f"{label}: it lists {len(entries):,} tensors, more than kv accepts", DAMAGED)
    tensors = {name: _tensor(name, entry, end, label) for name, entry in entries.items()}
    _check_extents(tensors.values(), size, label)
    return Header(tensors, metadata, end)


_NONSENSE = 1 << 40  # no size of a header, but eight bytes of something else


def _header_length(buffer: Buffer, size: int, label: str) -> int:
    if size < LENGTH_BYTES + 2:
        raise ModelError(f"{label} is not a safetensors file: it has {size} bytes", "download it again")
    if len(buffer) < LENGTH_BYTES:
        raise NeedMoreBytes(LENGTH_BYTES)
    start = bytes(buffer[:LENGTH_BYTES])
    length = int(struct.unpack("<Q", start)[0])
    if length > MAX_HEADER_BYTES:
        what = "its first 8 bytes are not the size of a header"
        if length < _NONSENSE:
            what = f"its header would have {length:,} bytes, more than {MAX_HEADER_BYTES:,}"
        found = " (it is a GGUF file)" if start.startswith(b"GGUF") else ""
        raise ModelError(f"{label} is not a safetensors file: {what}{found}", DAMAGED)
    if LENGTH_BYTES + length > size:
        what = f"the header ends at byte {LENGTH_BYTES + length:,}, the file has {size:,} bytes"
        raise ModelError(f"{label} is truncated: {what}", DAMAGED)
    return length


def _metadata(value: Any, label: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ModelError(f"{label}: __metadata__ is not a table of strings", DAMAGED)
    return value


def _tensor(name: str, entry: Any, data_offset: int, label: str) -> TensorInfo:
    what = f"{label}: tensor {quote(name)}"
    if not name.isprintable():
        raise ModelError(f"{what}: its name holds unprintable characters", DAMAGED)
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise ModelError(f"{what} lacks dtype, shape or data_offsets", DAMAGED)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        hint = "the file is damaged, or written for a newer version of kv"
        raise ModelError(f"{what} has the unknown dtype {quote(str(dtype))}", hint)
    if not _are_counts(shape) or len(shape) > MAX_DIMS or any(dim > MAX_DIM for dim in shape):
        raise ModelError(f"{what} has the impossible shape {str(shape)[:80]}", DAMAGED)
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{what} has the impossible data_offsets {str(offsets)[:80]}", DAMAGED)
    start, end = offsets
    bits = math.prod(shape) * DTYPES[dtype]  # Python integers: the product cannot wrap round
    if bits != 8 * (end - start):
        claim = f"{dtype} {shape} would take {bits / 8:,.15g} bytes, its data_offsets span {end - start:,}"
        raise ModelError(f"{what}: {claim}", DAMAGED)
    return TensorInfo(name, tuple(shape), dtype, data_offset + start, end - start)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_extents(tensors: Iterable[TensorInfo], size: int, label: str) -> None:
    """Every tensor inside the file and none on top of another, so that their sum is bounded by its size."""
    ordered = sorted((t for t in tensors if t.nbytes), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            both = f"{quote(before.name)} and {quote(after.name)}"
            raise ModelError(f"{label}: the tensors {both} overlap", DAMAGED)
    if ordered and (end := ordered[-1].offset + ordered[-1].nbytes) > size:
        what = f"tensor {quote(ordered[-1].name)} ends at byte {end:,}, the file has {size:,} bytes"
        raise ModelError(f"{label} is truncated: {what}", DAMAGED)


def parse_index(raw: bytes, label: str) -> dict[str, str]:
    """The `weight_map` of a model.safetensors.index.json: tensor name -> name of a file next to it.

    Raises ModelError, also for a file name that would lead out of the folder.
    """
    weight_map = load_object(raw, label).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{label} has no weight_map", DAMAGED)
    for file in weight_map.values():
        plain = isinstance(file, str) and file.endswith(".safetensors") and len(file) <= 255
        if not plain or not file.isprintable() or "/" in file or "\\" in file:
            raise ModelError(f"{label} names {quote(str(file))}, not a .safetensors file beside it", DAMAGED)
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise ModelError(f"{label} names more than {MAX_SHARDS:,} files", DAMAGED)
    return weight_map


def merge_shards(headers: dict[str, Header], weight_map: dict[str, str], label: str) -> dict[str, TensorInfo]:
    """The tensors of all files of a model: file name -> header, checked against the index (`label`).

    Raises ModelError if a tensor is missing where the index sees it, or is there twice.
    """
    merged: dict[str, TensorInfo] = {}
    for header in headers.values():
        for name, tensor in header.tensors.items():
            if name in merged:
                raise ModelError(f"{label}: tensor {quote(name)} is in several files", DAMAGED)
            merged[name] = tensor
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise ModelError(f"{label}: tensor {quote(name)} is not in {file}", DAMAGED)
    return merged


def weight_files(folder: Path) -> tuple[dict[str, LocalFile], dict[str, str]]:
    """The files of a folder's weights by name, and its index: tensor -> file name ({} for a model in one file).

    Raises ModelError for a folder without weights, or without a file that the index names.
    """
    if (folder / INDEX).exists():
        weight_map = _index(LocalFile(folder / INDEX))
        names = list(dict.fromkeys(weight_map.values()))
        if missing := [name for name in names if not (folder / name).exists()]:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ModelError(f"{folder} lacks {missing[0]}{more}, which its index names", "download the whole model")
        return {name: LocalFile(folder / name) for name in names}, weight_map
    if (folder / SINGLE).exists():
        return {SINGLE: LocalFile(folder / SINGLE)}, {}
    found = sorted(folder.glob("*.gguf"))
    hint = f"it holds {found[0]}" if found else "give a .gguf file, or a folder with model.safetensors"
    raise ModelError(f"{folder} is a folder without {SINGLE} and {INDEX}", hint)


def _index(file: LocalFile) -> dict[str, str]:
    if file.size > MAX_DOCUMENT_BYTES:
        raise ModelError(f"{file.label} has {file.size:,} bytes, {MAX_DOCUMENT_BYTES:,} at most are expected", DAMAGED)
    return parse_index(bytes(file.buffer), file.label)
