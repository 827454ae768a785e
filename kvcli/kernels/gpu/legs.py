"""How rows of a step carry states on, in lists on the device: so one launch has all of them, and a graph finds other
states when it is replayed."""

# triton.jit functions are compiled, not called: their arguments carry no types
# mypy: disable-error-code="no-untyped-def,misc"

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvcli.kernels.states import Carried

CHUNK = 64  # rows of one sequence that are computed by products, see chunks.py
MOST_LEGS = 8  # of a step that has a graph
NUMBERS = 7  # of a leg: see `Legs`
BEHIND = 3  # which of them is the address of the state behind it
_NUMBERS = tl.constexpr(NUMBERS)


@dataclass(frozen=True, eq=False)
class Legs:
    """Lists of a step of `rows` rows, and the `offset` in bytes of one layer's state in that of all.

    `table` int64 [n, 7], for each leg: rows [lo, hi); the addresses of the state before them (0 = zeros) and of the one
    behind them (0 = it is not kept); the first row of the step that follows a state which is there before the step, and
    the address of that one; the number of the leg's first chunk. `chunks` int64 [m, 2]: rows [lo, hi) of each. What
    is not in use is 0. `apart`: leg i is row i alone, of a sequence of its own.
    """

    rows: int
    table: torch.Tensor
    chunks: torch.Tensor
    offset: int = 0
    apart: bool = False

    @property
    def at_once(self) -> int:
        """How many legs are computed beside each other; in the order of rows those of a sequence have to be."""
        return len(self.table) if self.apart else 1

    @classmethod
    def empty(cls, rows: int, device: torch.device, apart: bool = False) -> Legs:
        """Room for those of a step that has a graph."""
        legs = rows if apart else 1 if rows == 1 else MOST_LEGS
        chunks = rows // CHUNK + legs
        table, cut = (torch.zeros(n, dtype=torch.int64, device=device) for n in (legs * NUMBERS, chunks * 2))
        return cls(rows, table.view(legs, NUMBERS), cut.view(chunks, 2), apart=apart)

    @classmethod
    def of(cls, carried: Sequence[Carried], device: torch.device) -> Legs:
        """Those of one layer, on the device."""
        found = lists(
            (e.lo, e.hi, 0 if e.source is None else e.source.data_ptr(), e.target.data_ptr()) for e in carried
        )
        table, chunks = (torch.from_numpy(x) for x in found)
        if device.type == "cuda":
            table, chunks = table.pin_memory(), chunks.pin_memory()
        return cls(carried[-1].hi, table.to(device, non_blocking=True), chunks.to(device, non_blocking=True))


@dataclass(frozen=True)
class BoundLegs:
    """Instead of `Carried`, in a list of its own: the legs of a step, whose lists are filled before a graph replays."""

    legs: Legs


def lists(legs: Iterable[tuple[int, int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """What `Legs` has of these (lo, hi, address before, address behind)."""
    table, chunks, since, origin, last = list[tuple[int, ...]](), list[tuple[int, int]](), 0, 0, -1
    for lo, hi, source, target in legs:
        if source == 0 or source != last:
            since, origin = lo, source
        table.append((lo, hi, source, target, since, origin, len(chunks)))
        chunks += [(first, min(first + CHUNK, hi)) for first in range(lo, hi, CHUNK)]
        last = target
    return np.array(table, np.int64).reshape(-1, NUMBERS), np.array(chunks, np.int64).reshape(-1, 2)


@triton.jit
def rows_of(table, leg):
    """Rows [lo, hi) of a leg."""
    return tl.load(table + leg * _NUMBERS), tl.load(table + leg * _NUMBERS + 1)


@triton.jit
def ends_of(table, leg):
    """Addresses of the states before and behind it."""
    return tl.load(table + leg * _NUMBERS + 2), tl.load(table + leg * _NUMBERS + 3)


@triton.jit
def start_of(table, leg):
    """The row that its rows go back to, and the address of the state before that."""
    return tl.load(table + leg * _NUMBERS + 4), tl.load(table + leg * _NUMBERS + 5)


@triton.jit
def first_chunk(table, leg):
    return tl.load(table + leg * _NUMBERS + 6)


@triton.jit
def state_at(address, offset):
    """Where the float32 numbers of one layer are in the state at an address."""
    return (address + offset).to(tl.pointer_type(tl.float32))


@triton.jit
def load_state(address, offset, at, there):
    """Those numbers, at places `at` int64; 0 where they are not `there` and, without an address, everywhere."""
    known = (address + tl.zeros_like(at)) != 0
    return tl.load(state_at(address, offset) + at, mask=there & known, other=0.0)
