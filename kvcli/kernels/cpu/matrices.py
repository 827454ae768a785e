"""Weights as the compiled kernels see them, and how they come to lie side by side."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p

import torch

from kvcli.blockformats import FORMATS, INTERLEAVED, INTERLEAVED_ROWS
from kvcli.kernels.cpu.interleaved import Interleaved, InterleavedExperts, Room
from kvcli.kernels.reference.experts import ExpertTensor
from kvcli.kernels.reference.matmul import QuantTensor

READ_AT_ONCE = 4 << 20  # bytes of a file that are interleaved before their memory is given back

Matrix = QuantTensor | Interleaved
OfExperts = ExpertTensor | InterleavedExperts


class Weight(ctypes.Structure):
    """kv_weight."""

    _fields_ = [("blocks", c_void_p), *((x, c_int64) for x in ("rows", "row_bytes", "format", "interleaved"))]


def weight_table(weights: Sequence[Matrix]) -> ctypes.Array:
    return (Weight * len(weights))(*map(_weight, weights))


def expert_table(weights: Sequence[OfExperts]) -> ctypes.Array:
    """The matrices of one expert after the other."""
    return weight_table([w.of(e) for e in range(weights[0].experts) for w in weights])


def _weight(w: Matrix) -> Weight:
    interleaved = isinstance(w, Interleaved)
    row_bytes = w.blocks.stride(0) // (INTERLEAVED_ROWS if interleaved else 1)
    return Weight(w.blocks.data_ptr(), w.rows, row_bytes, FORMATS[w.type].id, interleaved)


class Interleaver:
    """Puts rows of matrices side by side. `release` is called meanwhile, to give back the memory of what was read of a
    file; `nbytes`: of all that was interleaved."""

    def __init__(self, library: ctypes.CDLL, release: Callable[[], None]) -> None:
        self._library, self._release = library, release
        self._room, self._unreleased, self.nbytes = Room(), 0, 0

    def matrix(self, w: QuantTensor) -> Matrix:
        """The matrix, interleaved where its format is one for that."""
        if w.type not in INTERLEAVED:
            return w
        return Interleaved(w.type, self._interleaved([w.unchanged])[0], w.rows, w.cols, w.changes)

    def experts(self, w: ExpertTensor) -> OfExperts:
        """The same of a matrix of each expert."""
        if w.type not in INTERLEAVED:
            return w
        blocks = self._interleaved([w.of(e) for e in range(w.experts)])
        return InterleavedExperts(w.type, blocks, w.rows, w.cols)

    def _interleaved(self, matrices: Sequence[QuantTensor]) -> torch.Tensor:
        """uint8 [matrices, groups of rows, bytes of a group] of matrices of one shape and type."""
        first = matrices[0]
        groups, group_bytes = -(-first.rows // INTERLEAVED_ROWS), INTERLEAVED_ROWS * first.blocks.shape[1]
        blocks = self._room.take(len(matrices) * groups * group_bytes).view(len(matrices), groups, group_bytes)
        for w, there in zip(matrices, blocks, strict=True):
            self._write(w, there)
        self.nbytes += blocks.numel()
        return blocks

    def _write(self, w: QuantTensor, blocks: torch.Tensor) -> None:
        step = max(1, READ_AT_ONCE // blocks.shape[1])
        for first in range(0, len(blocks), step):
            part = w.part(first * INTERLEAVED_ROWS, (first + step) * INTERLEAVED_ROWS)
            self._library.kv_interleave(weight_table([part]), w.cols, blocks[first].data_ptr())
            self._unreleased += part.nbytes
            if self._unreleased >= READ_AT_ONCE:
                self._release()
                self._unreleased = 0
