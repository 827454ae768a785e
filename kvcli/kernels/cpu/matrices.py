"""Weights as the compiled kernels see them, and how they come to lie side by side."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import replace

import torch

from kvcli.blockformats import FORMATS, INTERLEAVED, INTERLEAVED_ROWS
from kvcli.kernels.cpu.interleaved import Interleaved, InterleavedExperts, Later
from kvcli.kernels.cpu.memory import Room
from kvcli.kernels.reference.experts import ExpertTensor
from kvcli.kernels.reference.matmul import QuantTensor

Matrix = QuantTensor | Interleaved
OfExperts = ExpertTensor | InterleavedExperts


class Weight(ctypes.Structure):
    """kv_weight."""

    _fields_ = [
        ("blocks", c_void_p),
        *((x, c_int64) for x in ("rows", "row_bytes", "format", "interleaved")),
        ("later", c_void_p),
    ]


def weight_table(weights: Sequence[Matrix]) -> ctypes.Array:
    return (Weight * len(weights))(*map(_weight, weights))


def expert_table(weights: Sequence[OfExperts]) -> ctypes.Array:
    """The matrices of one expert after the other."""
    return weight_table([w.of(e) for e in range(weights[0].experts) for w in weights])


def _weight(w: Matrix) -> Weight:
    if isinstance(w, QuantTensor):
        return Weight(w.blocks.data_ptr(), w.rows, w.blocks.stride(0), FORMATS[w.type].id)
    later = None if w.later is None else ctypes.addressof(w.later)
    return Weight(w.blocks.data_ptr(), w.rows, w.blocks.stride(0) // INTERLEAVED_ROWS, FORMATS[w.type].id, True, later)


class Interleaver:
    """Puts rows of matrices side by side: those of a file when they are used, else at once. `mapped` says of memory, by
    its address and size, whether it is a file's: that is given back when it was read."""

    def __init__(self, library: ctypes.CDLL, mapped: Callable[[int, int], bool]) -> None:
        self._library, self._mapped, self._room = library, mapped, Room()
        self._placed: list[Interleaved | InterleavedExperts] = []

    @property
    def nbytes(self) -> int:
        """Of all that is interleaved."""
        return sum(x.kept for x in self._placed)

    @property
    def pending_bytes(self) -> int:
        """Of what is not, but may be when it is used."""
        return sum(x.nbytes - x.kept for x in self._placed)

    def matrix(self, w: QuantTensor) -> Matrix:
        """The matrix, interleaved where its format is one for that."""
        if w.type not in INTERLEAVED:
            return w
        source = w.unchanged
        placed = Interleaved(w.type, self._blocks([source])[0], w.rows, w.cols, w.changes)
        if self._is_mapped(source):
            placed = replace(placed, later=Later(source.blocks.data_ptr()), source=source)
        else:
            self._write(source, placed.blocks)
        self._placed.append(placed)
        return placed

    def experts(self, w: ExpertTensor) -> OfExperts:
        """The same of a matrix of each expert, or of each head."""
        if w.type not in INTERLEAVED:
            return w
        matrices = [w.of(e) for e in range(w.experts)]
        placed = InterleavedExperts(w.type, self._blocks(matrices), w.rows, w.cols)
        if all(map(self._is_mapped, matrices)):
            later = [Later(x.blocks.data_ptr()) for x in matrices]
            placed = replace(placed, later=later, source=w)
        else:
            for each, blocks in zip(matrices, placed.blocks, strict=True):
                self._write(each, blocks)
        self._placed.append(placed)
        return placed

    def finish(self) -> None:
        """Interleave all that is not yet."""
        for x in self._placed:
            for w in [x] if isinstance(x, Interleaved) else map(x.of, range(x.experts)):
                self._library.kv_keep(weight_table([w]), w.cols)

    def _blocks(self, matrices: Sequence[QuantTensor]) -> torch.Tensor:
        """Room for matrices of one shape and type: uint8 [matrices, groups of rows, bytes of a group]."""
        first = matrices[0]
        groups, group_bytes = -(-first.rows // INTERLEAVED_ROWS), INTERLEAVED_ROWS * first.blocks.shape[1]
        return self._room.take(len(matrices) * groups * group_bytes).view(len(matrices), groups, group_bytes)

    def _write(self, w: QuantTensor, blocks: torch.Tensor) -> None:
        self._library.kv_interleave(weight_table([w]), w.cols, blocks.data_ptr(), False)

    def _is_mapped(self, w: QuantTensor) -> bool:
        return self._mapped(w.blocks.data_ptr(), w.nbytes)
