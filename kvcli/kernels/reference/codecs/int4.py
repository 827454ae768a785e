"""4-bit keys or values: codes 0..15 around 7.5, one float16 scale per (token, head).

Packing ("quarter split"): 16-bit word j of a row holds elements j, j + Q, j + 2Q, j + 3Q in its nibbles from the lowest
up, Q = D / 4 (D padded to a multiple of 4). A kernel that loads words gets four runs of consecutive elements without
any shuffle.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcli.kernels.reference.codecs.grid import GridCodec

SHRINK = tuple(1 - 0.03 * i for i in range(15))  # the search of scales, relative to absmax / 7.5


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 4Q] with values 0..15 -> uint8 [..., 2Q]."""
    q = codes.unflatten(-1, (4, -1))
    return torch.stack((q[..., 0, :] | q[..., 1, :] << 4, q[..., 2, :] | q[..., 3, :] << 4), -1).flatten(-2)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    words = data.unflatten(-1, (-1, 2))
    low, high = words[..., 0], words[..., 1]
    return torch.cat((low & 15, low >> 4, high & 15, high >> 4), -1)


class Int4(GridCodec):
    def __init__(self) -> None:
        super().__init__(bits=4, centre=7.5, lowest=0, shrink=SHRINK)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self.quantize(rows)
        return pack_nibbles(F.pad(codes, (0, -codes.shape[-1] % 4))), scales

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        return self.values(unpack_nibbles(data)[..., :dim], scales)


CODEC = Int4()
