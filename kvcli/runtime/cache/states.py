"""`States`: the live state of a sequence and its checkpoints, for layers that keep a state instead of rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from kvcli.kernels import Carried
from kvcli.runtime.cache.journal import Inputs, Journal
from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.statelayout import CHECKPOINT_ROWS

LIVE = -1  # beside numbers of checkpoints


@dataclass
class StateStep:
    """How the rows of a step carry the state: `legs` (rows up to, page that has the state before them or None, page
    that gets the one behind them), pages as uint8 [layers, layer_bytes], and None = zeros. `begun`: kernels were asked
    to compute it, so that a state that is changed in place is no longer the one before it. `inputs`: what each layer
    computes the rows from; None = that need not be kept."""

    legs: list[tuple[int, torch.Tensor | None, torch.Tensor]]
    begun: bool = False
    inputs: Inputs | None = None
    made: dict[int, int] = field(default_factory=dict)  # pages of checkpoints that it makes, by number
    target: int = LIVE
    fresh: int | None = None  # a page for the live state that takes the place of the one that others hold, too

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same of two steps that read and write the same memory."""
        return tuple((None if a is None else a.data_ptr(), b.data_ptr()) for _, a, b in self.legs)

    def addresses(self) -> Iterator[tuple[int, int, int, int]]:
        """See `Part.legs`."""
        start = 0
        for rows, source, target in self.legs:
            yield start, rows, 0 if source is None else source.data_ptr(), target.data_ptr()
            start = rows

    def carried(self, index: int, lo: int) -> list[Carried]:
        """The same for the layer of that index, with rows counted from row `lo` of the whole step on."""
        found, start = list[Carried](), lo
        for rows, source, target in self.legs:
            state = None if source is None else source[index].view(torch.float32)
            found.append(Carried(start, lo + rows, state, target[index].view(torch.float32)))
            start = lo + rows
        return found


class States:
    """Which pages have the states of one sequence.

    A step makes checkpoints at ends of pages: behind every CHECKPOINT_ROWS rows, where `wanted` says so, and at its
    last ones. Of these the newest two stay, and those of the ends of prompts and answers: where rows of a prompt follow
    tokens that came one by one, or the other way round. Where there is no room for a checkpoint, there is none.

    Rows of guesses are taken back one by one: see `Journal`.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        assert pool.layout.state_arenas is not None
        self.live_arena, self.arena = pool.layout.state_arenas
        self.layout = pool.layout.states[1]
        self.kept: dict[int, int] = {}  # checkpoints by number, the lowest first
        self.wanted: frozenset[int] = frozenset()  # rows behind which there are to be checkpoints
        self._live: int | None = None  # the page that steps write to
        self._now: int | None = (
            None  # where the state behind the last row is: LIVE, or a checkpoint; None = no rows yet
        )
        self._ends: set[int] = set()  # checkpoints at the ends of prompts and answers
        self._one_by_one: bool | None = None  # how the last rows came
        self._step: StateStep | None = None
        self._journal = Journal(pool)

    @property
    def lost(self) -> bool:
        """Whether the live state was changed by a step that did not come to its end."""
        step = self._step
        return step is not None and step.begun and self._now == LIVE and step.target == LIVE and step.fresh is None

    def rewindable(self, length: int, now: int) -> Iterator[int]:
        """Lengths up to `length` that can be gone back to, the longest first; `now` is the present one."""
        if (length == now and not self.lost) or self._journal.has(length, now):
            yield length
        size = self.layout.page_size
        for number in sorted(self.kept, reverse=True):
            if (number + 1) * size <= length:
                yield (number + 1) * size
        yield 0

    def steady(self, length: int) -> bool:
        """Whether row `length`, alone, is to change the live state in place and leave nothing else: then it need not be
        reserved."""
        alone = self._live is not None and self.pool.refcount(self.live_arena, self._live) == 1
        return self._step is None and self._now == LIVE and alone and not self._cuts(length, length + 1)

    def can_guess(self) -> bool:
        """Whether there is room for the state before guesses, which is taken for them."""
        if self._journal.room is None:
            self._journal.room = self._spare()
        return self._journal.room is not None

    def reserve(self, start: int, end: int, certain: int | None = None) -> StateStep:
        """Pages for a step of rows [start, end). `certain`: those behind so many may be taken back, for which
        `can_guess` made room. Raises DoesNotFit, and ValueError where the state is `lost`."""
        if self.lost:
            raise ValueError("the state of a step that failed is lost: go back to a checkpoint first")
        self.release_step()
        size, pool, guessed = self.layout.page_size, self.pool, self._journals(start, end, certain)
        if (alone := guessed or end - start == 1) != self._one_by_one:
            self._ends.update(sorted(self.kept)[-2:])
            self._one_by_one = alone
        step = self._step = StateStep([], inputs={} if guessed else None)
        for at in self._cuts(start, end):
            if (page := self._spare()) is not None:
                step.made[at // size - 1] = page
        step.target = end // size - 1 if end % size == 0 and end // size - 1 in step.made else LIVE
        if step.target == LIVE:
            if self._live is None:
                self._live = pool.take(self.live_arena)
            elif pool.refcount(self.live_arena, self._live) > 1:  # a fork has it, too
                step.fresh = pool.take(self.live_arena)
        source = self._page(self._now)
        for number, page in step.made.items():
            state = pool.page(self.arena, page)
            step.legs.append(((number + 1) * size - start, source, state))
            source = state
        if step.target == LIVE:
            live = self._live if step.fresh is None else step.fresh
            assert live is not None
            step.legs.append((end - start, source, pool.page(self.live_arena, live)))
        return step

    def _journals(self, start: int, end: int, certain: int | None) -> bool:
        """Whether these rows may be taken back; begins with that."""
        journal = self._journal
        if certain is None or journal.room is None or self._cuts(start, end):
            journal.stop()
            return False
        if certain == start:
            journal.begin(start, self._page(self._now))
        return journal.goes_on(certain, start)

    def _page(self, which: int | None) -> torch.Tensor | None:
        """The memory of a state; None = zeros."""
        if which is None:
            return None
        if which == LIVE:
            assert self._live is not None
            return self.pool.page(self.live_arena, self._live)
        return self.pool.page(self.arena, self.kept[which])

    def _cuts(self, start: int, end: int) -> list[int]:
        """Rows behind which a step of rows [start, end) is to leave checkpoints."""
        size = max(self.layout.page_size, self.pool.layout.grain)
        last = {end // size * size, (end - 1) // size * size} if end - start > 1 else {end // size * size}
        regular = range(start // CHECKPOINT_ROWS * CHECKPOINT_ROWS, end + 1, CHECKPOINT_ROWS)
        found = last.union(regular, (at for at in self.wanted if at % size == 0))
        return sorted(at for at in found if start < at <= end)

    def _spare(self) -> int | None:
        """A page for a checkpoint, if need be that of the one that is missed least; None where there is no room."""
        while (page := self.pool.take_spare(self.arena)) is None:
            numbers = sorted(self.kept)
            gone = [n for n in numbers[:-1] if n != self._now]
            if not gone:
                return None
            before = dict(zip(numbers, [-1, *numbers], strict=False))
            behind = dict(itertools.pairwise(numbers))
            self._drop(min(gone, key=lambda n: behind[n] - before[n]))
        return page

    def commit(self) -> None:
        """The rows of the last step are computed."""
        step, self._step = self._step, None
        if step is None:
            return
        if step.fresh is not None:
            assert self._live is not None
            self.pool.release(self.live_arena, self._live)
            self._live = step.fresh
        for number, page in step.made.items():
            if number in self.kept:
                self.pool.release(self.arena, self.kept.pop(number))
            self.kept[number] = page
        self._now = step.target
        if step.inputs is not None:
            self._journal.add(step.inputs, step.legs[-1][0])
        size = self.layout.page_size
        passing = [n for n in sorted(self.kept)[:-2] if n not in self._ends]
        for number in passing:
            if (number + 1) * size % CHECKPOINT_ROWS and (number + 1) * size not in self.wanted:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self.pool.release(self.arena, self.kept.pop(number))
        self._ends.discard(number)

    def release_step(self) -> None:
        """Let go of what was taken for a step that was not committed. A state that was changed stays `lost`."""
        step = self._step
        if step is None:
            return
        for page in step.made.values():
            self.pool.release(self.arena, page)
        step.made = {}
        if step.fresh is not None:
            self.pool.release(self.live_arena, step.fresh)
            step.fresh, step.begun = None, False
        if not self.lost:
            self._step = None

    def rewind(self, length: int, now: int) -> None:
        """Go back to the state behind the first `length` rows, one of `rewindable`; `now` is the present length."""
        if length == now and not self.lost:
            return
        if self._journal.has(length, now):
            self._take_back(length)
            return
        self._forget_step()
        self._journal.stop()
        number = self.layout.checkpoint(length)
        for behind in [n for n in self.kept if number is None or n > number]:
            self._drop(behind)
        self._now, self._one_by_one = number, None

    def settle(self) -> None:
        """The rows that are there stay."""
        if self._step is None:
            self._journal.stop()

    def _take_back(self, length: int) -> None:
        """Have the state behind `length` rows again, of which the journal has those that are computed anew. Raises
        DoesNotFit, with nothing changed."""
        assert self._live is not None
        self.release_step()
        if self.pool.refcount(self.live_arena, self._live) > 1:  # a fork goes on with all rows
            own = self.pool.take(self.live_arena)
            self.pool.release(self.live_arena, self._live)
            self._live = own
        self._step = None
        self._journal.restore(length, self.pool.page(self.live_arena, self._live))
        self._now = LIVE

    def _forget_step(self) -> None:
        self.release_step()
        self._step = None

    def clear(self) -> None:
        """Let go of everything."""
        self.rewind(0, -1)
        self._journal.stop()
        if self._live is not None:
            self.pool.release(self.live_arena, self._live)
            self._live = None

    def adopt(self, pages: Mapping[PageKey, int], length: int) -> None:
        """Have the checkpoints among these pages, whose holders this counts with; the state is that behind `length`
        rows."""
        self.kept = {number: page for (arena, number), page in sorted(pages.items()) if arena == self.arena}
        self._ends, self._now = set(self.kept), self.layout.checkpoint(length)

    def share(self, other: States) -> None:
        """Have the live state of another sequence of the same rows, whose checkpoints were adopted."""
        self._now, self._one_by_one, self.wanted = other._now, other._one_by_one, other.wanted
        self._ends = set(other._ends)
        if self._now == LIVE:
            assert other._live is not None
            self.pool.retain(self.live_arena, other._live)
            self._live = other._live

    def numbered(self) -> Iterable[tuple[PageKey, int]]:
        """The checkpoints, by their keys."""
        return (((self.arena, number), page) for number, page in self.kept.items())

    def others(self) -> Iterator[tuple[int, int]]:
        """(arena, page) of every other reference."""
        if self._live is not None:
            yield self.live_arena, self._live
        if self._journal.room is not None:
            yield self.arena, self._journal.room
        if self._step is not None:
            if self._step.fresh is not None:
                yield self.live_arena, self._step.fresh
            for page in self._step.made.values():
                yield self.arena, page


def states_of(pool: PagePool) -> States | None:
    """Those of a new sequence; None where no layer has any."""
    return States(pool) if pool.layout.state_arenas else None
