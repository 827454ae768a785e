"""8-bit floats, e4m3 without infinities (arXiv 2209.05433) and e5m2: one float32 scale per (sequence, layer, head).

The scale comes from the sequence's first page and leaves room above it: e4m3 keeps its relative precision over nine
octaves, e5m2 over thirty, so headroom costs nothing, and larger elements are clamped instead of becoming NaN.
"""

from __future__ import annotations

import torch


class Float8:
    """`dtype`'s largest value is `largest`; rows are divided by a scale and clamped to +-largest."""

    per_head = True  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, dtype: torch.dtype, largest: float) -> None:
        self.dtype, self.largest = dtype, largest

    def static_scale(self, first_page: torch.Tensor) -> torch.Tensor:
        """float32 [kv_heads, P, D] -> scales [kv_heads] that put the largest element at a quarter of the range."""
        return (first_page.abs().amax((-1, -2)) * (4 / self.largest)).clamp(min=1e-12)

    def encode(self, rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """rows float32 [kv_heads, n, D], scales [kv_heads] -> uint8 [kv_heads, n, D]."""
        scaled = (rows / scales[:, None, None]).clamp(-self.largest, self.largest)
        return scaled.to(self.dtype).view(torch.uint8)

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        """uint8 [kv_heads, n, D] -> float32."""
        return data[..., :dim].contiguous().view(self.dtype).float() * scales[:, None, None]
