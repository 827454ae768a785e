"""Models that lie in several GGUF files: which files are one model, and their headers as one. No torch.

llama-gguf-split names the parts NAME-00001-of-00003.gguf and so on. Each is a GGUF file with tensors of its own; what
holds for the whole model stands in the first, which may have no tensors. `split.no` (from 0), `split.count` and
`split.tensors.count` say what belongs together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvcli.errors import ModelError
from kvcli.runtime.formats.ggufvalues import DAMAGED, quote

if TYPE_CHECKING:
    from kvcli.runtime.formats.ggufheader import Header

MAX_PARTS = 1024
_SIDE_BY_SIDE = "the parts of a model must lie side by side under the names that llama-gguf-split gives them"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def part_of(name: str) -> tuple[str, int, int] | None:
    """'x-00002-of-00003.gguf' -> ('x.gguf', 2, 3): the whole model's name, which part, of how many; None for others."""
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]) <= MAX_PARTS:
        return None
    return f"{match[1]}.gguf", int(match[2]), int(match[3])


def part_name(whole: str, number: int, count: int) -> str:
    """The name of one part: the reverse of `part_of`."""
    return f"{whole.removesuffix('.gguf')}-{number:05d}-of-{count:05d}.gguf"


def part_paths(path: Path) -> list[Path]:
    """All files of the model that the path names, in order; any part may be named. ModelError if one is missing."""
    part = part_of(path.name)
    if part is None or not os.path.lexists(path):  # whoever opens a path that is not there says so
        return [path]
    whole, _, count = part
    found = []
    for number in range(1, count + 1):
        each = path.with_name(part_name(whole, number, count))
        if not each.exists():
            raise ModelError(f"part {number} of {count} of the model is missing: {each}", _SIDE_BY_SIDE)
        found.append(each)
    return found


def merge(headers: Sequence[Header], labels: Sequence[str]) -> Header:
    """The headers of all parts, in order, as one; `TensorInfo.part` says in which file a tensor lies.

    The header of a model in one file stays as it is. Raises ModelError for parts that are not of one model.
    """
    count = _count(headers[0], 1)
    if count != len(headers):
        there = "1 is" if len(headers) == 1 else f"{len(headers)} are"
        told = f"{labels[0]} is one of {_short(count)} parts of a split model, {there} there"
        raise ModelError(told, _SIDE_BY_SIDE)
    if count == 1:
        return headers[0]
    tensors = {}
    for number, (header, label) in enumerate(zip(headers, labels, strict=True)):
        if _count(header, 0) != count or header.metadata.get("split.no", number) != number:
            raise ModelError(f"{label} is not part {number + 1} of {count} of this model", DAMAGED)
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{label}: tensor {quote(name)} is in an earlier part, too", DAMAGED)
            tensors[name] = replace(tensor, part=number)
    announced = headers[0].metadata.get("split.tensors.count", len(tensors))
    if announced != len(tensors):
        what = f"its parts hold {len(tensors):,} tensors, {_short(announced)} are announced"
        raise ModelError(f"{labels[0]}: {what}", DAMAGED)
    return replace(headers[0], tensors=tensors)


def _count(header: Header, default: int) -> Any:
    """`split.count`; some writers put 0 into a model of one file."""
    return header.metadata.get("split.count", default) or default


def _short(value: Any) -> str:
    return str(value)[:20]
