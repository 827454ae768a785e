"""The pages of a token graph: lists on the device that stay where they are while sequences come, grow and forget."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from itertools import groupby
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np
import torch

from kvcli.kernels.gpu import latents
from kvcli.kernels.gpu.attention import block_rows, part_count, programs
from kvcli.kernels.gpu.basis import fix_basis
from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.combine import MOST_PARTS, most_parts
from kvcli.kernels.gpu.pages import (
    Asked,
    DevicePages,
    HostLists,
    Noted,
    PageLists,
    Sealing,
    half_angles,
    selected,
)
from kvcli.kernels.gpu.places import check_slots, words
from kvcli.kernels.gpu.shares import EDGE_NUMBERS, NoRoom, next_change
from kvcli.kernels.paged import CENTRE_ROWS, Basis, Watch
from kvcli.options import AttendOptions
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.cache.pagelist import Layers
from kvcli.runtime.cache.sequence import Part
from kvcli.runtime.config import WINDOWED
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.plan.graphs import EDGES_OF_BLOCK

PAGES_EACH, CHOSEN_EACH = 4, 2  # for a share to be worth a program, of all pages or of chosen ones


class CentreAngles:
    """Angles of the centres of pages, by slot; see `DevicePages.angles`. Page n stands in slot n, until numbers go on
    beyond the slots: then a new page gets the slot of one that is in no list."""

    def __init__(self, slots: int, page_size: int, device: torch.device) -> None:
        check_slots(slots)
        self.pages = np.arange(slots)  # by slot
        self.page_size, self.device = page_size, device
        self._made: MutableMapping[RopeTable, torch.Tensor] = WeakKeyDictionary()

    @classmethod
    def shared(cls, group: GroupLayout, slots: int, device: torch.device) -> CentreAngles | None:
        """Those of a group; None = it needs none. Where nothing is evicted, pages never change their slots, and all
        graphs have the same ones."""
        if not (group.sealed and group.codec_k.centred):
            return None
        if group.retention is not None:
            return cls(slots, group.page_size, device)
        return _SHARED.setdefault((slots, group.page_size, device), cls(slots, group.page_size, device))

    def of(self, rope: RopeTable) -> torch.Tensor:
        """float16 [slots * page_size / CENTRE_ROWS, rope_dim], which `place` keeps up."""
        if rope not in self._made:
            self._made[rope] = self._of_pages(rope, self.pages).to(self.device)
        return self._made[rope].flatten(0, 1)

    def _of_pages(self, rope: RopeTable, pages: np.ndarray) -> torch.Tensor:
        """float16 [n, page_size / CENTRE_ROWS, rope_dim], on the host."""
        firsts = np.add.outer(pages * self.page_size, np.arange(0, self.page_size, CENTRE_ROWS))
        angles = rope.at_positions(firsts.flatten() + (CENTRE_ROWS - 1) / 2)
        return half_angles(angles, "cpu").unflatten(0, firsts.shape)

    def place(self, numbers: np.ndarray) -> np.ndarray:
        """The slots of pages with these numbers, of all that are in use: int64 [n]."""
        if numbers.max() < len(self.pages) and (self.pages[numbers] == numbers).all():
            return numbers
        new = np.setdiff1d(numbers, self.pages)
        free = np.flatnonzero(~np.isin(self.pages, numbers))[: len(new)]
        self.pages[free] = new
        for rope, there in self._made.items() if len(new) else ():
            there[sent(torch.from_numpy(free), self.device)] = sent(self._of_pages(rope, new), self.device)
        order = np.argsort(self.pages)
        return order[np.searchsorted(self.pages, numbers, sorter=order)]


_SHARED: WeakValueDictionary[tuple[int, int, torch.device], CentreAngles] = WeakValueDictionary()


def most_pieces(rows: int, size: int) -> int:
    """How many pieces, each of `size` positions from a multiple of it on, so many rows can be in."""
    return (rows + size - 2) // size + 1


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of what stands on the host, which nothing waits for; it is made in the order of what the device does."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class GroupTables:
    """The lists of one group on the device for steps of `rows` rows; see `PageLists`. `bind` them to a sequence.

    What kernels are launched for, `PageLists.turns` and `edged`, is what the layout's eviction asks for, until a list
    wants more. `alike`: the lists of several rows are those that a step without a graph has; see `GpuBackend.block`.
    `noting`: the next row's probabilities are noted.
    """

    def __init__(
        self,
        group: GroupLayout,
        ctx_size: int,
        position: torch.Tensor,
        heads: int,
        rows: int = 1,
        alike: bool = False,
        attend: int = 0,
        notes: bool = False,
    ) -> None:
        """`attend`: how many pages a token chooses where not all are read; `notes`: whether the probabilities of tokens
        may be noted, where rows are selected."""
        self.group, self.rows, device, evicts = group, rows, position.device, group.retention
        self.alike = alike and rows > 1
        self.chosen = attend if group.summarized and rows == 1 else 0
        slots = -(-ctx_size // group.page_size) + 2
        self.chip = Chip.of(device)
        self.most = most_parts(group.dim_v)
        each = programs(self.chip, group.sealed) // group.kv_heads
        self.block, _ = block_rows(group.record, heads, rows, self.chip)
        if group.record.joined:
            self.most, each = latents.MOST_PARTS, latents.parts_of_one(group.record, heads, self.chip)
            self.block, _ = latents.block_rows(group.record, heads, rows)
        self.blocks, self.pages = (most_pieces(rows, size) for size in (self.block, group.page_size))
        self.each = max(1, each // self.blocks)  # programs that rows which are seen wholly are worth, of each block
        most = 2 * max(MOST_PARTS, self.most) * self.blocks, EDGE_NUMBERS * (2 * slots + EDGES_OF_BLOCK * self.blocks)
        sizes = [n + n % 2 for n in (rows, self.pages, self.pages, 3, *most)]  # each begins at a multiple of 16 bytes
        self.head = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._sizes = sizes
        shift, into, open_into, limits, work, edges = self.head.split(sizes)
        self.centres = CentreAngles.shared(group, slots, device)
        self.lists = PageLists(
            position, shift[:rows], self._table_of(2 * slots, device),
            work.view(torch.int32).view(self.blocks, -1, 4), edges[: most[1]].view(-1, EDGE_NUMBERS), into, open_into,
            turns=bool(evicts and evicts.keep), spare=rows > 1,
            edged=group.sealed and (self.alike or not group.tail or group.window > 0 or evicts is not None),
            selection=selected(self._table_of(2 * slots, device), limits, group.kv_heads, self.chosen)
            if self.chosen else None,
        )  # fmt: skip
        self.summarized = self._table_of(2, device) if self.chosen else None  # a page's word, and where its means go
        self._words = np.zeros(0, np.int64)  # of all entries
        self.noting, self._noted = False, self._noted_of(heads, ctx_size) if notes and rows == 1 else None
        self._sent = {name: np.zeros(0, np.int64) for name in ("table", "summaries", "places")}  # so far
        self._bound: tuple[Layers, int] | None = None
        self._target = (0, 0)
        self._positions = range(0)

    def _noted_of(self, heads: int, ctx_size: int) -> Noted | None:
        """Room for the probabilities of a token; None = rows of such layers are not selected."""
        if self.group.kind in WINDOWED:
            return None
        table, most = self.lists.table, self.group.page_size * (self.entries(ctx_size) + EDGES_OF_BLOCK)
        scores = torch.zeros(heads, 2 * most, dtype=torch.float32, device=table.device)
        return Noted(torch.zeros_like(table), scores, most, self._table_of(2, table.device))

    def summarize_next(self, layers: Layers, which: int) -> None:
        """Have the entry at that place, of those that are bound, be the one that `summarized` tells of."""
        found = layers[0].entries.summaries
        assert found is not None and self.summarized is not None
        numbers = torch.from_numpy(np.array((self._words[which], found.addresses[which])))
        self.summarized.copy_(sent(numbers, self.head.device))

    @property
    def noted(self) -> Noted | None:
        """Where the next row's probabilities go; None = they are not noted."""
        return self._noted if self.noting else None

    def note(self, watches: tuple[Watch, ...] | None) -> None:
        """Have probabilities added to what the group's layers watch, or nowhere."""
        if self._noted is None:
            return
        mass = watches[0].mass if watches else None
        found = (0, 0) if mass is None else (mass.data_ptr(), mass.stride(0))
        if found != self._target:
            self._noted.target.copy_(sent(torch.tensor(found), self.head.device))
            self._target = found

    @staticmethod
    def _table_of(size: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    def entries(self, bucket: int) -> int:
        """Of the table, at most, where a query sees up to `bucket` rows."""
        return -(-bucket // self.group.page_size) + (2 if self.group.retention else 0)

    @property
    def sealing(self) -> Sealing:
        """What a step seals before its rows look at the pages."""
        if not self.group.sealed or (self.rows == 1 and self.group.tail):  # a token's page is sealed behind it
            return Sealing.NOTHING
        return Sealing.PAGES if self.group.tail else Sealing.ROW

    def parts(self, bucket: int) -> int:
        """Programs that one query, or one block of them, has, of each head, where it sees up to `bucket` rows."""
        group, turns, pages = self.group, self.lists.turns, PAGES_EACH
        seen = min(bucket, group.window) if group.window else bucket
        if self.chosen:
            seen = min(bucket, attending.most_pages(AttendOptions(self.chosen)) * group.page_size)
            pages = CHOSEN_EACH if seen < bucket else pages  # where all are read, sums are those without a choice
        splits = 1 if self.alike else max(1, min(self.each, seen // (pages * group.page_size)))
        if self.rows == 1:
            return min(self.most, part_count(splits, group.sealed, turns))
        others = (1 + 2 * group.sealed) * (1 + turns) + turns  # edges and open pages of a block, its turned entries
        return min(self.most, splits + others)

    def bind(self, part: Part, group: int, bucket: int) -> bool:
        """Upload the lists of a sequence, of which this is group number `group`, for the part's rows, or for the one
        row and those behind it up to the next change, if they are not there. `bucket`: rows that are seen, or more.
        Returns whether there are now more kinds of work. Raises NoRoom."""
        layers, position = part.groups[group], part.start
        if self._bound == (layers, bucket) and position in self._positions:
            return False
        kv, size, before = layers[0], self.group.page_size, self.lists
        asked = Asked(position, self.rows, self.block, self.group.reach, edged=before.edged, choose=self.chosen)
        positions = range(0)
        if self.rows == 1:
            change = next_change([each.entries for each in kv.classes], position)
            positions = range(position, min(change, (position // size + 1) * size))
        blocks = (np.array([position]), np.array([positions[-1]])) if positions else asked.blocks
        slots = None
        if self.centres:
            n, numbers = len(kv.entries), kv.into.first // size + np.arange(len(kv.into.addresses))
            found = self.centres.place(np.concatenate((kv.entries.first // size, numbers)))
            slots = found[:n], found[n:]
        if self.chosen:
            self._words = words(kv.entries.addresses, slots[0] if slots else None)
        lists = HostLists.of(kv, part.shifts[group], asked, blocks, slots)
        more = (lists.turns and not before.turns) or (lists.edged and not before.edged)
        if more:
            self.lists = replace(before, turns=before.turns or lists.turns, edged=before.edged or lists.edged)
        parts = self.parts(bucket)
        work, edges = lists.shares.padded(parts) if self.alike else lists.shares.spread(parts)
        if self._noted is not None and max(len(lists.table), len(edges)) * size > self._noted.edges_from:
            raise NoRoom("more pages than scores are noted of")
        into, opened = (x[: self.pages] for x in (lists.into, lists.open_into))
        self._upload(lists.shift, into, opened, np.array(lists.limits), work.view(np.int64), edges)
        self._upload_table("table", lists.table, self.lists.table)
        if self.lists.selection is not None:
            self._upload_table("summaries", lists.summaries, self.lists.selection.summaries)
        if self._noted is not None:
            self._upload_table("places", lists.places, self._noted.places)
        self._bound, self._positions = (layers, bucket), positions
        return more

    def _upload(self, *numbers: np.ndarray) -> None:
        """All but the table, by one copy."""
        if any(values.size > size for values, size in zip(numbers, self._sizes, strict=True)):
            raise NoRoom("lists longer than planned")
        head, first = np.zeros(sum(self._sizes[:-1]) + numbers[-1].size, np.int64), 0
        for values, size in zip(numbers, self._sizes, strict=True):
            head[first : first + values.size] = values.reshape(-1)
            first += size
        self.head[: len(head)] = sent(torch.from_numpy(head), self.head.device)

    def _upload_table(self, name: str, words: np.ndarray, to: torch.Tensor) -> None:
        """What is not there already: mostly the list's end."""
        old, n = self._sent[name], min(len(words), len(self._sent[name]))
        changed = np.flatnonzero(words[:n] != old[:n])
        first, self._sent[name] = int(changed[0]) if len(changed) else n, words
        to[first : len(words)] = sent(torch.from_numpy(words[first:]), self.head.device)


class GraphPages:
    """Every layer's pages over its group's tables: `bind` them to a sequence."""

    shape: tuple[int, ...] = ()  # of what each layer has means and scales of, besides heads

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int, position: torch.Tensor, rows: int = 1) -> None:
        self.model, self.layout = model, layout
        self.notes = rows == 1 and layout.selection is not None and bool(layout.selection.scorer.watches)
        sizes = ctx_size, position, model.config.n_heads, rows, layout.grain > 1, layout.attend.pages, self.notes
        self.tables = [GroupTables(g, *sizes) for g in layout.groups]
        self._bases = [self._empty_bases(g, position.device) for g in layout.groups]
        self._based: list[Basis | None] = [None] * model.config.n_layers  # whose known numbers are there
        self.layers = self._made()

    def _made(self) -> dict[int, DevicePages]:
        return {i: self._layer(i) for i, slot in enumerate(self.layout.slots) if slot is not None}

    def set_noting(self, noting: bool) -> None:
        """Whether what is launched next notes the probabilities of its row; nowhere, until `note` says where."""
        if noting == self.tables[0].noting:
            return
        for tables in self.tables:
            tables.noting = noting
        self.layers = self._made()

    def note(self, part: Part | None) -> None:
        """Where probabilities go: to what the part watches, or nowhere."""
        for g, tables in enumerate(self.tables):
            tables.note(part.watches[g] if part and part.watches else None)

    def of(self, layer: int) -> tuple[GroupTables, int]:
        """The tables of a layer's group, and which one it is of the group's layers."""
        slot = self.layout.slots[layer]
        assert slot is not None
        return self.tables[slot[0]], slot[1]

    def _layer(self, layer: int) -> DevicePages:
        """The layer's pages, with a mean and scales that `bind_bases` fills in."""
        tables, i = self.of(layer)
        group, lists, opened = tables.group, replace(tables.lists, noted=tables.noted), tables.group.open_class
        centre, scale_k, scale_v = (None if x is None else x[i] for x in self._bases[self.tables.index(tables)])
        rope = self.model.ropes.table(self.model.config.layers[layer].rope)
        return DevicePages(
            group.record, lists, i * group.layer_stride,
            DevicePages(opened.record, lists, i * opened.layer_stride) if opened else None, centre, scale_k, scale_v,
            tables.centres.of(rope) if tables.centres and rope else None,
            i, group.summary if group.summarized else None,
        )  # fmt: skip

    def _empty_bases(self, group: GroupLayout, device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """Room for the means of keys and the scales of keys and values of all layers, where there are such."""
        shape, k, v = (len(group.layers), *self.shape, group.kv_heads), group.codec_k, group.codec_v
        shapes = (
            (*shape, group.dim_k) if k.centred and group.sealed else None,
            shape if k.static_bytes else None, shape if v.static_bytes else None,
        )  # fmt: skip
        return tuple(None if s is None else torch.zeros(s, dtype=torch.float32, device=device) for s in shapes)

    def sealed_runs(self) -> Iterator[tuple[DevicePages, int, tuple[int, int]]]:
        """Layers whose pages are sealed as they fill, in runs of layers that are alike: the first one, how many they
        are, and `strides` as `seal_step` (kernels/gpu/seal.py) wants them."""
        for group in self.layout.groups:
            opened = group.open_class
            if opened is None or not group.tail:
                continue
            for _, run in groupby(group.layers, lambda i: self.model.config.layers[i].rope):
                first, *others = run
                yield self.layers[first], 1 + len(others), (group.layer_stride, opened.layer_stride)

    def bind(self, part: Part, bucket: int) -> bool:
        """The pages of the part's sequence, for rows that see up to `bucket` rows. Returns whether what was launched
        for the layers so far is not enough."""
        more = [tables.bind(part, g, bucket) for g, tables in enumerate(self.tables)]
        if any(more):
            self.layers = self._made()
        return any(more)

    def summarized(self, group: int) -> Iterator[tuple[DevicePages, torch.Tensor]]:
        """Each layer of the group over the one page that `summarize_next` named, and where the means of the first one's
        go: int64 [1]."""
        found = self.tables[group].summarized
        if found is not None:
            lists = PageLists(*(found[:1],) * 7)
            for i in self.layout.groups[group].layers:
                yield replace(self.layers[i], lists=lists), found[1:]

    def fix_bases(self) -> None:
        """Launch what finds the means and scales of a sequence whose first page was filled; see `take_bases`."""
        for i, pages in self.layers.items():
            layer = self.model.config.layers[i]
            if pages.open is not None and layer.shares_kv_with is None:
                rope = self.model.ropes.table(layer.rope)
                fix_basis(pages, None if rope is None else rope.frequencies_on(self.model.ops.device))

    def take_bases(self, part: Part) -> None:
        """Give the part's sequence the means and scales that were found."""
        for i, pages in self.layers.items():
            basis = part.kv(i).basis
            if pages.open is not None and not basis.known:
                copies = (None if x is None else x.clone() for x in (pages.centre, pages.scale_k, pages.scale_v))
                basis.centre, basis.scale_k, basis.scale_v = copies
                basis.known = True
            self._based[i] = basis if basis.known else None

    def bind_bases(self, part: Part) -> None:
        """The means and scales of the part's sequence, where they are known: else no page is sealed yet."""
        for i, pages in self.layers.items():
            basis = part.kv(i).basis
            if self._based[i] is basis:
                continue
            self._based[i] = basis if basis.known else None
            for mine, theirs in (
                (pages.centre, basis.centre), (pages.scale_k, basis.scale_k), (pages.scale_v, basis.scale_v)
            ):  # fmt: skip
                if mine is not None and theirs is not None:
                    mine.copy_(theirs)
