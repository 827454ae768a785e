"""`Sequence`: the tokens of one context and their pages. `Part`: rows of one that a step computes. `Step`: one pass."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvcli.errors import DoesNotFit
from kvcli.kernels import Basis, Carried, PagedKV, Stretch, Watch
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.attending import PageChoice
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.journal import Again
from kvcli.runtime.cache.layout import GroupLayout, PageKey
from kvcli.runtime.cache.pagelist import Bases, Layers, PageList, Selected
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.selector import Facts, Selector
from kvcli.runtime.cache.states import StateStep, states_of
from kvcli.runtime.config import LATENT


@dataclass(frozen=True)
class Part:
    """Rows [start, start + T) of a sequence, ready for a model: ids int64 [T], on the host, and every layer's cache."""

    ids: torch.Tensor
    start: int
    groups: tuple[Layers, ...]  # by group
    slots: tuple[tuple[int, int] | None, ...]
    watches: tuple[tuple[Watch, ...] | None, ...] = ()  # by group, of its layers: what is noted of these rows' queries
    states: StateStep | None = None

    def carried(self, index: int, lo: int) -> list[Carried]:
        """How the rows, those from row `lo` of a step on, carry the state of a layer, by its index among those with
        one. They are about to be computed, and states are changed in place."""
        if self.states is None:
            raise ValueError("no layer has a state")
        self.states.begun = True
        return self.states.carried(index, lo)

    def keep(self, index: int, again: Again, rows: torch.Tensor) -> None:
        """What that layer computes these rows from, in case some are taken back, and how it goes on."""
        if self.states is not None and self.states.inputs is not None:
            self.states.inputs[index] = again, rows

    def legs(self) -> Iterator[tuple[int, int, int, int]]:
        """The same for all layers at once: rows [lo, hi) of the part, and the addresses of the states before them, 0 =
        zeros, and behind them, as pages have them."""
        if self.states is None:
            raise ValueError("no layer has a state")
        self.states.begun = True
        return self.states.addresses()

    @property
    def chooses(self) -> bool:
        """Whether its queries leave out pages that they could see."""
        return any(layers[0].choice is not None for layers in self.groups)

    def kv(self, layer: int) -> PagedKV:
        """The cache of one model layer."""
        group, index = self._slot(layer)
        return self.groups[group][index]

    def stretch(self, layer: int, lo: int, hi: int) -> Stretch:
        """The rows as `ops.attend` wants them in that layer: rows [lo, hi) of a step."""
        group, index = self._slot(layer)
        watches = self.watches[group] if self.watches else None
        watch = watches[index] if watches else None
        return Stretch(lo, hi, self.groups[group][index], self.start, self.shifts[group], watch)

    @cached_property
    def shifts(self) -> tuple[np.ndarray | None, ...]:
        """See `PagedKV.shift`; by group."""
        return tuple(layers[0].shift(self.start, len(self.ids)) for layers in self.groups)

    def _slot(self, layer: int) -> tuple[int, int]:
        slot = self.slots[layer]
        if slot is None:
            raise ValueError(f"layer {layer} keeps no rows")
        return slot

    @property
    def end(self) -> int:
        """The position behind the last row."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class Step:
    """One forward pass: parts of different sequences, one after the other. What has no look at the cache is computed
    for all their rows at once."""

    parts: tuple[Part, ...]

    @cached_property
    def ids(self) -> torch.Tensor:
        """int64 [T], of all parts."""
        return self.parts[0].ids if len(self.parts) == 1 else torch.cat([part.ids for part in self.parts])

    @cached_property
    def rows(self) -> tuple[tuple[tuple[int, int], Part], ...]:
        """Each part, with its rows [lo, hi) among those of the step."""
        ends = tuple(itertools.accumulate(len(part.ids) for part in self.parts))
        return tuple(((end - len(part.ids), end), part) for part, end in zip(self.parts, ends, strict=True))


def chunk_end(start: int, end: int, ubatch: int, page_size: int) -> int:
    """Where a prefill step that begins with row `start`, of rows up to `end`, ends: it has at most `ubatch` rows, and
    reaches into no more pages than so many need."""
    return min(end, start + ubatch, (start // page_size + -(-ubatch // page_size)) * page_size)


class Sequence:
    """Token ids whose rows are in the cache, and one page list per layer group.

    `reserve` -> run the model -> `commit` appends rows; `rewind` takes rows back; `fork` shares all pages, and a
    shared page is copied before it is written to. Pages that no later query sees are let go of: those behind a sliding
    window, and evicted ones. A token's position is its index in `tokens`, whatever was evicted before it. `selector`:
    chooses rows by score, where the pool's layout says so; `select` has it do that.
    """

    def __init__(self, pool: PagePool, retention: Retention | None = None) -> None:
        """`retention`: what stays of this sequence, where that is not what the pool's layout says."""
        self.pool, self._own = pool, retention
        self.tokens: list[int] = []
        self.foreign = 0  # of its first rows, those that this engine would not compute so: converted, or from elsewhere
        self.moved: int | None = None  # from that row on some were computed elsewhere; None = none were
        self.exact: int | None = None  # how many first rows saw all that was there; None = all rows did
        self.certain: int | None = None  # rows behind it may be taken back: what would be needed then stays
        self._chose = False  # whether the step that is on its way does not
        self._lists = [PageList(pool, g, retention) for g in range(len(pool.layout.groups))]
        selection = pool.layout.selection
        self.selector = Selector(selection) if selection and retention is None else None
        self.states = states_of(pool)

    @property
    def length(self) -> int:
        """Tokens so far, and the position of the next one; see `kept` for rows."""
        return len(self.tokens)

    @property
    def retention(self) -> Retention | None:
        """What stays where old rows are evicted; None = they are not."""
        return self._own or self.pool.layout.retention

    @property
    def evicted(self) -> int:
        """Tokens that the last one did not see because they were evicted, or the next one will not. With none, no row
        depends on the policy."""
        if self.selector is not None:
            return max(held.evicted for held in self._lists)
        return self.retention.gap(self.length - 1) if self.retention and self.length else 0

    @property
    def kept(self) -> int:
        """Rows that the last token saw, sliding windows aside: never more than the context has room for."""
        return self.length - self.evicted

    @property
    def shares(self) -> bool:
        """Whether its rows are those of any other sequence of the pool with these tokens: caches may have and give
        them. They are not where a policy of its own, or one that is not reproducible, decides what they saw, or their
        own queries did, nor once rows were selected by score, nor where some were computed without those before
        them."""
        if self.moved is not None or self.exact is not None or self.selected:
            return False
        return self._own is None and (self.retention is None or self.retention.reproducible)

    def losses(self, evicted: bool = True) -> tuple[str, ...]:
        """Why the rows are not those of a 16-bit cache that keeps everything: () = they are. `evicted`: rows count that
        were computed when others had been evicted."""
        found = []
        if evicted and self.evicted:
            kept = str(self.retention)
            if self.selector is not None:
                kept = f"{self.kept:,} of {self.length:,} rows by {self.selector.selection.policy}"
            found.append(f"evicted: {self.evicted:,} tokens, kept {kept}")
        if self.moved is not None:
            found.append(f"moved: chunks from row {self.moved:,} on were computed alone")
        if self.exact is not None:
            found.append(f"read in part from token {self.exact:,} on: {attending.described(self.pool.layout.attend)}")
        return (*found, *sorted({f"quantized: {_types(g)}" for g in self.pool.layout.groups if g.sealed}))

    def reserve(self, ids: list[int], answering: bool = False) -> Part:
        """Pages for `ids` as the next rows: this sequence's part of a step that computes them. `answering`: it is the
        one row of a token of an answer, which may read fewer pages than a prompt does.

        Pages that fell out of a window are released first. Raises DoesNotFit, with nothing changed but that.
        """
        self.drop()
        self._trim(self.length)  # pages of a step that was never committed: a fork may hold them too
        start, end = self.length, self.length + len(ids)
        try:
            for held in self._lists:
                held.take(start, end)
            states = self.states.reserve(start, end, self.certain) if self.states else None
        except DoesNotFit:
            self._trim(start)
            raise
        watches = self.selector.watches(self._lists, end) if self.selector else ()
        layout = self.pool.layout
        chosen = PageChoice.of(layout.attend, start, len(ids), answering and len(ids) == 1, layout.page_size)
        views = self.views(end, chosen)
        part = Part(torch.tensor(ids, dtype=torch.int64), start, views, layout.slots, watches, states)
        self._chose = part.chooses
        return part

    def select(self, facts: Facts) -> None:
        """Let go of rows, as the selector's budget says. Raises DoesNotFit, with nothing lost."""
        assert self.selector is not None
        self._trim(self.length)
        self.selector.select(self._lists, self.length, facts)

    def commit(self, ids: list[int]) -> None:
        """The rows of the last step are computed, and the pages they filled are sealed."""
        if self.selector:
            self.selector.noted(self.length, self.length + len(ids))
        if self._chose and self.exact is None:
            self.exact = self.length
        self.tokens.extend(ids)
        for held in self._lists:
            held.seal(self.length)
        if self.states:
            self.states.commit()

    def drop(self) -> int:
        """Release pages that no query from here on can see; returns how many."""
        length = self.length if self.certain is None else min(self.certain, self.length)
        return sum(held.drop(length) for held in self._lists)

    def rewindable(self, length: int) -> int:
        """The longest prefix of at most `length` rows that can be gone back to.

        Windows must still be whole, those of a retention too, and a sealed page cannot be opened again; no rows can be
        taken back that others were selected from; and where layers have a state it must be there.
        """
        length = min(length, self.length)
        if self.states is None:
            return self._rows_rewindable(length)
        found = self.states.rewindable(length, self.length)
        return next((at for at in found if self._rows_rewindable(at) == at), 0)

    def _rows_rewindable(self, length: int) -> int:
        """The same, as far as rows decide it."""
        size = self.pool.layout.page_size
        if any(held.selected and length < held.selected.below for held in self._lists):
            return 0
        for held in self._lists:
            if held.open is not None and held.layout.tail and length // size not in held.open.pages:
                length = length // size * size
        return length if all(held.has(held.numbers(length)) for held in self._lists) else 0

    def rewind(self, length: int) -> None:
        """Keep the first `length` rows. Raises ValueError if that cannot be (see `rewindable`)."""
        if not 0 <= length <= self.length or self.rewindable(length) != length:
            raise ValueError(f"cannot go back to {length} of {self.length} rows")
        if self.states:
            self.states.rewind(length, self.length)
        self._trim(length)
        del self.tokens[length:]
        if self.selector:
            self.selector.cut(length)
        self.foreign = min(self.foreign, length)
        self._see_all(self.exact)

    def _see_all(self, exact: int | None) -> None:
        """The rows from number `exact` on did not see all, where there are any."""
        self.exact = None if exact is None or exact >= self.length else exact

    def rewind_to(self, length: int) -> int:
        """Keep the first `length` rows, fewer where rows are gone that their windows need; returns the rows kept."""
        self.rewind(kept := self.rewindable(length))
        return kept

    def _trim(self, length: int) -> None:
        """Release what stands behind row `length`, and what was taken for a step that was not committed."""
        if self.states:
            self.states.release_step()
        if self.moved is not None and length <= self.moved:
            self.moved = None
        for held in self._lists:
            held.trim(length)
            if length < self.pool.layout.page_size and (length < self.length or any(b.known for b in held.bases)):
                held.bases = tuple(Basis() for _ in held.bases)  # a fork may go on with the old ones

    def fork(self) -> Sequence:
        """A sequence with the same rows, sharing every page."""
        twin = Sequence(self.pool, self._own)
        if self.states and self.states.lost:
            raise ValueError("the state of a step that failed is lost: go back to a checkpoint first")
        twin.adopt(self.tokens, self.numbered(), self.bases, self.foreign, self.exact, self.selected)
        if self.states and twin.states and self.length:
            twin.states.share(self.states)
        twin.selector = self.selector.copy() if self.selector else None
        twin.moved = self.moved
        return twin

    def close(self) -> None:
        """Release every page; the sequence is empty afterwards."""
        self._trim(0)
        if self.states:
            self.states.clear()
        self.tokens.clear()
        if self.selector:
            self.selector = Selector(self.selector.selection)
        self.foreign = 0
        self.exact = None

    def numbered(self) -> dict[PageKey, int]:
        """Every page held, by its key: of rows and, of states, the checkpoints."""
        forms = (form for held in self._lists for form in held.forms)
        found = {(form.arena, number): page for form in forms for number, page in form.pages.items()}
        return {**found, **dict(self.states.numbered())} if self.states else found

    @property
    def selected(self) -> dict[int, Selected]:
        """Which rows were selected by score, by group."""
        return {g: held.selected for g, held in enumerate(self._lists) if held.selected}

    @property
    def bases(self) -> Bases:
        """Of each group, of each of its layers."""
        return tuple(held.bases for held in self._lists)

    def adopt(
        self, tokens: list[int], pages: Mapping[PageKey, int], bases: Bases, foreign: int = 0,
        exact: int | None = None, selected: Mapping[int, Selected] | None = None,
    ) -> None:  # fmt: skip
        """Have these rows instead of its own: those of `tokens`, in `pages`, which get one more holder each; `foreign`
        of them are. `exact`, `selected`: of the sequence that they are from. Only pages that a sequence of this length
        holds may be given; see `prefixpages.needed`."""
        for (arena, _), page in pages.items():
            self.pool.retain(arena, page)
        self.close()
        self.tokens, self.foreign = list(tokens), min(foreign, len(tokens))
        self._see_all(exact)
        forms = {form.arena: form for held in self._lists for form in held.forms}
        for (arena, number), page in sorted(pages.items()):
            if arena in forms:
                forms[arena].put(number, page)
        for g, rows in (selected or {}).items():
            self._lists[g].selected = rows
        if self.states:
            self.states.adopt(pages, self.length)
        if self.length >= self.pool.layout.page_size:
            for held, theirs in zip(self._lists, bases, strict=True):
                held.bases = theirs

    def holds(self) -> Iterator[tuple[int, int]]:
        """(arena, page) for every reference this sequence has, for `PagePool.check`."""
        numbered = ((arena, page) for (arena, _), page in self.numbered().items())
        return itertools.chain(numbered, self.states.others() if self.states else ())

    def pages(self, arena: int) -> int:
        """Pages of the arena that this sequence holds."""
        return sum(a == arena for a, _ in self.holds())

    @property
    def page_utilization(self) -> float | None:
        """The share of the pages held, by their bytes, that is rows which are of use; None = there are no pages."""
        size, used, total = self.pool.layout.page_size, 0, 0
        for held in self._lists:
            for form in held.forms:
                page_bytes = self.pool.layout.arenas[form.arena].page_bytes
                total += size * page_bytes * len(form.pages)
                used += page_bytes * sum(held.layout.rows_in_use(number, self.length) for number in form.pages)
        return used / total if total else None

    def reusable(self, prompt_tokens: int) -> int:
        """How many of the first rows of a prompt need not be computed here, where its queries are noted for a
        selection: those before the first query of that, or all whose queries were; once rows were selected, all."""
        if self.selector is None or self.selected:
            return prompt_tokens
        return min(prompt_tokens, max(self.selector.first_noted(prompt_tokens), self.selector.seen))

    @property
    def rows_seen(self) -> int:
        """Rows that the next token sees in the layers that see most, its own among them."""
        return max(held.layout.rows_seen(self.length + 1) - held.evicted for held in self._lists)

    def views(self, end: int | None = None, chosen: PageChoice | None = None) -> tuple[Layers, ...]:
        """The cache as kernels see it in a step of rows up to `end` (None: that writes nothing), by group. `chosen`:
        what its queries read of it; None = all."""
        end = self.length if end is None else end
        return tuple(held.views(self.length, end, chosen) for held in self._lists)


def _types(group: GroupLayout) -> str:
    """The cache types of a group in words."""
    if group.kind == LATENT:
        return f"latents {group.codec_v.name}"
    if group.joined:
        return f"keys and values {group.codec_v.name}"
    return f"keys {group.codec_k.name}, values {group.codec_v.name}"
