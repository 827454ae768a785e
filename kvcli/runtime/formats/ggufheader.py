"""The header of a GGUF file, parsed with checks. No torch.

Layout (little-endian; versions 2 and 3): "GGUF", u32 version, u64 tensors, u64 keys; the keys, each a string,
a u32 value type and the value; the tensors, each a string, u32 dims, u64 per dim (fastest first), u32 block
type, u64 offset; padding to `general.alignment`; the data, from whose start the offsets count. A string is a
u64 length and its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvcli.blockformats import FORMATS
from kvcli.errors import ModelError
from kvcli.runtime.formats.ggufvalues import Buffer, Cursor, quote

_TYPE_NAMES = {block.id: name for name, block in FORMATS.items()}
# What llama.cpp once wrote and no longer reads: numbers of types, their names, and what to use in their place.
_REMOVED_TYPES = {
    **dict.fromkeys((4, 5), ("Q4_2 or Q4_3", "Q4_0 or Q4_K_M")),
    **dict(zip((31, 32, 33), ((name, "Q4_0") for name in ("Q4_0_4_4", "Q4_0_4_8", "Q4_0_8_8")), strict=True)),
    **dict(zip((36, 37, 38), ((name, "IQ4_NL") for name in ("IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8")), strict=True)),
}

MAX_KEYS, MAX_TENSORS, MAX_DIMS = 1 << 16, 1 << 16, 4  # far above any real file
_LEAST_KEY_BYTES, _LEAST_TENSOR_BYTES = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_LOOKALIKES = {
    b"\x89PNG": "a PNG image",
    b"PK\x03\x04": "a zip archive, perhaps a PyTorch checkpoint",
    b"version https://git-lfs": "a Git LFS pointer; the file itself was not fetched",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"tjgg": "a GGML file of before 2023-08",
    b"lmgg": "a GGML file of before 2023-08",
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a model. `shape` is row-major, `offset` counts bytes from the start of file `part` of the model."""

    name: str
    shape: tuple[int, ...]
    type: str  # a key of FORMATS
    offset: int
    nbytes: int
    part: int = 0


@dataclass(frozen=True)
class Header:
    """All that stands before the tensor data. `data_offset` is where that data starts in the file."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    alignment: int
    data_offset: int


def parse_header(buffer: Buffer, size: int, label: str) -> Header:
    """Parse and check the header of a GGUF file of `size` bytes from its first bytes.

    `label` names the file in errors. Every tensor of the result lies inside the file and overlaps no other.
    Raises NeedMoreBytes if `buffer` ends inside the header, ModelError for anything wrong with the file.
    """
    cursor = Cursor(buffer, size, label)
    version = _read_version(cursor)
    n_tensors = cursor.count(_LEAST_TENSOR_BYTES, "tensors")
    n_keys = cursor.count(_LEAST_KEY_BYTES, "keys")
    if n_tensors > MAX_TENSORS or n_keys > MAX_KEYS:
        raise cursor.error(f"it claims {n_tensors:,} tensors and {n_keys:,} keys, more than kv accepts")
    metadata: dict[str, Any] = {}
    for index in range(n_keys):
        key = cursor.string(f"the name of key {index}")
        if key in metadata:
            raise cursor.error(f"the key {quote(key)} appears twice")
        metadata[key] = cursor.value(key)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is {str(alignment)[:40]}, not a power of two")
    entries = [_read_tensor(cursor, index) for index in range(n_tensors)]
    data_offset = -(-cursor.pos // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for entry in entries:
        if entry.name in tensors:
            raise cursor.error(f"the tensor {quote(entry.name)} appears twice")
        if entry.offset % alignment:
            raise cursor.error(f"tensor {quote(entry.name)} is not aligned to {alignment} bytes")
        placed = TensorInfo(entry.name, entry.shape, entry.type, data_offset + entry.offset, entry.nbytes)
        tensors[entry.name] = placed
    _check_extents(cursor, tensors)
    return Header(version, metadata, tensors, alignment, data_offset)


def _legible(start: bytes) -> str:
    """The first bytes of some file, for people: as text where its first line is that."""
    line = start.split(b"\n")[0].decode("ascii", "replace")
    return f"'{line}'" if line and line.isprintable() and line.isascii() else f"the bytes {start.hex(' ')}"


def _read_version(cursor: Cursor) -> int:
    start = bytes(cursor.buffer[: min(24, cursor.size)])
    if cursor.size == 0:
        raise ModelError(f"{cursor.label} is empty (0 bytes)", "download it again")
    if not start.startswith(b"GGUF"[: len(start)]) or cursor.size < 4:
        found = next((what for magic, what in _LOOKALIKES.items() if start.startswith(magic)), "")
        if start[8:9] == b"{":
            found = "probably safetensors"
        what = f"but {found}" if found else f"(it begins with {_legible(start[:8])})"
        raise ModelError(f"{cursor.label} is not a GGUF file {what}", "kv reads models and adapters in .gguf files")
    cursor.pos = 4
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error("it is a big-endian GGUF file", "convert it with gguf_convert_endian.py of llama.cpp")
    if version not in (2, 3):
        raise cursor.error(f"GGUF version {version} is not supported", "kv reads versions 2 and 3")
    return version


def _read_tensor(cursor: Cursor, index: int) -> TensorInfo:
    """One entry of the tensor table, its offset still counted from the start of the data."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"the entry of tensor {quote(name)}"
    n_dims = cursor.u32(what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"tensor {quote(name)} has {n_dims} dimensions, 1 to {MAX_DIMS} are possible")
    dims = [cursor.u64(what) for _ in range(n_dims)]
    type_id = cursor.u32(what)
    offset = cursor.u64(what)
    if type_id in _REMOVED_TYPES:
        removed, instead = _REMOVED_TYPES[type_id]
        hint = f"use a file of this model in {instead}"
        raise cursor.error(f"tensor {quote(name)} is stored as {removed}, an old format that no longer exists", hint)
    if type_id not in _TYPE_NAMES:
        hint = "the file is damaged, or written for a newer version of kv"
        raise cursor.error(f"tensor {quote(name)} has the unknown type {type_id}", hint)
    type_name = _TYPE_NAMES[type_id]
    block = FORMATS[type_name]
    elements = 1
    for dim in dims:  # Python integers: the product cannot wrap round
        elements *= dim
    if elements == 0:
        raise cursor.error(f"tensor {quote(name)} has a dimension of 0")
    if dims[0] % block.elements:
        rows = f"rows of {dims[0]:,} elements, {type_name} needs a multiple of {block.elements}"
        raise cursor.error(f"tensor {quote(name)} has {rows}")
    nbytes = elements // block.elements * block.bytes
    return TensorInfo(name, tuple(reversed(dims)), type_name, offset, nbytes)


def _check_extents(cursor: Cursor, tensors: dict[str, TensorInfo]) -> None:
    """Every tensor inside the file and none on top of another, so that their sum is bounded by its size."""
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise cursor.error(f"the tensors {quote(before.name)} and {quote(after.name)} overlap")
    if ordered:
        last = ordered[-1]
        needed = last.offset + last.nbytes
        if needed > cursor.size:
            raise cursor.error(
                f"the file is truncated: tensor {quote(last.name)} ends at byte {needed:,}, "
                f"the file has {cursor.size:,} bytes"
            )
