"""`DevicePages`: what a GPU kernel sees of one layer's cache; `PageLists`: what all layers of a group share of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import torch

from kvcli.codecs import RecordLayout, SummaryLayout
from kvcli.kernels.gpu.places import words
from kvcli.kernels.gpu.shares import Class, Shares, shares
from kvcli.kernels.paged import CENTRE_ROWS, Angles, PagedKV

MOST_HEAD_DIM = 512  # as planned: see runtime/plan/repacked.py

Blocks = tuple[np.ndarray, np.ndarray]  # int64 [blocks] each
Slots = tuple[np.ndarray, np.ndarray]  # int64 [n] each


class Asked(NamedTuple):
    """What lists depend on beside the pages: a step of `rows` from position `start` on, of which `block` are computed
    together (see `attention.block_rows`), in layers with this sliding window, 0 = none. `parts`: programs of one query
    alone; 0 = as many as it takes. `past`: how many pages that all queries see are worth reading apart (past.py), 0 =
    none are; `own`: the queries of each run of so many positions, 0 = all together. `edged`: kernels are those for
    sealed pages in `edges`, whether there are any or not. `choose`: how many pages one query alone chooses; 0 = it
    reads all."""

    start: int
    rows: int = 1
    block: int = 1
    window: int = 0
    parts: int = 0
    past: int = 0
    edged: bool = False
    choose: int = 0
    own: int = 0

    @property
    def blocks(self) -> Blocks:
        """Positions of the first and of the last query of each block, which may be behind the step: what a query reads
        does not depend on where that ends."""
        firsts = np.arange(self.start // self.block * self.block, self.start + self.rows, self.block)
        return np.maximum(firsts, self.start), firsts + self.block - 1

    @property
    def runs(self) -> np.ndarray | None:
        """Of each block, which run of `own` positions it is in, from 0 on."""
        return self.blocks[0] // self.own - self.start // self.own if self.own else None


@dataclass(frozen=True)
class Selected:
    """What queries choose among, and where the choice of one goes (picking.py).

    `summaries`: int64 [n], beside the table: where the means of a page's keys are, 0 = it is read in any case. A token
    reads `pages` of the entries from limits[0] to limits[1] and those without means, limits[2] in all, int64 [3]:
    `scores` float32 and `chosen` int64 words, of each head, [kv_heads, room]. `done`: int32 [kv_heads], 0 between
    tokens.
    """

    summaries: torch.Tensor
    limits: torch.Tensor
    scores: torch.Tensor
    chosen: torch.Tensor
    done: torch.Tensor
    pages: int


@dataclass(frozen=True)
class Noted:
    """Where the probabilities of a token's query go, of each layer (noting.py).

    `places`: int64 [n], beside the table: the place of slot 0 of each entry, see `kernels.Watch`. `scores`: float32
    [heads, room], which attention leaves: those of the slots of the table, and from number `edges_from` on of the
    edges. `target`: int64 [2], where the mass of the group's first layer begins, 0 = nowhere, and how far apart those
    of KV heads stand in it.
    """

    places: torch.Tensor
    scores: torch.Tensor
    edges_from: int
    target: torch.Tensor


@dataclass(frozen=True)
class PageLists:
    """The page lists of the layers of a group for one step, on the device.

    `position`: int64 [1], of the first row. `shift`: int64 [rows], see `PagedKV.shift`. `table`: int64 [n], the words
    (places.py) of the sealed (or only) pages that are seen. `work`, `edges`: see `Shares`. `into`, `open_into`: int64
    [n], the words of the pages that rows go into, from that of the first row on; 0 = there is none. `first`: the
    position of slot 0 of the first of these. `pasts`: the entries of the table that are read apart, of each run of
    positions (`Asked.own`); `past`: the first run's. `turns`: whether there are second queries, for turned entries;
    `edged`: whether sealed pages may stand in `edges`; `spare`: whether the last rows of the step may be none, for
    which there are no pages. `selection`: where not all is read. `noted`: where a token's probabilities are noted.

    `apart`: where each row is the next one of a sequence of its own. Then `position`, `into` and `open_into` are of
    each row. `work` is int32 [items, 6]: the four numbers of `Shares`, the row, and the number of its partial result,
    of which those from `starts`, int32 [rows + 1], on are a row's. `sealing`, int64 [n]: rows whose pages, or which
    themselves, are sealed.
    """

    position: torch.Tensor
    shift: torch.Tensor
    table: torch.Tensor
    work: torch.Tensor
    edges: torch.Tensor
    into: torch.Tensor
    open_into: torch.Tensor
    first: int = 0
    pasts: tuple[tuple[int, int], ...] = ((0, 0),)
    turns: bool = False
    edged: bool = False
    spare: bool = False
    selection: Selected | None = None
    noted: Noted | None = None
    apart: bool = False
    starts: torch.Tensor | None = None
    sealing: torch.Tensor | None = None

    @property
    def past(self) -> tuple[int, int]:
        return self.pasts[0]


@dataclass(frozen=True)
class DevicePages:
    """One layer's rows; the twin of `PagedKV`, with everything on one device.

    `offset`: bytes from a page's address to this layer's records. `centre`: float32 [kv_heads, dim_k], as in `Basis`.
    `scale_k`, `scale_v`: float32 [kv_heads], for codecs with one scale a head. `angles`: float16 [n, rope_dim], cosines
    then sines at the middle of each CENTRE_ROWS rows of the pages, slot after slot; None without RoPE. `layer`:
    which one it is of the group's layers. `summary`: what tells of the keys of a page, where queries choose.
    Where rows are `apart`, `centre`, `scale_k` and `scale_v` are of each: [rows, kv_heads, ...].
    """

    record: RecordLayout
    lists: PageLists
    offset: int = 0
    open: DevicePages | None = None
    centre: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    angles: torch.Tensor | None = None
    layer: int = 0
    summary: SummaryLayout | None = None

    @property
    def chooses(self) -> bool:
        """Whether the step is a token that does not read all pages of the table."""
        some = self.lists.selection
        return some is not None and some.pages > 0 and len(self.lists.shift) == 1 and not self.lists.apart

    @property
    def rotated(self) -> tuple[bool, bool]:
        """Whether keys and values are kept in the rotated basis; see `PagedKV.rotated`."""
        if self.open is None:
            return False, False
        return self.record.codec_k != self.open.record.codec_k, self.record.codec_v != self.open.record.codec_v

    @property
    def where_rows_go(self) -> tuple[DevicePages, torch.Tensor]:
        """The class that new rows are written to, the open one where there is one, and the words of its pages."""
        return (self, self.lists.into) if self.open is None else (self.open, self.lists.open_into)


class Sealing(Enum):
    """What a step over bound pages seals once its rows are stored: nothing, the pages that it fills, or its one row."""

    NOTHING = 0
    PAGES = 1
    ROW = 2


class BoundStretch(NamedTuple):
    """Rows [lo, hi) of a step over one layer's pages whose lists stand on the device already; the last rows may be
    none. `parts`: programs that each block of queries has, of each head, and of rows `apart` the most that one has.
    `fixes`: whether they fill the sequence's first page, which fixes what pages are sealed with (basis.py)."""

    lo: int
    hi: int
    pages: DevicePages
    parts: int
    sealing: Sealing
    fixes: bool = False

    @property
    def record(self) -> RecordLayout:
        """What pages have of the layer."""
        return self.pages.record


class HostLists(NamedTuple):
    """What `PageLists` has, on the host."""

    shift: np.ndarray
    table: np.ndarray
    shares: Shares
    into: np.ndarray
    open_into: np.ndarray
    turns: bool
    edged: bool
    pasts: tuple[tuple[int, int], ...]
    summaries: np.ndarray
    limits: tuple[int, int, int]
    places: np.ndarray

    @classmethod
    def of(cls, kv: PagedKV, shift: np.ndarray | None, asked: Asked, blocks: Blocks, slots: Slots | None) -> HostLists:
        """The lists of the group of layers that `kv` is one of.

        `shift`: see `Stretch`. `blocks`: positions of the first and of the last query of each block. `slots`: of the
        angles of the pages in `kv.entries` and in `kv.into`; None = there are none.
        """
        size = kv.record.page_size
        of_entries, of_into = slots or (None, None)
        table = Class.of(kv.entries, size, of_entries)
        opened = Class.of(kv.open.entries, size, None) if kv.open else None
        found, into = shares(table, opened, *blocks, asked.window, size), words(kv.into.addresses, of_into)
        found, pasts = found.without_past(asked.past, asked.runs) if asked.past else (found, [(0, 0)])
        found, limits = found.choosing(table.summaries, asked.choose) if asked.choose else (found, (0, 0, 0))
        return cls(
            shift=np.zeros(asked.rows, np.int64) if shift is None else shift,
            table=table.words,
            shares=found.spread(asked.parts) if asked.parts else found,
            into=into,
            open_into=kv.open.into.addresses if kv.open else into,
            turns=any(each.entries.any_turned for each in kv.classes),
            edged=opened is not None and (asked.edged or table.edged(size, asked.window)),
            pasts=tuple(pasts),
            summaries=table.summaries,
            limits=limits,
            places=table.numbers[1],
        )


def page_lists(kv: PagedKV, shift: np.ndarray | None, asked: Asked, device: torch.device | str) -> PageLists:
    """The lists of the group of layers that `kv` is one of, made once for all of them. `shift`: see `Stretch`."""
    if kv.entries.made.get(Asked) != asked:
        n, m = len(kv.entries), len(kv.into.addresses)
        slots = (np.arange(n), np.arange(n, n + m)) if kv.open and kv.record.codec_k.centred else None
        lists = HostLists.of(kv, shift, asked, asked.blocks, slots)
        kv.entries.made.update({Asked: asked, PageLists: _on_device(lists, asked, kv, device)})
    return lists_of_step(kv)


def lists_of_step(kv: PagedKV) -> PageLists:
    """Those that `page_lists` made last."""
    found = kv.entries.made[PageLists]
    assert isinstance(found, PageLists)
    return found


def _on_device(lists: HostLists, asked: Asked, kv: PagedKV, device: torch.device | str) -> PageLists:
    """By one copy. Each array begins at a multiple of 16 bytes: kernels are compiled for that."""
    work, edges = lists.shares
    arrays = {
        "position": np.array([asked.start]), "shift": lists.shift, "table": lists.table, "work": work.view(np.int64),
        "edges": edges, "into": lists.into, "open_into": lists.open_into, "summaries": lists.summaries,
        "limits": np.array(lists.limits, np.int64),
    }  # fmt: skip
    flat = np.concatenate([np.pad(x.reshape(-1), (0, x.size % 2)) for x in arrays.values()])
    parts = torch.from_numpy(flat).to(device).split([x.size + x.size % 2 for x in arrays.values()])
    found = {name: part[: x.size].view(x.shape) for (name, x), part in zip(arrays.items(), parts, strict=True)}
    found["work"] = found["work"].view(torch.int32)
    summaries, limits = found.pop("summaries"), found.pop("limits")
    some = selected(summaries, limits, kv.record.kv_heads, kv.choice.pages) if kv.choice else None
    kinds = lists.turns, lists.edged
    return PageLists(**found, first=kv.into.first, pasts=lists.pasts, turns=kinds[0], edged=kinds[1], selection=some)


def selected(summaries: torch.Tensor, limits: torch.Tensor, kv_heads: int, pages: int) -> Selected:
    """With room for what tokens choose."""
    room, device = -(-len(summaries) // 16) * 16, summaries.device  # kernels read several at a time
    scores, chosen = (torch.zeros(kv_heads, room, dtype=each, device=device) for each in (torch.float32, torch.int64))
    return Selected(summaries, limits, scores, chosen, torch.zeros(kv_heads, dtype=torch.int32, device=device), pages)


def half_angles(angles: Angles, device: torch.device | str) -> torch.Tensor:
    """(cos, sin) float32 [n, rope_dim / 2] -> float16 [n, rope_dim] on the device.

    Sealing takes a mean out of the keys, and attention adds it to the scores, with these same rounded angles.
    """
    return torch.cat(angles, 1).to(device=device, dtype=torch.float16)


def device_pages(
    kv: PagedKV, lists: PageLists, device: torch.device | str, angles: torch.Tensor | None = None
) -> DevicePages:
    """The pages of the runtime as the kernels want them. `angles`: see `DevicePages`, of the pages of `kv.entries` and,
    behind those, of `kv.into`; used where keys are centred."""
    check(kv.record)
    centre, scale_k, scale_v = _basis(kv, device)
    opened = DevicePages(kv.open.record, lists, kv.open.offset) if kv.open else None
    angles = None if centre is None else angles
    told = None if kv.entries.summaries is None else kv.entries.summaries.layout
    return DevicePages(kv.record, lists, kv.offset, opened, centre, scale_k, scale_v, angles, kv.layer, told)


def _basis(kv: PagedKV, device: torch.device | str) -> tuple[torch.Tensor | None, ...]:
    """Copies of the mean and the scales, made once: at addresses such as kernels are compiled for."""
    key = "gpu", kv.basis.known
    if key not in kv.descriptors:
        there = (kv.basis.centre, kv.basis.scale_k, kv.basis.scale_v)
        kv.descriptors[key] = tuple(None if x is None else x.to(device, copy=True) for x in there)
    found: tuple[torch.Tensor | None, ...] = kv.descriptors[key]  # type: ignore[assignment]
    return found


def check(record: RecordLayout) -> None:
    """Raises ValueError for records that the kernels cannot read."""
    for dim in (record.dim_k, record.dim_v):
        if dim % 8 or not 8 <= dim <= MOST_HEAD_DIM:
            most = f"multiples of 8 up to {MOST_HEAD_DIM}"
            raise ValueError(f"the GPU kernels want head dims that are {most}, not {dim}")
    if record.page_size % CENTRE_ROWS:
        raise ValueError(f"the GPU kernels want pages of whole {CENTRE_ROWS} rows, not of {record.page_size}")


def padded(dim: int) -> int:
    """The power of two that a tile of `dim` columns is padded to; a matrix product wants at least 64."""
    return max(64, 1 << (dim - 1).bit_length())
