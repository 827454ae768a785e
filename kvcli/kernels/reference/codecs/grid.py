"""Integer types: one float16 scale per row, values on an even grid of levels, no zero point.

A row is (u - centre) * d with u an unsigned integer. The scale multiplies scores (keys) or probabilities (values), so
a kernel never scales single elements. Rows of zeros get the smallest scale and decode to (at most) half a step of it.

Codes of 8 bits are a byte each. Others are packed in two *planes*, the low four bits of all elements, then what is
above them. A plane of b bits is made of fields of 4 b bits ("quarter split"): field j holds elements j, j + Q, j + 2Q
and j + 3Q of a row, from the lowest bits up, Q = D / 4 (D padded to a multiple of `packing`). So a kernel that loads
fields gets four runs of consecutive elements without any shuffle. Fields of four bits share bytes: byte j of such a
plane has field j and, above it, field j + Q / 2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcli.codecs import Numbers
from kvcli.kernels.reference.sums import total

SMALLEST_SCALE = 6e-8  # the smallest positive float16


def pack_plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [..., 4Q] of `bits` bits each, 4, 2 or 1 -> uint8 [..., Q * bits / 2]."""
    first, second, third, fourth = codes.unflatten(-1, (4, -1)).unbind(-2)
    if bits == 4:  # fields are words, the low byte first
        return torch.stack((first | second << 4, third | fourth << 4), -1).flatten(-2)
    fields = first | second << bits | third << 2 * bits | fourth << 3 * bits
    if bits == 1:
        low, high = fields.unflatten(-1, (2, -1)).unbind(-2)
        return low | high << 4
    return fields


def unpack_plane(data: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `pack_plane`."""
    if bits == 4:
        low, high = data.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.cat((low & 15, low >> 4, high & 15, high >> 4), -1)
    if bits == 1:
        data = torch.cat((data & 15, data >> 4), -1)
    return torch.cat([data >> part * bits & (1 << bits) - 1 for part in range(4)], -1)


class GridCodec:
    """Codes of `numbers.bits` bits. `factors`: scales tried, as multiples of the one that just holds the largest."""

    per_head = False  # whether all rows of a head share one scale, fixed by the first page

    def __init__(self, numbers: Numbers) -> None:
        self.bits, self.packing, self.lowest = numbers.bits, numbers.packing, numbers.lowest
        self.highest = (1 << self.bits) - 1
        self.centre = (self.lowest + self.highest) / 2
        self.factors = tuple(1 - 0.03 * i for i in range(numbers.tries))

    def quantize(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [..., D] -> codes uint8 [..., D] and scales float16 [...], of the least squared error."""
        reach = self.highest - self.centre
        largest = rows.abs().amax(-1, keepdim=True)
        best_error = torch.full_like(largest, torch.inf)
        best_codes, best_scale = torch.zeros_like(rows), torch.ones_like(largest)
        for factor in self.factors:
            scale = (largest * (factor / reach)).clamp(min=SMALLEST_SCALE, max=65504.0).half().float()
            codes = (rows / scale + self.centre).round().clamp(self.lowest, self.highest)
            error = total(((codes - self.centre) * scale - rows).square())[..., None]
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            best_codes = torch.where(better, codes, best_codes)
            best_scale = torch.where(better, scale, best_scale)
        return best_codes.to(torch.uint8), best_scale.squeeze(-1).half()

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [..., D] -> packed codes uint8 [..., row bytes], scales float16 [...]."""
        codes, scales = self.quantize(rows)
        if self.bits == 8:
            return codes, scales
        codes = F.pad(codes, (0, -codes.shape[-1] % self.packing))
        planes = [pack_plane(codes & 15, 4)]
        if self.bits > 4:
            planes.append(pack_plane(codes >> 4, self.bits - 4))
        return torch.cat(planes, -1), scales

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of `encode`, but for what was rounded: float32 [..., dim]."""
        codes = data
        if self.bits < 8:
            low = -(-dim // self.packing) * self.packing // 2  # bytes of the first plane
            codes = unpack_plane(data[..., :low], 4)
            if self.bits > 4:
                codes = codes | unpack_plane(data[..., low:], self.bits - 4) << 4
        return (codes[..., :dim].float() - self.centre) * scales.float()[..., None]
