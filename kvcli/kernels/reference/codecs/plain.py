"""What f32, f16 and bf16 share: a row is its elements, cast."""

from __future__ import annotations

import torch

LARGEST_HALF = 65504.0


class PlainCodec:
    """Elements of one dtype; encoding rounds to nearest even, decoding is exact.

    What is beyond the range of float16 is clamped: one infinity in a row of keys would make every score NaN.
    """

    per_head = False  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float16:
            rows = rows.clamp(-LARGEST_HALF, LARGEST_HALF)
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        return data.contiguous().view(self.dtype)[..., :dim].to(torch.float32)
