"""Encoding rows and reading them back, in plain torch: one class for each way that cache types store them.

A codec turns float32 rows into bytes and back. `encode` and `decode` are the specification; kernels that read pages
must agree with them. Which types there are, and their numbers, stands in kvcli/codecs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from kvcli.codecs import HEAD, Codec
from kvcli.kernels.reference.codecs.float8 import Float8
from kvcli.kernels.reference.codecs.grid import GridCodec
from kvcli.kernels.reference.codecs.plain import PlainCodec

DTYPES = {  # by bits and mantissa
    (32, 23): torch.float32, (16, 10): torch.float16, (16, 7): torch.bfloat16, (8, 3): torch.float8_e4m3fn,
    (8, 2): torch.float8_e5m2,
}  # fmt: skip


class KVCodec(Protocol):
    """One cache type. Rows are float32 [..., D], data uint8 [..., row bytes], D the head dim.

    | kind | encode | decode |
    |---|---|---|
    | no scales (plain.py) | rows -> data | data, D -> rows |
    | one scale a row (grid.py) | rows -> data, scales float16 [...] | data, scales, D -> rows |
    | one scale a head (float8.py) | rows, scales [kv_heads] -> data | data, scales, D -> rows |

    The last kind has `per_head` set, and `static_scale(first page) -> scales`.
    """

    per_head: bool
    encode: Callable[..., Any]
    decode: Callable[..., torch.Tensor]
    static_scale: Callable[[torch.Tensor], torch.Tensor]


def of(codec: Codec) -> KVCodec:
    """What encodes and decodes rows of that cache type."""
    made: Any
    if codec.grid:
        made = GridCodec(codec.numbers)
    else:
        dtype = DTYPES[codec.bits, codec.mantissa]
        made = Float8(dtype, codec.largest) if codec.scale == HEAD else PlainCodec(dtype, codec.largest)
    return made
