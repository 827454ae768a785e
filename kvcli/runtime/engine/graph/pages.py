"""The pages of a token graph: tables on the device that stay where they are while sequences come, grow and forget."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import torch

from kvcli.kernels.gpu.pages import DevicePages, half_angles
from kvcli.kernels.paged import CENTRE_ROWS
from kvcli.runtime.cache.layout import GroupLayout, KVLayout
from kvcli.runtime.cache.pagelist import Layers
from kvcli.runtime.cache.sequence import Part
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.rope import RopeTable

UPLOADS = 4  # page tables on the way to the device at once


class _SlotAngles:
    """Angles of the centres of the pages that stand in the slots of a ring; see `DevicePages.angles`."""

    def __init__(self, rope: RopeTable, slots: int, page_size: int, device: torch.device) -> None:
        self.rope, self.firsts = rope, np.arange(0, page_size, CENTRE_ROWS)
        self.page_size = page_size
        self.pages = np.full(slots, -1)
        shape = slots, len(self.firsts), 2 * len(rope.frequencies)
        self.device = torch.zeros(shape, dtype=torch.float16, device=device)
        self.staging = torch.zeros(UPLOADS, *shape, dtype=torch.float16, pin_memory=device.type == "cuda")

    def bind(self, slots: np.ndarray, numbers: np.ndarray, turn: int) -> None:
        """Upload those of pages that are new in their slots."""
        new = self.pages[slots] != numbers
        at, pages = slots[new], numbers[new]
        self.pages[at] = pages
        rows = (pages[:, None] * self.page_size + self.firsts).flatten()
        staged = self.staging[turn]
        staged[at] = half_angles(self.rope.at_centres(rows), "cpu").view(len(at), *staged.shape[1:])
        for slot in at.tolist():
            self.device[slot].copy_(staged[slot], non_blocking=True)


class GroupTables:
    """Page addresses of one group on the device, slot by slot, for each class of pages (sealed or only; open).

    `front`, `ring`: see `DevicePages`. Where old rows are evicted there are slots for the kept pages, and a ring for
    the window, whose numbers grow without end; else a page's slot is its number.
    """

    def __init__(self, group: GroupLayout, ctx_size: int, evicting: bool, device: torch.device) -> None:
        self.front = self.ring = 0
        slots = -(-ctx_size // group.page_size) + 1
        if evicting:
            self.front = group.retention.kept_pages if group.retention else 0
            self.ring = 1 << group.pages_behind.bit_length()  # more than `pages_behind`: a query's own page comes too
            slots = self.front + self.ring
        shape = 1 + group.sealed, slots
        self.device = torch.zeros(shape, dtype=torch.int64, device=device)
        self.staging = torch.zeros(UPLOADS, *shape, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.page_size, self._angles = group.page_size, dict[RopeTable, _SlotAngles]()
        self.turn = 0
        self.bound: Layers | None = None

    def bind(self, layers: Layers) -> None:
        """Upload the pages of a sequence, if they are not those that are there."""
        if self.bound is layers:
            return
        self.bound, self.turn = layers, (self.turn + 1) % UPLOADS
        staged, first = self.staging[self.turn], layers[0]
        slots = numbers = first.numbers
        if self.ring:
            slots = np.where(numbers < self.front, numbers, self.front + (numbers - self.front) % self.ring)
        for row, kv in zip(staged, (first, first.open), strict=False):
            if kv is not None:
                row[slots] = torch.from_numpy(kv.addresses)
        self.device.copy_(staged, non_blocking=True)
        for angles in self._angles.values():
            angles.bind(slots, numbers, self.turn)

    def slot_angles(self, rope: RopeTable) -> torch.Tensor:
        """See `DevicePages.angles`: of the pages in a ring, one copy for all layers; `bind` sets them."""
        if rope not in self._angles:
            slots, device = self.device.shape[1], self.device.device
            self._angles[rope] = _SlotAngles(rope, slots, self.page_size, device)
        return self._angles[rope].device.flatten(0, 1)


class GraphPages:
    """Every layer's pages over its group's tables: `bind` them to a sequence."""

    def __init__(self, model: Decoder, layout: KVLayout, ctx_size: int) -> None:
        self.model, self.layout = model, layout
        self.device: torch.device = model.ops.device
        evicting = layout.retention is not None
        self._tables = [GroupTables(g, ctx_size, evicting, self.device) for g in layout.groups]
        self._angles: dict[RopeTable, torch.Tensor] = {}
        self._bases = [self._empty_bases(g) for g in layout.groups]
        self.layers = [self._layer(i) for i in range(model.config.n_layers)]

    def _layer(self, layer: int) -> DevicePages:
        """The layer's pages, with a mean and scales that `bind_bases` fills in."""
        slot = self.layout.slots[layer]
        assert slot is not None
        group, tables = self.layout.groups[slot[0]], self._tables[slot[0]]
        centre, scale_k, scale_v = (None if x is None else x[slot[1]] for x in self._bases[slot[0]])
        keep, retained = (group.retention.keep, group.retention.window) if group.retention else (0, 0)
        opened, rope = group.open_class(), self.model.ropes.table(self.model.config.layers[layer].rope)
        return DevicePages(
            group.record, tables.device[0], slot[1] * group.layer_stride, tables.front,
            DevicePages(opened.record, tables.device[1], slot[1] * opened.layer_stride) if opened else None,
            group.sinks if opened else 0, group.tail if opened else 0,
            centre=centre, scale_k=scale_k, scale_v=scale_v,
            angles=None if centre is None or rope is None else self._angles_of(rope, tables),
            front=tables.front, ring=tables.ring, keep=keep, retained=retained,
        )  # fmt: skip

    def _empty_bases(self, group: GroupLayout) -> tuple[torch.Tensor | None, ...]:
        """Room for the means of keys and the scales of keys and values of all layers, where there are such."""
        shape, k, v = (len(group.layers), group.kv_heads), group.codec_k, group.codec_v
        shapes = (
            (*shape, group.dim_k) if k.centred and group.sealed else None,
            shape if k.static_bytes else None, shape if v.static_bytes else None,
        )  # fmt: skip
        return tuple(None if s is None else torch.zeros(s, dtype=torch.float32, device=self.device) for s in shapes)

    def sealed_runs(self) -> Iterator[tuple[DevicePages, int, tuple[int, int]]]:
        """Layers whose pages are sealed as they fill, in runs of layers that are alike: the first one, how many they
        are, and `strides` as `seal_step` (kernels/gpu/seal.py) wants them."""
        for group in self.layout.groups:
            opened = group.open_class()
            if opened is None or not group.tail:
                continue
            for _, run in groupby(group.layers, lambda i: self.model.config.layers[i].rope):
                first, *others = run
                yield self.layers[first], 1 + len(others), (group.layer_stride, opened.layer_stride)

    def _angles_of(self, rope: RopeTable, tables: GroupTables) -> torch.Tensor:
        """The angles of the centres by slot: of all rows, one copy for all layers, or those that `bind` keeps up."""
        if tables.ring:
            return tables.slot_angles(rope)
        if rope not in self._angles:
            rows = tables.device.shape[1] * self.layout.page_size
            self._angles[rope] = half_angles(rope.centres(rows), self.device)
        return self._angles[rope]

    def bind(self, part: Part) -> None:
        """The pages of the part's sequence."""
        for tables, layers in zip(self._tables, part.groups, strict=True):
            tables.bind(layers)

    def bind_bases(self, part: Part) -> None:
        """The means and scales of the part's sequence, where they are known: else no page is sealed yet."""
        for i, pages in enumerate(self.layers):
            basis = part.kv(i).basis
            for mine, theirs in (
                (pages.centre, basis.centre), (pages.scale_k, basis.scale_k), (pages.scale_v, basis.scale_v)
            ):  # fmt: skip
                if mine is not None and theirs is not None:
                    mine.copy_(theirs)
