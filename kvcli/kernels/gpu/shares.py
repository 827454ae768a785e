"""What each program of attention reads, worked out on the host: once a step for all layers of a group, and when
decoding once for all tokens until the list changes.

A program has a *block* of queries, at consecutive positions within one page. What they see of a class of pages, by
queries of one kind, are runs of entries: one that all of them see wholly, of which only addresses are read, and the
rest, in full: those that some do not see, or not all of, with the bounds by which rows are masked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvcli.kernels.gpu.places import words
from kvcli.kernels.paged import Entries

NOTHING, WHOLE, EDGES, OPEN = range(4)  # what a program reads: entries of the table; edges of that class; open ones
EDGE_NUMBERS = 6  # of an edge: its word, `first`, `lo`, `hi`, `since`, `until`
BUSY_BLOCKS = 16  # keep a card busy, with all heads
FAR = (1 << 31) - 1  # positions on the device are 32-bit


class NoRoom(ValueError):
    """Lists that are longer than what was planned for them."""


class Shares(NamedTuple):
    """`work`: int32 [blocks, parts, 4], what each program reads: the kind, 1 = by the turned queries, and entries
    [lo, hi) of the table or of the edges. `edges`: int64 [n, EDGE_NUMBERS]."""

    work: np.ndarray
    edges: np.ndarray

    def spread(self, parts: int) -> Shares:
        """What each block reads, by so many programs: entries that are seen wholly are shared out."""
        spare = parts - self.work.shape[1]
        if spare >= 0 and len(self.work) >= BUSY_BLOCKS:  # they are programs enough
            return self.padded(parts)
        return self._replace(work=np.array([_spread(work, parts) for work in self.work]))

    def padded(self, parts: int) -> Shares:
        """What each block reads, by so many programs, as it stands: a query's sums do not depend on how many there
        are."""
        spare = parts - self.work.shape[1]
        if spare < 0:
            raise NoRoom(f"{parts} programs are too few for {self.work.shape[1]} parts")
        work = np.zeros((len(self.work), parts, 4), np.int32)
        work[:, : self.work.shape[1]] = self.work
        return self._replace(work=work)

    def without_past(self, least: int, parts: np.ndarray | None = None) -> tuple[Shares, list[tuple[int, int]]]:
        """What is left where entries [lo, hi) of the table, which all blocks see wholly by the ordinary queries, are
        read otherwise, and those, if there are `least` or more; else (0, 0). The last part of each block is then for
        that. `parts`, int64 [blocks], ascending from 0: blocks of one number have their own [lo, hi)."""
        kind, turned, first, end = (self.work[..., i] for i in range(4))
        runs = (kind == WHOLE) & (turned == 0)
        starts = np.flatnonzero(np.diff(parts, prepend=-1)) if parts is not None else np.zeros(1, np.int64)
        lo = np.maximum.reduceat(np.where(runs, first, 0).max(1), starts)
        hi = np.minimum.reduceat(np.where(runs, end, 0).max(1), starts)
        enough = hi - lo >= max(least, 1)
        lo, hi = np.where(enough, lo, 0), np.where(enough, hi, 0)
        found = list(zip(lo.tolist(), hi.tolist(), strict=True))
        if not enough.any():
            return self, found
        of = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(self.work)))
        before, behind_it = lo[of][:, None], hi[of][:, None]
        cut = self.work.copy()
        cut[..., 3] = np.where(runs, np.minimum(end, before), end)
        behind = np.where(runs[..., None], self.work, 0)
        behind[..., 2] = np.where(runs, np.maximum(first, behind_it), 0)
        none = ~enough[of]
        cut[none], behind[none] = self.work[none], 0
        room = np.zeros_like(self.work[:, :1])
        return self._replace(work=np.concatenate((_packed(np.concatenate((cut, behind), 1)), room), 1)), found

    def choosing(self, summaries: np.ndarray, pages: int) -> tuple[Shares, tuple[int, int, int]]:
        """What is left of one query's work where it reads the `pages` best of the entries with a summary, and all
        others: its run of the table is then as long as what it reads. The run itself, too, entries [lo, hi), and how
        many of them are read."""
        work, runs = self.work.copy(), (self.work[0, :, 0] == WHOLE) & (self.work[0, :, 1] == 0)
        if not runs.any():
            return self, (0, 0, 0)
        at = int(runs.argmax())
        lo, hi = work[0, at, 2:].tolist()
        count = min(hi - lo, pages + int((summaries[lo:hi] == 0).sum()))
        work[0, at, 2:] = 0, count
        return self._replace(work=work), (lo, hi, count)


def _spread(work: np.ndarray, parts: int) -> np.ndarray:
    """`Shares.spread` of one block: int32 [parts, 4]."""
    read, found = pieces(shared_out(work.tolist(), parts)), np.zeros((parts, 4), np.int32)
    found[: len(read)] = read
    return found


def shared_out(work: Iterable[list[int]], parts: int) -> list[list[int]]:
    """What one block reads, by so many programs or fewer: runs last, and behind the four numbers of each part how many
    entries a program has of it."""
    read = [part for part in work if part[0] != NOTHING]
    runs, others = [x for x in read if x[0] == WHOLE], [x for x in read if x[0] != WHOLE]
    free, left = parts - len(others), sum(hi - lo for *_, lo, hi in runs)
    if free < len(runs):
        raise NoRoom(f"{parts} programs are too few for {len(runs) + len(others)} parts")
    found = [[kind, turned, lo, hi, hi - lo] for kind, turned, lo, hi in others]
    for i, (kind, turned, lo, hi) in enumerate(runs):
        mine = min(-(-free * (hi - lo) // left), free - (len(runs) - 1 - i))
        free, left = free - mine, left - (hi - lo)
        found.append([kind, turned, lo, hi, -(-(hi - lo) // mine)])
    return found


def pieces(shared: list[list[int]]) -> np.ndarray:
    """What each program reads of parts that were `shared_out`, of one block or of several: int64 [n, 4], or more where
    more is told of each part before its last number."""
    parts = np.array(shared or np.zeros((0, 5)), np.int64)
    lo, hi, each = parts[:, 2], parts[:, 3], parts[:, -1]
    programs = (hi - lo + each - 1) // each
    ends = programs.cumsum()
    found = parts.repeat(programs, 0)
    found[:, 2] += (np.arange(len(found)) - (ends - programs).repeat(programs)) * found[:, -1]
    found[:, 3] = np.minimum(found[:, 2] + found[:, -1], found[:, 3])
    return found[:, :-1]


class Class(NamedTuple):
    """A class of pages: the numbers that its entries have as edges, int64 [EDGE_NUMBERS, n], and which are scored by
    the turned queries, [n]. Turned ones come first, and parts of pages last, so that what can be seen wholly stands in
    one piece. `summaries`: see `kernels.paged`; int64 [n], 0 = there is none."""

    numbers: np.ndarray
    turned: np.ndarray
    summaries: np.ndarray

    @classmethod
    def of(cls, entries: Entries, size: int, slots: np.ndarray | None) -> Class:
        """Pages have `size` rows. `slots`: see `places.words`."""
        e = entries
        numbers = words(e.addresses, slots), e.first, e.lo, e.hi, e.since, np.minimum(e.until, FAR)
        summaries = e.summaries.addresses if e.summaries else np.zeros(len(e), np.int64)
        found, cut = cls(np.array(numbers), e.turned, summaries), e.hi - e.lo < size
        if not cut.any() and not e.any_turned:
            return found
        order = np.lexsort((-e.turned, cut))
        return cls(found.numbers[:, order], found.turned[order], summaries[order])

    @property
    def words(self) -> np.ndarray:
        """The table: int64 [n]."""
        return self.numbers[0]

    @property
    def edges(self) -> np.ndarray:
        """All of its entries: int64 [n, EDGE_NUMBERS]."""
        return self.numbers.T.copy()

    def beside(self, other: Class) -> Class:
        """These entries, and those of another class behind them."""
        return Class(*(np.concatenate(pair, -1) for pair in zip(self, other, strict=True)))

    def edged(self, size: int, window: int) -> bool:
        """Whether there are queries that see some but not all of an entry, or blocks of which some do not see it."""
        _, first, lo, hi, since, until = self.numbers
        steady = (hi - lo == size) & (since >= first + size) & (since % size == 0) & (until == FAR)
        return bool(window or not steady.all())


def shares(table: Class, opened: Class | None, firsts: np.ndarray, lasts: np.ndarray, window: int, size: int) -> Shares:
    """For blocks of queries at positions firsts .. lasts, int64 [blocks], over pages of `size` rows.

    `table`: the sealed pages, or the only ones, whose edges are read like open ones. A block has at most three parts of
    each kind of queries, two where nothing is sealed: those of open pages that are seen wholly stand apart from others
    unless the table has edges.
    """
    of = table if opened is None else table.beside(opened)
    n, sealed = len(of.turned), len(table.turned)
    at = np.arange(n)
    is_open, kinds = at >= sealed, (OPEN, WHOLE) if opened is None else (OPEN, OPEN, EDGES, WHOLE)
    columns, picked = [], []
    for turned in (0, 1) if of.turned.any() else (0,):
        some, whole = _seen(of, turned, firsts, lasts, window, size)
        lo, hi = _longest_run(whole[:, :sealed])
        others = some & ((at < lo[:, None]) | (at >= hi[:, None]))
        rest, apart = others & ~is_open, whole & is_open
        apart &= ~rest.any(1, keepdims=True)
        picked.append((rest,) if opened is None else (others & is_open & ~apart, apart, rest))
        columns.append((turned, lo, hi))
    edges = np.flatnonzero(picked)  # of [turned, kinds but the last one, blocks, n]
    shape = len(columns), len(kinds) - 1, len(firsts)
    counts = np.bincount(edges // n, minlength=math.prod(shape)).reshape(shape)
    ends = counts.cumsum().reshape(shape)
    work = np.empty((len(firsts), len(columns), len(kinds), 4), np.int32)
    for i, (turned, lo, hi) in enumerate(columns):
        work[:, i, :, 0], work[:, i, :, 1] = kinds, turned
        work[:, i, :-1, 2], work[:, i, :-1, 3] = (ends[i] - counts[i]).T, ends[i].T
        work[:, i, -1, 2], work[:, i, -1, 3] = lo, hi
    return Shares(_packed(work.reshape(len(firsts), -1, 4)), of.numbers[:, edges % n].T)


def _packed(work: np.ndarray) -> np.ndarray:
    """Without parts that no block has, and those of each block first."""
    nothing = work[..., 2] >= work[..., 3]
    work[nothing] = 0
    most = max(1, work.shape[1] - int(nothing.sum(1).min()))
    return work[np.arange(len(work))[:, None], nothing.argsort(1, kind="stable")[:, :most]]


def next_change(classes: Iterable[Entries], position: int) -> int:
    """The first position behind `position` at which other entries are seen."""
    ends = np.concatenate([ends for each in classes for ends in (each.since, each.until)])
    return int(ends[ends > position].min(initial=FAR))


def _seen(
    of: Class, turned: int, firsts: np.ndarray, lasts: np.ndarray, window: int, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Which entries of that kind some query of each block sees rows of, and which are a page of which all see every
    row: bool [blocks, n] each."""
    _, first, lo, hi, since, until = of.numbers
    oldest, newest, a, b = first + lo, first + hi - 1, firsts[:, None], lasts[:, None]
    mine, end, end_of_whole = (of.turned == turned) & (lo < hi), until, until
    if window:
        end, end_of_whole = np.minimum(until, newest + window), np.minimum(until, oldest + window)
    some = mine & (np.maximum(np.maximum(since, oldest), a) < np.minimum(end, b + 1))
    return some, mine & (hi - lo == size) & (np.maximum(since, newest) <= a) & (b < end_of_whole)


def _longest_run(flags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[lo, hi) of the longest run of each row of bool [blocks, n]: int64 [blocks] each."""
    at = np.arange(flags.shape[1])
    length = at - np.maximum.accumulate(np.where(flags, -1, at), 1)
    if not len(at):
        none = np.zeros(len(flags), np.int64)
        return none, none
    end = length.argmax(1)
    return end + 1 - length[np.arange(len(flags)), end], end + 1
