"""Types without scales, f32, f16 and bf16: a row is its elements, cast."""

from __future__ import annotations

import torch


class PlainCodec:
    """Elements of one dtype; encoding rounds to nearest even, decoding is exact.

    In float16, what is beyond +-`largest` is clamped: one infinity in a row of keys would make every score NaN.
    """

    per_head = False  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, dtype: torch.dtype, largest: float) -> None:
        self.dtype, self.largest = dtype, largest

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        if self.dtype == torch.float16:
            rows = rows.clamp(-self.largest, self.largest)
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        return data.contiguous().view(self.dtype)[..., :dim].to(torch.float32)
