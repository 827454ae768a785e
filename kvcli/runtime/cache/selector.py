"""`Selector`: what a sequence notes of its queries, and the choice of the rows that stay.

Rows of each layer and KV head are chosen apart, as many everywhere, so that one page list still serves all: those that
stay are moved together into the first pages, each at most once, and keep the keys that RoPE gave them. Nothing else
changes; positions in the text go on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvcli.kernels import MASS_UNIT, Moments, Watch
from kvcli.runtime.cache.pagelist import PageList, Selected
from kvcli.runtime.cache.pagerows import AnglesAt, PageRows
from kvcli.runtime.cache.scoring import ALL, Scored
from kvcli.runtime.cache.selection import Selection

NEVER = 1 << 62
Watches = tuple[tuple[Watch, ...] | None, ...]  # by group, of each of its layers


@dataclass(frozen=True)
class LayerFacts:
    """What scorers need to know of a layer: scale of scores, angles of RoPE (None = there are none)."""

    scale: float
    angles: AnglesAt | None


Facts = Callable[[int], LayerFacts]  # of each model layer


class Selector:
    """Of one sequence. `due`: the length at which rows are selected; NEVER until a prompt is expected.
    `repeated_from`: the first row that repeats the prompt, in a copy of a sequence which is made for that."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self.due, self.times, self.selected_at = NEVER, 0, 0
        self.seen = 0  # all queries before this position were noted, where all are to be
        self.repeated_from: int | None = None
        self._answering = False
        self._mass: dict[int, torch.Tensor] = {}  # by group: int64 [layers, kv_heads, capacity], by the rows' places
        self._moments: dict[int, list[Moments]] = {}
        self._made: tuple[object, Watches] | None = None

    def copy(self) -> Selector:
        """The same for a fork."""
        twin = Selector(self.selection)
        twin.due, twin.times, twin.selected_at, twin.seen = self.due, self.times, self.selected_at, self.seen
        twin._answering = self._answering
        twin._mass = {group: mass.clone() for group, mass in self._mass.items()}
        twin._moments = {group: [replace(each) for each in moments] for group, moments in self._moments.items()}
        return twin

    def expect(self, prompt_tokens: int) -> None:
        """Rows are to be selected when there are so many: a prompt is coming."""
        self.due = NEVER if self.times and self.selection.scorer.repeats else prompt_tokens
        self._answering = False

    def is_due(self, length: int, known: int, ahead: bool) -> bool:
        """Whether rows are to be selected when there are `length`, of `known` tokens. `ahead`: a device computes them
        before they are asked for, but not the last row before that, for what its query gives other rows could not be
        taken back."""
        return known > length >= self.due - 1 if ahead else length >= self.due

    def cut(self, length: int) -> None:
        """Rows behind `length` are gone; what their queries gave others stays, and what was selected unless all are."""
        self.seen = min(self.seen, length)
        if not length:
            self.times = self.selected_at = 0
        with torch.inference_mode():  # in which they were made
            for mass in self._mass.values():
                mass[..., length:] = 0

    @property
    def since(self) -> int:
        """The first query that is to be noted before the next selection."""
        scorer = self.selection.scorer
        if self.repeated_from is not None:
            return self.repeated_from
        if scorer.watches == ALL or (scorer.queries and not self._answering):
            return 0
        return max(0, self.due - scorer.watches)

    def first_noted(self, prompt_tokens: int) -> int:
        """The first query of a prompt of so many tokens that is to be noted; NEVER = none is."""
        scorer = self.selection.scorer
        if scorer.remembers:
            return 0
        return max(0, prompt_tokens - scorer.watches) if scorer.watches else NEVER

    def notes(self, end: int) -> bool:
        """Whether a step up to row `end` has queries to note."""
        scorer = self.selection.scorer
        wants = self._weighs or (scorer.queries and not self._answering)
        return wants and self.due != NEVER and end > self.since

    @property
    def _weighs(self) -> bool:
        """Whether it is noted what rows get of queries."""
        return bool(self.selection.scorer.watches) or self.repeated_from is not None

    def notes_queries(self, end: int) -> bool:
        """Whether a step up to row `end` has queries that are noted themselves, not only what rows get of them."""
        return self.selection.scorer.queries and self.notes(end)

    def watches(self, lists: list[PageList], end: int) -> Watches:
        """What attention notes in a step of rows up to `end`; the same object as long as it stays the same."""
        if not self.notes(end):
            return ()
        scorer, size = self.selection.scorer, self.selection.page_size
        capacity = -(-end // size) * size
        key = self.since, capacity, self.times, self._answering
        if self._made is None or self._made[0] != key:
            made = []
            for number, held in enumerate(lists):
                mass = self._room(number, held, capacity) if self._weighs and held.selects else None
                moments = self._queries(number, held) if scorer.queries and held.selects else None
                layers = range(len(held.layout.layers)) if held.selects else range(0)
                each = [
                    Watch(
                        self.since,
                        None if mass is None else mass[i],
                        None if moments is None else moments[i],
                        self.repeated_from is not None,
                    )
                    for i in layers
                ]
                made.append(tuple(each) or None)
            self._made = key, tuple(made)
        return self._made[1]

    def learn(self, other: Selector) -> None:
        """Have what a copy has noted, which went on from here."""
        self._mass = other._mass

    def restored(self, length: int) -> None:
        """The first `length` rows are there, of which some were selected once."""
        self.times, self.selected_at = 1, length

    def mass(self, length: int) -> torch.Tensor:
        """What rows of a sequence of `length` got of the queries that were noted, where none were selected yet: float64
        [layers, length], the sum over KV heads."""
        noted = torch.cat([mass[..., :length].sum(1) for mass in self._mass.values()])
        return noted.double() / MASS_UNIT

    def _room(self, number: int, held: PageList, capacity: int) -> torch.Tensor:
        there, layout = self._mass.get(number), held.layout
        if there is None or there.shape[-1] < capacity:
            shape = len(layout.layers), layout.kv_heads, capacity
            grown = torch.zeros(shape, dtype=torch.int64, device=held.closed.pool.device)
            if there is not None:
                grown[..., : there.shape[-1]] = there
            self._mass[number] = grown
        return self._mass[number]

    def _queries(self, number: int, held: PageList) -> list[Moments]:
        if number not in self._moments:
            self._moments[number] = [Moments() for _ in held.layout.layers]
        return self._moments[number]

    def noted(self, start: int, end: int) -> None:
        """The rows [start, end) are there."""
        if self.seen >= start and self.notes(end):
            self.seen = max(self.seen, end)

    def select(self, lists: list[PageList], length: int, facts: Facts) -> None:
        """Let go of rows of a sequence of `length`, as its budget says. Raises DoesNotFit, with nothing lost."""
        wanted, size = self.selection.stays(length), self.selection.page_size
        below = length // size * size
        for number, held in enumerate(lists):
            kept = wanted - (length - below)
            if not held.selects or kept >= below - held.evicted:
                continue
            self._select(number, held, length, below, kept, facts)
        self.times, self._answering, self._made = self.times + 1, True, None
        if self.selection.scorer.watches != ALL:
            self._mass.clear()
        self.selected_at = length
        self.due = NEVER if self.selection.scorer.repeats else length + self.selection.pause(min(wanted, length))

    def _select(self, number: int, held: PageList, length: int, below: int, kept: int, facts: Facts) -> None:
        device, mass = held.closed.pool.device, self._mass.get(number)
        places = held.places(length).to(device)
        layers = range(len(held.layout.layers))
        chosen = [self._choose(number, held, i, places, below, kept, length, facts) for i in layers]
        held.own(kept)
        positions = []
        for i, places_kept in enumerate(chosen):
            heads, source, target = _moves(places_kept, kept)
            PageRows(held, i, facts(held.layout.layers[i]).angles).move(heads, source, target)
            now = held.positions(i, torch.arange(kept, device=device).expand(len(places_kept), -1))
            now[heads, target] = held.positions(i, source, heads)
            positions.append(now)
            if mass is not None:
                mass[i, heads, target] = mass[i, heads, source]
                mass[i, :, kept:below] = 0
        held.keep(Selected(kept, below, torch.stack(positions).int()))

    def _choose(
        self, number: int, held: PageList, i: int, places: torch.Tensor, below: int, kept: int, length: int,
        facts: Facts,
    ) -> torch.Tensor:  # fmt: skip
        """The places of the rows of layer `i` that stay, of those in front of position `below`: int64 [kv_heads, kept],
        ascending."""
        known, scorer = facts(held.layout.layers[i]), self.selection.scorer
        rows, mass, moments = PageRows(held, i, known.angles), self._mass.get(number), self._moments.get(number)
        scored = Scored(
            length=length,
            positions=held.positions(i, places.expand(held.layout.kv_heads, -1)),
            mass=None if mass is None else mass[i][:, places].double() / MASS_UNIT,
            queries=moments[i] if moments else None,
            keys=lambda: rows.all(places, False),
            values=lambda: rows.all(places, True),
            scale=known.scale,
            angles=known.angles,
            seed=self.times * 4096 + held.layout.layers[i],
        )
        scores, before = scorer.score(scored).double().clone(), int((places < below).sum())
        first, last = scorer.pinned(kept + len(places) - before)
        scores[:, :first] = scores[:, max(0, len(places) - last) :] = torch.inf
        best = scores[:, :before].sort(dim=1, descending=True, stable=True).indices[:, :kept]
        return places[best.sort(1).values]


def _moves(chosen: torch.Tensor, kept: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of `chosen` places, int64 [kv_heads, kept], that do not stand in the first `kept` places yet, and the free
    ones of these: KV heads, sources and targets, int64 [n] each."""
    stays = torch.zeros(len(chosen), kept + 1, dtype=torch.bool, device=chosen.device)
    stays.scatter_(1, chosen.clamp(max=kept), True)
    heads, free = torch.nonzero(~stays[:, :kept], as_tuple=True)
    return heads, chosen[chosen >= kept], free
