"""Layers that keep a state, on a CPU: operations of `NativeBackend`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from kvcli.kernels.states import Carried


class Library(Protocol):
    """What these operations use of a `NativeBackend`."""

    _lib: Any
    _calls: Any

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor: ...


def short_conv(
    ops: Library, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, carried: Sequence[Carried]
) -> torch.Tensor:
    """See `reference.shortconv.short_conv`."""
    (d, kernel), there = weight.shape, _carried(ops, carried)
    out = ops._new(x.shape[0], d)
    ops._lib.kv_short_conv(
        x.data_ptr(), x.stride(0), weight.data_ptr(), None if bias is None else bias.data_ptr(), d, kernel,
        there.buffer_info()[0], len(carried), out.data_ptr(),
    )  # fmt: skip
    return out


def _carried(ops: Library, carried: Sequence[Carried]) -> array[int]:
    """The C view of states (kv_carried); it has to live until the call that it is for has returned."""
    numbers: list[int] = []
    for each in carried:
        source = 0 if each.source is None else each.source.data_ptr()
        numbers += each.lo, each.hi, source, each.target.data_ptr()
    made = array("q", numbers)
    if ops._calls:
        ops._calls.keep.append(made)
    return made
