"""`ModelHeader`: names, shapes and bytes of all tensors of a model without data (readheader.py finds the files)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from kvcli.errors import ModelError
from kvcli.runtime.formats import ggufheader, safetensors, splitgguf
from kvcli.runtime.formats.ggufvalues import DAMAGED, Buffer, NeedMoreBytes
from kvcli.runtime.hub.hubnames import SAFETENSORS

GGUF = "gguf"
FIRST_GGUF_BYTES, MAX_GGUF_BYTES = 1 << 20, 64 << 20  # of the growing prefix
FIRST_PART_BYTES = 1 << 16  # later parts of a split model have no vocabulary
MAX_CONFIG_BYTES = 4 << 20
_AT_ONCE = 8  # files read in parallel

Parsed = TypeVar("Parsed")


class HeaderTensor(NamedTuple):
    """One tensor: row-major shape, type ("Q4_K", "BF16") and its bytes in the file."""

    shape: tuple[int, ...]
    type: str
    nbytes: int


class Alternative(NamedTuple):
    """Another model of the same repository: its quantization or file name, and its bytes where the hub says them."""

    name: str
    nbytes: int | None


@dataclass(frozen=True)
class ModelHeader:
    """What the header of a model says.

    `metadata` holds the keys of a GGUF model, `config` the config.json of a safetensors one ({} if it has
    none); the other one is empty. `file_bytes` is all of the model, `bytes_read` what came over the network
    (0 for local files and for a cached header). `etag` names the content of a remote file. `notices` are
    lines about what went less well than it could.
    """

    source: str
    container: str  # "gguf" or "safetensors"
    metadata: Mapping[str, Any]
    config: Mapping[str, Any]
    tensors: Mapping[str, HeaderTensor]
    file_bytes: int
    bytes_read: int = 0
    alternatives: Sequence[Alternative] = ()
    etag: str = ""
    notices: Sequence[str] = field(default=(), compare=False)


class Prefix(Protocol):
    """A file of which the first bytes can be had: LocalFile or RemoteFile."""

    label: str

    @property
    def size(self) -> int: ...
    def prefix(self, n_bytes: int) -> Buffer: ...
    def keep(self, n_bytes: int) -> None: ...


# --- one file ---


def _parse_growing(
    file: Prefix, parse: Callable[[Buffer, int, str], Parsed], first: int, limit: int, double: bool
) -> Parsed:
    """Parse a header from a prefix of `first` bytes, then of as many as are needed, up to `limit`.

    `double`: the parser knows a lower bound only, so ask seldom, for twice as many each time.
    """
    n_bytes = first
    while True:
        buffer = file.prefix(n_bytes)
        try:
            return parse(buffer, file.size, file.label)
        except NeedMoreBytes as more:
            if more.needed > limit:
                claim = f"its header would need {more.needed:,} bytes, more than {limit:,}"
                raise ModelError(f"{file.label}: {claim}", DAMAGED) from None
            needed = more.needed
        while double and n_bytes < needed:
            n_bytes *= 2
        n_bytes = max(n_bytes, needed)


def _gguf_header(file: Prefix) -> ggufheader.Header:
    part = splitgguf.part_of(file.label)
    first = FIRST_GGUF_BYTES if part is None or part[1] == 1 else FIRST_PART_BYTES
    header = _parse_growing(file, ggufheader.parse_header, first, MAX_GGUF_BYTES, double=True)
    file.keep(min(header.data_offset, file.size))
    return header


def _safetensors_header(file: Prefix) -> safetensors.Header:
    limit = safetensors.LENGTH_BYTES + safetensors.MAX_HEADER_BYTES
    header = _parse_growing(file, safetensors.parse_header, safetensors.LENGTH_BYTES, limit, double=False)
    file.keep(header.data_offset)
    return header


def document(file: Prefix, limit: int) -> bytes:
    """All of a small file. Raises ModelError if it is larger than `limit` bytes."""
    raw = file.prefix(limit)
    if file.size > limit:
        raise ModelError(f"{file.label} has {file.size:,} bytes, {limit:,} at most are expected", DAMAGED)
    file.keep(file.size)
    return bytes(raw[: file.size])


# --- one model ---


def gguf_model(files: Sequence[Prefix]) -> ModelHeader:
    """One header from all parts of a GGUF model, the first part first."""
    header = splitgguf.merge(_in_parallel(_gguf_header, files), [file.label for file in files])
    tensors = {name: HeaderTensor(t.shape, t.type, t.nbytes) for name, t in header.tensors.items()}
    return ModelHeader(files[0].label, GGUF, header.metadata, {}, tensors, sum(file.size for file in files))


def safetensors_model(
    label: str, opened: Mapping[str, Prefix], weight_map: dict[str, str], config: dict[str, Any]
) -> ModelHeader:
    """One header from all files of a safetensors model: file name -> file, checked against the index."""
    headers = dict(zip(opened, _in_parallel(_safetensors_header, list(opened.values())), strict=True))
    merged = safetensors.merge_shards(headers, weight_map, label)
    tensors = {name: HeaderTensor(t.shape, t.dtype, t.nbytes) for name, t in merged.items()}
    return ModelHeader(label, SAFETENSORS, {}, config, tensors, sum(file.size for file in opened.values()))


def _in_parallel(read: Callable[[Prefix], Parsed], files: Sequence[Prefix]) -> list[Parsed]:
    if len(files) == 1:
        return [read(files[0])]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(min(_AT_ONCE, len(files)))
    try:
        return list(pool.map(read, files))
    finally:
        pool.shutdown(cancel_futures=True)  # after an error the rest is not worth reading
