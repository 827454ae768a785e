"""What f32, f16 and bf16 share: a row is its elements, cast."""

from __future__ import annotations

import torch


class PlainCodec:
    """Elements of one dtype; encoding rounds to nearest even, decoding is exact."""

    per_head = False  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        return data.contiguous().view(self.dtype)[..., :dim].to(torch.float32)
