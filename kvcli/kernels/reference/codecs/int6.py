"""6-bit keys or values: codes 0..63 around 31.5, one float16 scale per (token, head).

The low four bits are packed as int4's (quarter split); behind them byte j holds the high two bits of elements j, j + Q,
j + 2Q, j + 3Q, from the lowest up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvcli.kernels.reference.codecs.grid import GridCodec
from kvcli.kernels.reference.codecs.int4 import SHRINK, pack_nibbles, unpack_nibbles


class Int6(GridCodec):
    def __init__(self) -> None:
        super().__init__(bits=6, centre=31.5, lowest=0, shrink=SHRINK)

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = self.quantize(rows)
        codes = F.pad(codes, (0, -codes.shape[-1] % 4))
        high = (codes >> 4).unflatten(-1, (4, -1))
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
        pairs = (high << shifts).sum(-2, dtype=torch.uint8)
        return torch.cat((pack_nibbles(codes & 15), pairs), -1), scales

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        quarter = data.shape[-1] // 3
        low, pairs = unpack_nibbles(data[..., : 2 * quarter]), data[..., 2 * quarter :]
        high = torch.cat([pairs >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        return self.values((low | high << 4)[..., :dim], scales)


CODEC = Int6()
