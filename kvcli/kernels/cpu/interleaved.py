"""Weights of which 16 rows lie side by side, for products with rows in fixed point (see cpu_interleave.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvcli.kernels.reference.experts import ExpertTensor
from kvcli.kernels.reference.matmul import LowRank, QuantTensor

KEPT = 3  # a state of `Later`: the blocks are there


class Later(ctypes.Structure):
    """kv_later: where a file has the blocks of a matrix that is interleaved when it is used, and how far that is; see
    cpu_interleave.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("source", "state")]


@dataclass(frozen=True)
class Interleaved:
    """A weight matrix [rows, cols] of GGML type `type`: `blocks` uint8 [ceil(rows / 16), 16 * row bytes].

    `changes`: see `QuantTensor`. With `later` the blocks are made of `source` when they are used.
    """

    type: str
    blocks: torch.Tensor
    rows: int
    cols: int
    changes: tuple[LowRank, ...] = ()
    later: Later | None = None
    source: QuantTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    @property
    def kept(self) -> int:
        """Bytes of blocks that are there."""
        return self.nbytes if self.later is None or self.later.state == KEPT else 0

    @property
    def unchanged(self) -> Interleaved:
        """Without its changes."""
        return replace(self, changes=()) if self.changes else self


@dataclass(frozen=True)
class InterleavedExperts:
    """A matrix [rows, cols] of each expert: `blocks` uint8 [experts, ceil(rows / 16), 16 * row bytes].

    `later`: an entry for each expert whose blocks are made of `source` when they are used; else empty.
    """

    type: str
    blocks: torch.Tensor
    rows: int
    cols: int
    later: Sequence[Later] = ()
    source: ExpertTensor | None = None

    @property
    def experts(self) -> int:
        return len(self.blocks)

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    @property
    def kept(self) -> int:
        """Bytes of blocks that are there."""
        each = self.nbytes // self.experts
        return each * sum(x.state == KEPT for x in self.later) if self.later else self.nbytes

    def of(self, expert: int) -> Interleaved:
        found = Interleaved(self.type, self.blocks[expert], self.rows, self.cols)
        if self.source is None:
            return found
        return replace(found, later=self.later[expert], source=self.source.of(expert))


@dataclass(frozen=True)
class PlacedExperts:
    """As `ExpertMatrices`, some or all parts interleaved."""

    parts: tuple[ExpertTensor | InterleavedExperts, ...]
    bias: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return self.parts[0].experts
