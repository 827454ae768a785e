"""KV storage formats, one a file; the file name is the value of `--cache-type-k/-v`.

A codec turns float32 rows into bytes and back. Its plain-torch `encode` and `decode` are the specification; kernels
that read pages must agree with them. How many bytes a row takes is known without torch: `runtime.layout.CodecSpec`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch


class KVCodec(Protocol):
    """One storage format. Rows are float32 [..., D], data uint8 [..., row bytes], D the head dim.

    | kind | encode | decode |
    |---|---|---|
    | no scales (plain.py) | rows -> data | data, D -> rows |
    | one scale a row (grid.py) | rows -> data, scales float16 [...] | data, scales, D -> rows |
    | one scale a head (fp8.py) | rows, scales [kv_heads] -> data | data, scales, D -> rows |

    The last kind has `per_head` set, and `static_scale(first page) -> scales`.
    """

    per_head: bool
    encode: Callable[..., Any]
    decode: Callable[..., torch.Tensor]
    static_scale: Callable[[torch.Tensor], torch.Tensor]


def load(name: str) -> KVCodec:
    """The codec of that name (a module of this package with an object `CODEC`)."""
    return importlib.import_module(f"{__name__}.{name}").CODEC
