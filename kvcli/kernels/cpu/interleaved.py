"""Weights of which 16 rows lie side by side, for products with rows in fixed point (see cpu_interleave.h)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvcli.kernels.reference.matmul import LowRank


@dataclass(frozen=True)
class Interleaved:
    """A weight matrix [rows, cols] of GGML type `type`: `blocks` uint8 [ceil(rows / 16), 16 * row bytes].

    `changes`: see `QuantTensor`.
    """

    type: str
    blocks: torch.Tensor
    rows: int
    cols: int
    changes: tuple[LowRank, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    @property
    def unchanged(self) -> Interleaved:
        """Without its changes."""
        return replace(self, changes=()) if self.changes else self
