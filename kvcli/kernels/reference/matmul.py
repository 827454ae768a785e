"""Products with packed weights: the plain-torch reference.

A matrix may have changes, products of two small ones (LoRA, arXiv:2106.09685), which are computed beside it:
x . (W + scale * b . a)^T is x . W^T + scale * (x . a^T) . b^T. It stays packed, and nothing of it is rounded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch

from kvcli.kernels.reference import ggml
from kvcli.kernels.reference.sums import dot, split

SLICE_ELEMENTS = 1 << 18  # weights expanded at a time: a MiB of float32


@dataclass(frozen=True)
class LowRank:
    """What is added to a matrix [rows, cols]: scale * b . a, of `a` [rank, cols] and `b` [rows, rank]."""

    a: QuantTensor
    b: QuantTensor
    scale: float

    @cached_property
    def a_turned(self) -> QuantTensor:
        """[cols, rank]."""
        turned = self.a.decode().T.flatten().view(torch.uint8).view(self.a.cols, -1)
        return QuantTensor("F32", turned, self.a.rows)


@dataclass(frozen=True)
class QuantTensor:
    """A weight matrix as its file stores it: `blocks` uint8 [rows, row bytes] of GGML type `type`.

    `changes` are added to it in products and rows (see `add_changes`).
    """

    type: str
    blocks: torch.Tensor
    cols: int
    changes: tuple[LowRank, ...] = ()

    @property
    def rows(self) -> int:
        return self.blocks.shape[0]

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    def part(self, start: int, end: int) -> QuantTensor:
        """Rows [start, end), not copied."""
        return self.with_rows(lambda rows: rows[start:end])

    def with_rows(self, chosen: Callable[[torch.Tensor], torch.Tensor]) -> QuantTensor:
        """The same with other rows: those that `chosen` makes of a tensor [rows, ...]."""
        changes = tuple(replace(each, b=each.b.with_rows(chosen)) for each in self.changes)
        return QuantTensor(self.type, chosen(self.blocks), self.cols, changes)

    @property
    def unchanged(self) -> QuantTensor:
        """Without its changes."""
        return replace(self, changes=()) if self.changes else self

    def decode(self, start: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [end - start, cols], without changes."""
        return ggml.decode(self.type, self.blocks[start:end])


def matmul(
    x: torch.Tensor,
    weights: Sequence[QuantTensor],
    add_to: torch.Tensor | None = None,
    each: Callable[..., Iterable[torch.Tensor]] = map,
) -> torch.Tensor:
    """x [T, cols] . W^T for the stacked rows of `weights`, with their changes -> float32 [T, sum of rows].

    With `add_to` [T, rows] the product is added to it in place and it is returned. Weights are expanded a slice at a
    time, never whole; `each` goes over the slices as `map` does.
    """
    parts, step = split(x), max(1, SLICE_ELEMENTS // x.shape[1])

    def product(w: QuantTensor, start: int) -> torch.Tensor:
        return dot(parts, w.decode(start, start + step))

    slices = [(w, start) for w in weights for start in range(0, w.rows, step)]
    out = torch.cat(list(each(product, *zip(*slices, strict=True))), dim=1)
    out = out if add_to is None else add_to.add_(out)
    add_changes(matmul, x, weights, out)
    return out


Product = Callable[[torch.Tensor, Sequence[QuantTensor], "torch.Tensor | None"], torch.Tensor]  # a backend's `matmul`


class Changeable(Protocol):
    """A matrix in whatever form, with its changes."""

    @property
    def rows(self) -> int: ...
    @property
    def changes(self) -> tuple[LowRank, ...]: ...


def add_changes(product: Product, x: torch.Tensor, weights: Sequence[Changeable], out: torch.Tensor) -> None:
    """out [T, sum of rows] += what the changes of `weights` make of x [T, cols]."""
    changes, row = [], 0
    for w in weights:
        changes += [(each, row) for each in w.changes]
        row += w.rows
    if not changes:
        return
    firsts = {id(each.a): each.a for each, _ in changes}  # parts of one matrix have theirs in common
    inner = product(x, list(firsts.values()), None).split([a.rows for a in firsts.values()], 1)
    by_first = dict(zip(firsts, inner, strict=True))
    for each, row in changes:
        product(by_first[id(each.a)] * each.scale, [each.b], out[:, row : row + each.b.rows])


def add_changed_rows(
    product: Product,
    rows: Callable[[QuantTensor, torch.Tensor, float], torch.Tensor],
    weight: Changeable,
    ids: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """out [T, cols] += rows `ids` of the changes of `weight`, times `scale`; `rows` is a backend's."""
    for each in weight.changes:
        product(rows(each.b, ids, scale * each.scale), [each.a_turned], out)


def place(weights: tuple[QuantTensor, ...], paired: bool = False) -> tuple[QuantTensor, ...]:
    """Matrices whose rows `matmul` stacks, where the backend computes: on a CPU, where the file is mapped.

    `paired`: the first half of the rows are gates of the second.
    """
    return weights


def rows(weight: QuantTensor, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """Rows `ids` int64 [T] of the matrix as float32 [T, cols], times `scale`."""
    out = ggml.decode(weight.type, weight.blocks[ids])
    out = out if scale == 1.0 else out * scale
    add_changed_rows(matmul, rows, weight, ids, scale, out)
    return out
