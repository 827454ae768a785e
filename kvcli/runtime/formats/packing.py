"""Packing of weights into GGML block formats: which tensors, and by what. No torch.

Most formats are packed by the `gguf` package, which has none of the K formats; these are packed by kquants.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvcli.blockformats import FORMATS
from kvcli.errors import UsageError
from kvcli.words import listed, meant, near

if TYPE_CHECKING:
    import numpy as np

K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
PACKED = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0", "Q3_K", "Q2_K", "BF16", "F16")
_PLAIN = ("F32", "F16", "BF16")
_AT_ONCE = 1 << 21  # numbers
# For rows that are no whole blocks, as llama.cpp has it.
_NARROWER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_HEAD_BITS = 6.5  # the matrix that logits are computed with gets as many at least
_KEPT = re.compile(
    r"(ffn_gate_inp|ffn_gate_inp_shexp|norm|shortconv\.conv|ssm_conv1d)\.weight$"
)  # small, and much rests on them


def named(text: str) -> str:
    """The format that a user names, "q8_0" or "Q4_K_M"; the mixture of a _M or _S is not kv's. Raises UsageError."""
    name = re.sub(r"(?<=_K)_[SML]$", "", text.strip().upper())
    if name in PACKED:
        return name
    close = "" if name in FORMATS else meant(each.lower() for each in near(name, PACKED))
    raise UsageError(f"`quantize` cannot be '{text}'", close or f"there are {listed(map(str.lower, PACKED))}")


def packed_types(tensors: Mapping[str, tuple[tuple[int, ...], str]], type: str) -> dict[str, str]:
    """What each tensor, of which shape and type are given, is stored as where matrices are to be packed as `type`.

    Vectors, routers of experts and what is packed stay; so do matrices whose rows are no whole blocks of a format that
    would do.
    """
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    return {
        name: now if len(shape) < 2 or now not in _PLAIN or not name.endswith(".weight") or _KEPT.search(name) else
        _fitting(shape[-1], _of_head(type) if name == head else type) or now
        for name, (shape, now) in tensors.items()
    }  # fmt: skip


def stored_otherwise(tensors: Mapping[str, tuple[tuple[int, ...], str]], type: str) -> dict[str, str]:
    """Of `packed_types` those matrices that are no whole blocks of what they were to be packed as, and their types."""
    meant = packed_types({name: ((*shape[:-1], 256), now) for name, (shape, now) in tensors.items() if shape}, type)
    found = packed_types(tensors, type)
    return {name: found[name] for name, wanted in meant.items() if found[name] != wanted}


def narrower_notice(otherwise: Mapping[str, str], type: str) -> str:
    """What is said of these matrices in one line; "" where there are none."""
    if not otherwise:
        return ""
    kinds: dict[str, list[str]] = {}
    for name, each in otherwise.items():
        kinds.setdefault(each, []).append(name)
    told = [
        f"{names[0]} as {each}" if len(names) == 1 else f"{names[0]} and {len(names) - 1} more as {each}"
        for each, names in kinds.items()
    ]
    return f"rows that are no whole blocks of {type} are stored otherwise: {listed(told)}"


def _of_head(type: str) -> str:
    form = FORMATS[type]
    return type if 8 * form.bytes / form.elements >= _HEAD_BITS else "Q6_K"


def _fitting(cols: int, type: str) -> str:
    """The format for rows of so many elements; "" = none."""
    while type and cols % FORMATS[type].elements:
        type = _NARROWER.get(type, "")
    return type


def pack(type: str, values: np.ndarray, stored: str = "F32") -> np.ndarray:
    """Numbers [..., n] in the memory of `stored` (see `elements`) in a block format: uint8 [..., bytes], or in the
    memory of numbers of 16 bits.

    Some rows at a time are float32, on each of the processors that this process may use.
    """
    import numpy as np

    from kvcli.runtime.formats.elements import widened

    rows = values.reshape(-1, values.shape[-1])
    step = max(1, _AT_ONCE // max(1, rows.shape[1]))
    first = _pack(type, widened(stored, rows[:step]))
    packed = np.empty((len(rows), *first.shape[1:]), first.dtype)
    packed[:step] = first

    def place(at: int) -> None:
        packed[at : at + step] = _pack(type, widened(stored, rows[at : at + step]))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        list(threads.map(place, range(step, len(rows), step)))
    return packed.reshape(*values.shape[:-1], -1)


def _pack(type: str, rows: np.ndarray) -> np.ndarray:
    import numpy as np

    if type in ("F16", "BF16"):
        from kvcli.runtime.formats.elements import narrowed

        return narrowed(type, rows)
    if type in K_FORMATS:
        from kvcli.runtime.formats import kquants

        return kquants.pack(type, rows)
    import gguf

    return gguf.quants.quantize(np.ascontiguousarray(rows), gguf.GGMLQuantizationType[type])
