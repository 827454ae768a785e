"""Products with packed weights: the plain-torch reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kvcli.kernels.reference import ggml
from kvcli.kernels.reference.sums import dot, split

SLICE_ELEMENTS = 1 << 18  # weights expanded at a time: a MiB of float32


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

    def part(self, start: int, end: int) -> QuantTensor:
        """Rows [start, end), not copied."""
        return QuantTensor(self.type, self.blocks[start:end], self.cols)

    def decode(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [end - start, cols]."""
        return ggml.decode(self.type, self.blocks[start:end])


def matmul(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    add_to: torch.Tensor | None = None,
    each: Callable[..., Iterable[torch.Tensor]] = map,
) -> torch.Tensor:
    """x [T, cols] . W^T for the stacked rows of `weights` -> float32 [T, sum of rows].

    With `add_to` [T, rows] the product is added to it in place and it is returned. Weights are expanded a slice at a
    time, never whole; `each` goes over the slices as `map` does.
    """
    parts, step = split(x), max(1, SLICE_ELEMENTS // x.shape[1])

    def product(w: QuantTensor, start: int) -> torch.Tensor:
        return dot(parts, w.decode(start, start + step))

    slices = [(w, start) for w in weights for start in range(0, w.rows, step)]
    out = torch.cat(list(each(product, *zip(*slices, strict=True))), dim=1)
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
