"""Changes of packed matrices by products of two small ones (LoRA, arXiv:2106.09685), computed beside the matrix.

x . (W + scale * b . a)^T is x . W^T + scale * (x . a^T) . b^T: the matrix stays packed, and nothing of it is rounded
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvcli.kernels.reference.matmul import QuantTensor

Product = Callable[[torch.Tensor, Sequence["QuantTensor"], "torch.Tensor | None"], torch.Tensor]  # a backend's `matmul`


def add_changes(product: Product, x: torch.Tensor, weights: Sequence[QuantTensor], out: torch.Tensor) -> None:
    """out [T, sum of rows] += what the changes of `weights` make of x [T, cols]."""
    changes, row = [], 0
    for w in weights:
        changes += [(each, row) for each in w.changes]
        row += w.rows
    if not changes:
        return
    inner = product(x, [each.a for each, _ in changes], None)
    done = 0
    for each, row in changes:
        part = inner[:, done : done + each.a.rows] * each.scale
        product(part, [each.b], out[:, row : row + each.b.rows])
        done += each.a.rows


def add_changed_rows(
    product: Product,
    rows: Callable[[QuantTensor, torch.Tensor, float], torch.Tensor],
    weight: QuantTensor,
    ids: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """out [T, cols] += rows `ids` of the changes of `weight`, times `scale`; `rows` is a backend's."""
    for each in weight.changes:
        product(rows(each.b, ids, scale * each.scale), [each.a_turned], out)
