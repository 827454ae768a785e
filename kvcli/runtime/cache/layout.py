"""`KVLayout`: the bytes of every cache row, page and layer group. The allocator and `kv estimate` both ask it.

Pure integers, no torch. A *page* holds `page_size` consecutive positions for all layers of one *group*; a *record* is
the part of a page that belongs to one layer and one KV head: K rows, V rows, then the scales
of K and V where a codec has them.

Cache types below 16 bits are *sealed*: a row is written in 16 bits and encoded once, when its page is full. So each
sequence also holds pages of a 16-bit class in such a group: the sinks, and those that are being filled.
Group g's 16-bit class, if it has one, is an arena of its own, behind those of all groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.errors import UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache.codecs import CodecSpec, canonical, codec
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.grouplayout import GroupLayout, at_least_16
from kvcli.runtime.config import FULL, RECURRENT, SLIDING, LayerConfig, ModelConfig

PAGE_SIZES = (16, 32, 64, 128)
SMALL_WINDOW = 1024  # sliding groups up to this window stay in 16 bits: they cost little and lose most
PageKey = tuple[int, int]  # (arena, page number): which page of a sequence
ADDRESS_BYTES = 8  # a block table holds the address of each page's records, per layer


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model under one choice of cache types and page size."""

    groups: tuple[GroupLayout, ...]
    page_size: int
    state_bytes: int  # constant per sequence (recurrent layers)
    slots: tuple[tuple[int, int] | None, ...]  # model layer -> (group, index in the group); None = no rows

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        type_k: str,
        type_v: str,
        page_size: int = 64,
        *,
        sinks: int = 1,
        tail: int = 1,
    ) -> KVLayout:
        """The layout of `config` with cache types `type_k`/`type_v` (names in CODEC_SPECS).

        `sinks`, `tail`: see GroupLayout. Raises UsageError for an unknown type or page size, and for a tail that
        cannot be.
        """
        if page_size not in PAGE_SIZES:
            raise UsageError(f"page size {page_size} is not available", f"choose from {_listed(PAGE_SIZES)}")
        k, v = codec(type_k), codec(type_v)
        if tail not in (0, 1) or sinks < 0 or (tail == sinks == 0 and (k.sealed or v.sealed)):
            raise UsageError(
                f"a 16-bit tail of {tail} pages with {sinks} pages of sinks is not possible",
                "the tail is one page or none; without one there must be sinks, which fix the scales and means",
            )
        keys: list[tuple[str, int, int, int, int]] = []
        members: list[list[int]] = []
        slots: list[tuple[int, int] | None] = []
        for i, layer in enumerate(config.layers):
            if layer.kind == RECURRENT:
                slots.append(None)
            elif layer.shares_kv_with is not None:
                slots.append(slots[layer.shares_kv_with])
            else:
                key = _group_key(layer)
                if key not in keys:
                    keys.append(key)
                    members.append([])
                group = keys.index(key)
                slots.append((group, len(members[group])))
                members[group].append(i)
        groups = tuple(
            GroupLayout(
                kind, tuple(layers), heads, dim_k, dim_v, window, *_types(k, v, kind, window), page_size, sinks, tail
            )
            for (kind, heads, dim_k, dim_v, window), layers in zip(keys, members, strict=True)
        )
        return cls(groups, page_size, sum(layer.state_bytes for layer in config.layers), tuple(slots))

    @classmethod
    def of_options(cls, config: ModelConfig, cache: CacheOptions) -> KVLayout:
        """The layout that these options name; "auto" is 16 bits. Raises UsageError, see `build`."""
        types = canonical(cache.type_k), canonical(cache.type_v)
        return cls.build(config, *types, cache.page_size, sinks=cache.sinks, tail=cache.tail)

    def evicting(self, retention: Retention | None) -> KVLayout:
        """The same with rows evicted, but in sliding groups: these have windows of their own. UsageError if all are."""
        if retention and all(g.kind == SLIDING for g in self.groups):
            raise UsageError(
                "there is nothing to evict: every layer of this model has a sliding window of its own",
                "leave --evict out; a larger -c costs no memory once the windows are full",
            )
        groups = (g if g.kind == SLIDING else replace(g, retention=retention) for g in self.groups)
        return replace(self, groups=tuple(groups))

    def by_layer(self, by_layer: bool) -> KVLayout:
        """The same with chunks by layer, or by page. A GPU walks through one layer's pages at a time, and looks up
        where memory is by stretches of 2 MiB; on a CPU a page in one piece is read and written as it is."""
        return replace(self, groups=tuple(replace(g, by_layer=by_layer) for g in self.groups))

    @property
    def retention(self) -> Retention | None:
        """What stays of a sequence; None = everything, sliding windows aside."""
        return next((g.retention for g in self.groups if g.retention), None)

    @cached_property
    def arenas(self) -> tuple[GroupLayout, ...]:
        """What the pool keeps apart: every group, then the 16-bit classes of the sealed ones in the same order."""
        return self.groups + tuple(opened for g in self.groups if (opened := g.open_class()))

    def open_arena(self, group: int) -> int | None:
        """The number of the group's 16-bit class, None if it is not sealed."""
        return self._open_arenas[group]

    @cached_property
    def _open_arenas(self) -> tuple[int | None, ...]:
        numbers, following = [], len(self.groups)
        for g in self.groups:
            numbers.append(following if g.sealed else None)
            following += g.sealed
        return tuple(numbers)

    @property
    def constant_bytes(self) -> int:
        """Bytes per sequence that never grow and are not in the pool: recurrent state, means of keys, scales of fp8."""
        return self.state_bytes + sum(g.static_bytes for g in self.groups)

    def pages(self, tokens: int, chunk: int) -> tuple[int, ...]:
        """Pages per group for one sequence of `tokens`."""
        return tuple(g.pages(tokens, chunk) for g in self.groups)

    def arena_pages(self, tokens: int, chunk: int, sequences: int = 1, shared: int = 0) -> tuple[int, ...]:
        """Most pages per arena for `sequences` of `tokens` that have their first `shared` tokens in common.

        Whole shared pages are counted once. Sliding groups hold only a window each: there sharing is not counted.
        """
        counts, opened = [], []
        for g, n in zip(self.groups, self.pages(tokens, chunk), strict=True):
            kept, sinks = g.shared_pages(min(shared, tokens))
            counts.append(kept + sequences * (n - kept))
            if g.sealed:
                waiting, running = g.open_pages_kept(tokens) - sinks, g.open_pages(tokens, chunk) - sinks
                opened.append(sinks + (sequences - 1) * waiting + running)
        return (*counts, *opened)

    def bytes(self, tokens: int, chunk: int) -> int:
        """Bytes of the pages of one sequence of `tokens`, and of its constants."""
        counts = self.arena_pages(tokens, chunk)
        return self.constant_bytes + sum(n * a.page_bytes for n, a in zip(counts, self.arenas, strict=True))

    def pool_bytes(self, tokens: int, chunk: int, sequences: int = 1, shared: int = 0) -> int:
        """Bytes that a `PagePool` commits for them: whole steps of pages, constants not included."""
        counts = self.arena_pages(tokens, chunk, sequences, shared)
        return sum(a.committed_bytes(n) for n, a in zip(counts, self.arenas, strict=True))

    def table_bytes(self, tokens: int, chunk: int, sequences: int = 1) -> int:
        """Bytes of the block tables: one address per layer and page."""
        counts = self.arena_pages(tokens, chunk)
        entries = sum(n * len(a.layers) for n, a in zip(counts, self.arenas, strict=True))
        return sequences * entries * ADDRESS_BYTES

    def contiguous_bytes(self, tokens: int) -> int:
        """Bytes of a cache without pages: a row in each layer for each of `tokens`, all of these types."""
        return tokens * self.token_bytes()

    def token_bytes(self) -> int:
        """Bytes one more token costs in every group while no window is full."""
        return sum(g.token_bytes for g in self.groups)

    def read_bytes(self, tokens: int) -> int:
        """Bytes of rows and scales that attention reads for one query at the end of `tokens`."""
        return sum(g.token_bytes * g.rows_seen(tokens) for g in self.groups)


def _group_key(layer: LayerConfig) -> tuple[str, int, int, int, int]:
    kind = layer.kind if layer.window or layer.kind != SLIDING else FULL
    return kind, layer.kv_heads, layer.dim_k, layer.dim_v, layer.window


def _types(k: CodecSpec, v: CodecSpec, kind: str, window: int) -> tuple[CodecSpec, CodecSpec]:
    """The types of a group: as chosen, but at least 16 bits where a sliding window is small."""
    return (at_least_16(k), at_least_16(v)) if kind == SLIDING and window <= SMALL_WINDOW else (k, v)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
