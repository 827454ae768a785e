"""What the programs of a launch do to each other, in Triton's interpreter: it runs them one after the other, and a GPU
in any order and beside each other.

`reorder` has them run in another order. `watched` notes what each program reads and writes, and fails a launch in which
one reads or writes what another one writes, unless both meet at an atomic operation in between, or in which an address
is none of a tensor's.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from triton.runtime import interpreter

ORDERS = ("shuffled", "reversed", "ordered")


def reorder(how: str) -> None:
    """Have the programs of every launch run in that order of ORDERS, in this process."""
    builder, grids, order = interpreter.interpreter_builder, [(1, 1, 1)], list[int]()
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx

    def begin(*grid: int) -> None:
        set_dim(*grid)
        grids[0], order[:] = grid, range(math.prod(grid))
        if how == "shuffled":
            random.Random(len(order)).shuffle(order)
        if how != "reversed":
            order.reverse()  # the last one is the next

    def place(*_: int) -> None:
        i, (_x, y, z) = order.pop(), grids[0]
        set_idx(i // (y * z), i // z % y, i % z)

    builder.set_grid_dim, builder.set_grid_idx = begin, place


class Accesses(NamedTuple):
    """Addresses int64 [n], the programs [n] that had them, and whether each was behind its program's atomic operation,
    bool [n]; `met`: int64 [n], the address of that, 0 = there is none."""

    at: np.ndarray
    program: np.ndarray
    behind: np.ndarray
    met: np.ndarray

    @classmethod
    def of(cls, each: list[tuple[np.ndarray, int, bool]], met: dict[int, int]) -> Accesses:
        """Of (addresses, program, behind)."""
        sizes = [len(at) for at, _, _ in each]
        columns = ([program for _, program, _ in each], [late for _, _, late in each],
                   [met.get(program, 0) for _, program, _ in each])  # fmt: skip
        first, *others = (np.repeat(np.array(column, np.int64), sizes) for column in columns)
        at = np.concatenate([np.zeros(0, np.int64), *(at for at, _, _ in each)])
        return cls(at, first, others[0].astype(bool), others[1])

    def where(self, which: np.ndarray) -> Accesses:
        return Accesses(*(x[which] for x in self))


class Launch:
    """The accesses of one launch."""

    def __init__(self) -> None:
        self.program = -1
        self.reads: list[tuple[np.ndarray, int, bool]] = []
        self.writes: list[tuple[np.ndarray, int, bool]] = []
        self.sums: list[tuple[np.ndarray, int, bool]] = []
        self.met: dict[int, int] = {}  # by program

    def note(self, to: list[tuple[np.ndarray, int, bool]], at: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Elements of `size` bytes, where the mask says so."""
        first = np.unique(np.broadcast_to(at, mask.shape)[mask].astype(np.int64))
        each = (first[:, None] + np.arange(size)).reshape(-1)
        to.append((each, self.program, self.program in self.met))

    def meet(self, at: np.ndarray) -> None:
        """An atomic operation that orders what is before it and what is behind it."""
        self.met[self.program] = int(at.reshape(-1)[0])

    def faults(self, tensors: Ranges) -> str:
        """What depends on the order of programs, or is outside of all tensors; "" = nothing."""
        reads, writes, sums = (Accesses.of(each, self.met) for each in (self.reads, self.writes, self.sums))
        changed = _unordered(reads, writes) + _unordered(reads, sums)
        counts = {"read by one program and changed by another": changed}
        counts["changed by several"] = _unordered(writes, writes) + _unordered(sums, writes)
        at = np.unique(np.concatenate((reads.at, writes.at, sums.at)))
        counts["in no tensor"] = int((~tensors.have(at)).sum())
        return "; ".join(f"{n} bytes are {what}" for what, n in counts.items() if n)


def _unordered(some: Accesses, writes: Accesses) -> int:
    """How many of the accesses are to what another program writes, and not ordered by what both meet at."""
    if not len(writes.at):
        return 0
    writes = writes.where(np.lexsort((writes.program, writes.at)))
    count, step = 0, np.ones(len(some.at), bool)
    place, end = (np.searchsorted(writes.at, some.at, side) for side in ("left", "right"))
    while (step := place < end).any():
        mine, theirs = some.where(step), writes.where(place[step])
        met = (mine.met == theirs.met) & (mine.met != 0) & (mine.behind != theirs.behind)
        count += int(((mine.program != theirs.program) & ~met).sum())
        place = place + 1
    return count


class Ranges:
    """Where tensors are in memory."""

    def __init__(self) -> None:
        self.known = np.zeros((0, 2), np.int64)

    def have(self, at: np.ndarray) -> np.ndarray:
        """Whether ascending addresses are of a tensor."""
        if (found := self._inside(at)).all():
            return found
        tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device.type == "cpu"]
        self.add(tensors)
        return self._inside(at)

    def add(self, tensors: list[torch.Tensor]) -> None:
        """Nothing else is known behind it."""
        storages = [x.untyped_storage() for x in tensors if x.layout == torch.strided]
        found = np.array([(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages], np.int64).reshape(-1, 2)
        found = np.unique(found, axis=0)
        self.known = np.stack((found[:, 0], np.maximum.accumulate(found[:, 1])), 1)

    def _inside(self, at: np.ndarray) -> np.ndarray:
        place = np.searchsorted(self.known[:, 0], at, "right") - 1
        ends = self.known[np.maximum(place, 0), 1] if len(self.known) else np.zeros(len(at), np.int64)
        return (place >= 0) & (at < ends)


class Noting:
    """Triton's memory operations, which note what they do in `launch`."""

    def __init__(self, real: Any) -> None:
        self._real, self.launch = real, Launch()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def load(self, at: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: Any) -> Any:
        self.launch.note(self.launch.reads, at, mask, np.dtype(dtype).itemsize)
        return self._real.load(at, mask, other, dtype)

    def store(self, at: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        self.launch.note(self.launch.writes, at, mask, value.dtype.itemsize)
        return self._real.store(at, value, mask)

    def atomic_rmw(self, op: Any, at: np.ndarray, value: np.ndarray, mask: np.ndarray, sem: Any) -> Any:
        self.launch.note(self.launch.sums, at, mask, value.dtype.itemsize)
        if sem == self._real.MEM_SEMANTIC.ACQUIRE_RELEASE and at.size == 1:
            self.launch.meet(at)
        return self._real.atomic_rmw(op, at, value, mask, sem)


@contextmanager
def watched() -> Iterator[None]:
    """Inside, every launch fails in which programs depend on their order."""
    noting, builder, real = Noting(interpreter._interpreter), interpreter.interpreter_builder, interpreter._interpreter
    set_idx, call, ranges = builder.set_grid_idx, interpreter.GridExecutor.__call__, Ranges()

    def place(*index: int) -> None:
        noting.launch.program += 1
        set_idx(*index)

    def launched(self: Any, *arguments: Any, **more: Any) -> None:
        noting.launch = Launch()
        call(self, *arguments, **more)
        ranges.add([x for x in (*arguments, *more.values()) if isinstance(x, torch.Tensor)])
        faults = noting.launch.faults(ranges)
        assert not faults, f"{self.fn.__name__}: {faults}"

    interpreter._interpreter, builder.set_grid_idx, interpreter.GridExecutor.__call__ = noting, place, launched
    try:
        yield
    finally:
        interpreter._interpreter, builder.set_grid_idx, interpreter.GridExecutor.__call__ = real, set_idx, call
