"""The pages of a graph of one row each of several sequences: their lists on the device, side by side."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from kvcli.kernels.gpu import latents
from kvcli.kernels.gpu.attention import programs
from kvcli.kernels.gpu.basis import fix_basis
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.combine import most_parts
from kvcli.kernels.gpu.pages import Asked, DevicePages, HostLists, PageLists, Sealing
from kvcli.kernels.gpu.places import MOST_SLOTS, words
from kvcli.kernels.gpu.shares import EDGE_NUMBERS, WHOLE, NoRoom, next_change, pieces, shared_out
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.cache.sequence import Part
from kvcli.runtime.engine.graph.pages import PAGES_EACH, CentreAngles, GraphPages, sent
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.plan.graphs import EDGES_OF_ROW

ITEM_NUMBERS = 6  # of an item of work: those of `Shares`, the row, and the number of its partial result
FEWEST_PARTS = 8  # of a row that kernels are launched for


class RowLists(NamedTuple):
    """What one row sees, up to the position `end`: its work is not shared out yet, and `edges` are its own. `change`:
    the position from which on other rows are seen; `slot`: of the angles of the page that the row goes into."""

    work: list[list[int]]  # of each part, its four numbers
    edges: np.ndarray
    shift: int
    into: int
    open_into: int
    turns: bool
    edged: bool
    numbers: np.ndarray  # of the pages whose angles it needs
    end: int
    change: int
    slot: int

    @property
    def whole(self) -> int:
        """Pages that are seen wholly."""
        return sum(hi - lo for kind, _, lo, hi in self.work if kind == WHOLE)

    @property
    def runs(self) -> int:
        """How many runs of these there are."""
        return sum(part[0] == WHOLE for part in self.work)


class BatchTables:
    """The lists of one group for `rows` rows, each of a sequence of its own; see `PageLists.apart`."""

    def __init__(self, group: GroupLayout, ctx_size: int, position: torch.Tensor, heads: int) -> None:
        self.group, self.rows, device = group, len(position), position.device
        self.noted = None  # nothing is: see `GroupTables`
        chip, slots = Chip.of(device), -(-ctx_size // group.page_size) + 2
        if group.record.joined:
            self.most, self.budget = latents.MOST_PARTS, latents.parts_of_one(group.record, heads, chip)
        else:
            self.most, self.budget = most_parts(group.dim_v), programs(chip, group.sealed) // group.kv_heads
        evicts = group.retention
        self.pitch = 2 * slots  # of the tables of rows
        wanted = slots if evicts is None else min(MOST_SLOTS, slots * self.rows)
        self.centres = CentreAngles.shared(group, wanted, device)
        kinds = (1 + 2 * group.sealed) * (1 + bool(evicts))  # of pages that a row does not see wholly, and one run more
        self.items = self.budget + self.rows * (2 + kinds)
        stay = group.sinks + group.window // group.page_size + (evicts.keep // group.page_size if evicts else 0)
        edges_each = min(self.pitch, EDGES_OF_ROW + stay)
        sizes = [self.rows, self.rows, self.rows, self.rows + 1, self.items * ITEM_NUMBERS // 2]
        sizes = [n + n % 2 for n in (*sizes, EDGE_NUMBERS * self.rows * edges_each)]  # see `GroupTables`
        self.head = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._sizes = sizes
        shift, into, open_into, starts, work, edges = self.head.split(sizes)
        self.lists = PageLists(
            position, shift[: self.rows], torch.zeros(self.rows * self.pitch, dtype=torch.int64, device=device),
            work.view(torch.int32)[: self.items * ITEM_NUMBERS].view(-1, ITEM_NUMBERS), edges.view(-1, EDGE_NUMBERS),
            into, open_into, turns=bool(evicts and evicts.keep),
            edged=group.sealed and (not group.tail or group.window > 0 or evicts is not None), spare=True, apart=True,
            starts=starts.view(torch.int32), sealing=torch.arange(self.rows, device=device),
        )  # fmt: skip
        self._table = np.zeros((self.rows, self.pitch), np.int64)
        self._changed: list[np.ndarray] = []  # the places of words that are not on the device yet
        self._rows: list[RowLists | None] = [None] * self.rows
        self.parts = FEWEST_PARTS  # most that a row has, or more

    @property
    def sealing(self) -> Sealing:
        """What a step seals before its rows look at the pages."""
        return Sealing.ROW if self.group.sealed and not self.group.tail else Sealing.NOTHING

    def end(self, row: int) -> int:
        """The position before which the lists of a row are right."""
        found = self._rows[row]
        return 0 if found is None else found.end

    def set(self, row: int, part: Part | None, group: int) -> None:
        """Have a row be that of a part, of whose sequence this is group number `group`, or none."""
        if part is None:
            self._rows[row] = None
            return
        kv, size, at = part.groups[group][0], self.group.page_size, part.start
        last = (at // size + 1) * size
        before = self._rows[row]
        if before is not None and before.end == at == last - 1 and before.change >= last:
            (word,) = words(kv.into.addresses, np.array([before.slot])).tolist()
            self._rows[row] = before._replace(end=last, into=word)
            return
        change = min(next_change([each.entries for each in kv.classes], at), last)
        sealing = self.group.sealed and self.group.tail and at < last - 1
        end = min(change, last - sealing)  # with the last row a page is sealed, for which there is room by then
        slots, numbers = None, np.zeros(0, np.int64)
        if self.centres:
            into = kv.into.first // size + np.arange(len(kv.into.addresses))
            numbers = np.concatenate((kv.entries.first // size, into))
            slots = self._slots(row, numbers, len(kv.entries))
        asked = Asked(at, 1, 1, self.group.reach, edged=self.lists.edged)
        blocks = np.array([at]), np.array([change - 1])  # with the last row, whose lists are these but for `into`
        found = HostLists.of(kv, part.shifts[group], asked, blocks, slots)
        if len(found.table) > self.pitch:
            raise NoRoom("a list longer than planned")
        changed = np.flatnonzero(self._table[row, : len(found.table)] != found.table)
        self._table[row, changed] = found.table[changed]
        self._changed.append(row * self.pitch + changed)
        self._rows[row] = RowLists(
            found.shares.work[0].tolist(), found.shares.edges, int(found.shift[0]), int(found.into[0]),
            int(found.open_into[0]), found.turns, found.edged, numbers, end, change,
            int(slots[1][0]) if slots is not None else 0,
        )  # fmt: skip

    def _slots(self, row: int, numbers: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the angles of a row's pages, the first n of which are entries; those of other rows stay."""
        assert self.centres is not None
        if self.group.retention is None:
            found = self.centres.place(numbers)
        else:
            others = (x.numbers for i, x in enumerate(self._rows) if x is not None and i != row)
            together = np.concatenate([numbers, *others])
            if len(np.unique(together)) > len(self.centres.pages):
                raise NoRoom("more pages than there are slots for angles")
            found = self.centres.place(together)[: len(numbers)]
        return found[:n], found[n:]

    @property
    def kinds(self) -> tuple[int, bool, bool]:
        """What launches depend on."""
        return self.parts, self.lists.turns, self.lists.edged

    def upload(self) -> None:
        """Bring what was set to the device. Raises NoRoom."""
        self._upload_table()
        work, edges, counts = self._work()
        there = [x for x in self._rows if x is not None]
        turns = self.lists.turns or any(x.turns for x in there)
        self.lists = replace(self.lists, turns=turns, edged=self.lists.edged or any(x.edged for x in there))
        parts = max(FEWEST_PARTS, 1 << (max(counts) - 1).bit_length())
        self.parts = self.parts if parts <= self.parts <= 4 * parts else parts
        of_rows = np.array([(0, 0, 0) if x is None else (x.shift, x.into, x.open_into) for x in self._rows], np.int64)
        starts = np.zeros(2 * self._sizes[3], np.int32)
        starts[: self.rows + 1] = [0, *accumulate(counts)]
        padded = np.zeros((self.items, ITEM_NUMBERS), np.int32)
        if len(work) > self.items:
            raise NoRoom("more work than planned")
        padded[: len(work)] = work
        self._upload(*of_rows.T, starts.view(np.int64), padded.reshape(-1).view(np.int64), edges)

    def _upload_table(self) -> None:
        """Words that are not there already: mostly the last one of each row."""
        at = np.concatenate([np.zeros(0, np.int64), *self._changed])
        self._changed.clear()
        if len(at):
            there, words = sent(torch.from_numpy(np.stack((at, self._table.reshape(-1)[at]))), self.head.device)
            self.lists.table[there] = words

    def _work(self) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Items of all rows, int64 [n, ITEM_NUMBERS]; their edges; and how many items each row has.

        What rows see wholly is shared out by pages, so that programs have about as many each, however long the
        sequences are. The longest come first: the others fill what these leave free.
        """
        there = [(row, x) for row, x in enumerate(self._rows) if x is not None]
        each = max(PAGES_EACH, -(-sum(x.whole for _, x in there) // self.budget))
        shared, edges, done = [], [np.zeros((0, EDGE_NUMBERS), np.int64)], 0
        for row, x in there:
            others = len(x.work) - x.runs
            parts = min(self.most, others + max(x.runs, -(-x.whole // each)))
            for kind, turned, lo, hi, entries in shared_out(x.work, parts):
                base = row * self.pitch if kind == WHOLE else done
                shared.append([kind, turned, base + lo, base + hi, row, 0, entries])
            done += len(x.edges)
            edges.append(x.edges)
        work = pieces(shared) if shared else np.zeros((0, ITEM_NUMBERS), np.int64)
        work[:, 5] = np.arange(len(work))
        longest = np.argsort(np.where(work[:, 0] == WHOLE, work[:, 2] - work[:, 3], 0), kind="stable")
        return work[longest], np.concatenate(edges), np.bincount(work[:, 4], minlength=self.rows).tolist()

    def _upload(self, *numbers: np.ndarray) -> None:
        """All but the table, by one copy."""
        head, first = np.zeros(sum(self._sizes), np.int64), 0
        for values, size in zip(numbers, self._sizes, strict=True):
            if values.size > size:
                raise NoRoom("lists longer than planned")
            head[first : first + values.size] = values.reshape(-1)
            first += size
        self.head.copy_(sent(torch.from_numpy(head), self.head.device))


class BatchPages(GraphPages):
    """Every layer's pages over its group's tables: rows are `set` to sequences, and what was set is `sent`."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int, position: torch.Tensor) -> None:
        self.model, self.layout, self.shape, self.notes = model, layout, (len(position),), False
        self.batch = [BatchTables(g, ctx_size, position, model.config.n_heads) for g in layout.groups]
        self.tables = self.batch  # type: ignore[assignment]
        self._bases = [self._empty_bases(g, position.device) for g in layout.groups]
        self._kinds = self.kinds
        self.layers = self._made()

    @property
    def kinds(self) -> tuple[tuple[int, bool, bool], ...]:
        """See `BatchTables`; of each group."""
        return tuple(tables.kinds for tables in self.batch)

    def end(self, row: int) -> int:
        """The position before which a row's lists are right."""
        return min(tables.end(row) for tables in self.batch)

    def set(self, row: int, part: Part | None) -> None:
        """Have a row be that of a part, from its position on until `end`, or of nobody. Raises NoRoom."""
        for group, tables in enumerate(self.batch):
            tables.set(row, part, group)

    def send(self) -> None:
        """Bring what was set to the device. Raises NoRoom."""
        for tables in self.batch:
            tables.upload()
        if self.kinds != self._kinds:
            self._kinds, self.layers = self.kinds, self._made()

    def set_bases(self, row: int, part: Part) -> None:
        """The means and scales of the row's sequence, where they are known: else no page is sealed yet."""
        for layers, room in zip(part.groups, self._bases, strict=True):
            bases = [kv.basis for kv in layers]
            if not all(x.known for x in bases):
                continue
            for mine, name in zip(room, ("centre", "scale_k", "scale_v"), strict=True):
                if mine is not None:
                    mine[:, row] = torch.stack([getattr(x, name) for x in bases])

    def fix_row(self, row: int, part: Part) -> None:
        """Find the means and scales of a row's sequence, whose first page was filled by it."""
        for i, pages in self.layers.items():
            layer = self.model.config.layers[i]
            if pages.open is None or layer.shares_kv_with is not None:
                continue
            of_all = pages.centre, pages.scale_k, pages.scale_v
            centre, scale_k, scale_v = (None if x is None else torch.empty_like(x[row]) for x in of_all)
            lists = replace(pages.lists, open_into=pages.lists.open_into[row : row + 1].clone())
            rope = self.model.ropes.table(layer.rope)
            frequencies = None if rope is None else rope.frequencies_on(self.model.ops.device)
            fix_basis(replace(pages, lists=lists, centre=centre, scale_k=scale_k, scale_v=scale_v), frequencies)
            basis = part.kv(i).basis
            basis.centre, basis.scale_k, basis.scale_v, basis.known = centre, scale_k, scale_v, True
        self.set_bases(row, part)

    def tables_of(self, layer: int) -> BatchTables:
        """The tables of a layer's group."""
        slot = self.layout.slots[layer]
        assert slot is not None
        return self.batch[slot[0]]

    def sealed_by(self, rows: torch.Tensor) -> list[tuple[DevicePages, int, tuple[int, int]]]:
        """`sealed_runs`, of rows int64 [n]."""
        return [
            (replace(pages, lists=replace(pages.lists, sealing=rows)), layers, strides)
            for pages, layers, strides in self.sealed_runs()
        ]
