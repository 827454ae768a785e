"""8-bit keys or values: codes 1..255 around 128, byte j = element j, one float16 scale per (token, head)."""

from __future__ import annotations

import torch

from kvcli.kernels.reference.codecs.grid import GridCodec


class Int8(GridCodec):
    def __init__(self) -> None:
        super().__init__(bits=8, centre=128.0, lowest=1, shrink=(1.0,))

    def encode(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.quantize(rows)

    def decode(self, data: torch.Tensor, scales: torch.Tensor, dim: int) -> torch.Tensor:
        return self.values(data[..., :dim], scales)


CODEC = Int8()
