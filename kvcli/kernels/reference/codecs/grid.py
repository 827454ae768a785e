"""What int8, int6 and int4 share: one float16 scale per row, values on an even grid of levels, no zero point.

A row is (u - centre) * d with u an unsigned integer. The scale multiplies scores (keys) or probabilities (values), so
a kernel never scales single elements. Rows of zeros get the smallest scale and decode to (at most) half a step of it.
"""

from __future__ import annotations

import torch

from kvcli.kernels.reference.sums import total

SMALLEST_SCALE = 6e-8  # the smallest positive float16


class GridCodec:
    """`bits` wide codes; `shrink`: scales tried, as multiples of the one that just holds the largest element."""

    per_head = False  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, bits: int, centre: float, lowest: int, shrink: tuple[float, ...]) -> None:
        self.bits, self.centre, self.lowest, self.shrink = bits, centre, lowest, shrink
        self.highest = (1 << bits) - 1

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [..., D] -> codes uint8 [..., D] and scales float16 [...], of the least squared error."""
        reach = self.highest - self.centre
        largest = rows.abs().amax(-1, keepdim=True)
        best_error = torch.full_like(largest, torch.inf)
        best_codes, best_scale = torch.zeros_like(rows), torch.ones_like(largest)
        for factor in self.shrink:
            scale = (largest * (factor / reach)).clamp(min=SMALLEST_SCALE, max=65504.0).half().float()
            codes = (rows / scale + self.centre).round().clamp(self.lowest, self.highest)
            error = total(((codes - self.centre) * scale - rows).square())[..., None]
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_codes = torch.where(better, codes, best_codes)
            best_scale = torch.where(better, scale, best_scale)
        return best_codes.to(torch.uint8), best_scale.squeeze(-1).half()

    def values(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The inverse of `quantize`, float32 [..., D]."""
        return (codes.float() - self.centre) * scales.float()[..., None]
