"""Products with packed weights: the plain-torch reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvcli.kernels import ggml

PAD_ROWS = 16  # BLAS rounds differently at 1, 2 or 7 rows; short products do not at whole multiples of this
BLOCK_ROWS = 64  # long ones do, so rows are multiplied in blocks of exactly this many
SLICE_ELEMENTS = 1 << 22  # weights expanded at a time: 16 MiB of float32


@dataclass(frozen=True)
class QuantTensor:
    """A weight matrix as its file stores it: `blocks` uint8 [rows, row bytes] of GGML type `type`."""

    type: str
    blocks: torch.Tensor
    cols: int

    @property
    def rows(self) -> int:
        return self.blocks.shape[0]

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    def decode(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [end - start, cols]."""
        return ggml.decode(self.type, self.blocks[start:end])


def pad_rows(x: torch.Tensor, multiple: int = PAD_ROWS) -> torch.Tensor:
    """x [T, ...] with zero rows appended up to a whole multiple."""
    missing = -x.shape[0] % multiple
    return x if missing == 0 else torch.cat([x, x.new_zeros(missing, *x.shape[1:])])


def matmul(x: torch.Tensor, weights: Sequence[QuantTensor], add_to: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, cols] . W^T for the stacked rows of `weights` -> float32 [T, sum of rows].

    With `add_to` [T, rows] the product is added to it in place and it is returned. Weights are expanded a slice at a
    time, never whole.
    """
    blocks = pad_rows(x, BLOCK_ROWS).split(BLOCK_ROWS)
    parts = []
    for w in weights:
        step = max(1, SLICE_ELEMENTS // w.cols)
        for start in range(0, w.rows, step):
            expanded = w.decode(start, start + step)
            parts.append(torch.cat([F.linear(block, expanded) for block in blocks])[: x.shape[0]])
    out = torch.cat(parts, dim=1)
    return out if add_to is None else add_to.add_(out)


def place(weights: tuple[QuantTensor, ...], paired: bool = False) -> tuple[QuantTensor, ...]:
    """Matrices whose rows `matmul` stacks, where the backend computes: on a CPU, where the file is mapped.

    `paired`: the first half of the rows are gates of the second.
    """
    return weights


def rows(weight: QuantTensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows `ids` int64 [T] of the matrix as float32 [T, cols], times `scale`."""
    out = ggml.decode(weight.type, weight.blocks[ids])
    return out if scale == 1.0 else out * scale
