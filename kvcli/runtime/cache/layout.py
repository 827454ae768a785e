"""`KVLayout`: the bytes of every cache row, page and layer group. The allocator and `kv estimate` both ask it.

Pure integers, no torch. A *page* holds `page_size` consecutive positions for all layers of one *group*; a *record* is
the part of a page that belongs to one layer and one KV head; see `RecordLayout`.

Cache types below 16 bits are *sealed*: a row is written in 16 bits and encoded once, when its page is full. So each
sequence also holds pages of a 16-bit class in such a group: the sinks, and those that are being filled.
Group g's 16-bit class, if it has one, is an arena of its own, behind those of all groups.

A latent is stored once, as the value; the key has beside it the part that RoPE turns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.codecs import Codec, RecordLayout, at_least_16, canonical, codec
from kvcli.errors import UsageError
from kvcli.options import CacheOptions
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.selection import Selection
from kvcli.runtime.config import CHUNKED, FULL, LATENT, RECURRENT, SLIDING, WINDOWED, LayerConfig, ModelConfig

PAGE_SIZES = (16, 32, 64, 128)
SMALL_WINDOW = 1024  # sliding groups up to this window stay in 16 bits: they cost little and lose most
PageKey = tuple[int, int]  # (arena, page number): which page of a sequence
ADDRESS_BYTES = 8  # a block table holds the address of each page's records, per layer
CHUNK_BYTES = 2 << 20  # the pool commits memory in steps of at most this, and at least one page
RUN_BYTES = 1 << 20  # where chunks are by layer: in steps of at least this of each layer
NOTHING_TO_EVICT = (
    "there is nothing to evict: every layer of this model has a sliding window of its own",
    "leave `evict` out; a larger `ctx` costs no memory once the windows are full",
)
MASS_BYTES, POSITION_BYTES, SCORE_BYTES = 8, 4, 8  # of each row and KV head where rows are selected
LEAST_LATENT_BITS = 8  # types of fewer have to be forced: see engine/guard.py
CENTRE_BYTES = 4  # an element of the mean of keys is a float32


@dataclass(frozen=True)
class GroupLayout:
    """Layers that share one page list: same kind, heads, dims and window. `layers` are model layer numbers. `window`:
    see `LayerConfig`."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int
    codec_k: Codec
    codec_v: Codec
    page_size: int
    sinks: int = 1  # in a sealed group: pages at the start of a sequence that stay in 16 bits
    tail: int = 1  # in a sealed group: 1 = a query's own page is read in 16 bits, 0 = rows are sealed one by one
    retention: Retention | None = None  # what stays where old rows are evicted; None = they are not
    by_layer: bool = False  # a chunk of the pool has its pages' records of one layer, then those of the next

    @cached_property
    def record(self) -> RecordLayout:
        """What each page has of one layer and head."""
        return RecordLayout.of(
            self.page_size, self.kv_heads, self.dim_k, self.dim_v, self.codec_k, self.codec_v, self.kind == LATENT
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's records in a page."""
        return self.kv_heads * self.record.record_bytes

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows and scales in all layers of the group, without page rounding."""
        return len(self.layers) * self.kv_heads * self.record.token_bytes

    @property
    def static_bytes(self) -> int:
        """Bytes per sequence that stand outside the pages: the scales of fp8, the means of centred keys."""
        means = self.dim_k * CENTRE_BYTES if self.codec_k.centred else 0
        each = means + self.codec_k.static_bytes + (self.codec_v.static_bytes if self.dim_v else 0)
        return len(self.layers) * self.kv_heads * each

    @property
    def reach(self) -> int:
        """The sliding window that kernels apply, 0 = none; chunks are told apart by the page list."""
        return self.window if self.kind == SLIDING else 0

    @property
    def pages_per_chunk(self) -> int:
        """Pages that the pool commits at a time."""
        return -(-RUN_BYTES // self.layer_bytes) if self.by_layer else max(1, CHUNK_BYTES // self.page_bytes)

    @property
    def layer_stride(self) -> int:
        """Bytes from a page's records of one layer to those of the next."""
        return self.layer_bytes * self.pages_per_chunk if self.by_layer else self.layer_bytes

    def committed_bytes(self, pages: int) -> int:
        """Bytes that the pool has committed once `pages` pages were in use at a time."""
        return -(-pages // self.pages_per_chunk) * self.pages_per_chunk * self.page_bytes

    @property
    def sealed(self) -> bool:
        """Whether full pages are encoded, which needs open ones beside them."""
        return self.codec_k.sealed or self.codec_v.sealed

    def open_pages(self, tokens: int, chunk: int) -> int:
        """Most 16-bit pages of a sequence of `tokens` in a sealed group: the sinks, and those of the step at hand."""
        if not self.sealed:
            return 0
        sinks, whole, keeps = self.sinks, -(-tokens // self.page_size), self.retention
        if keeps:
            sinks = min(sinks, self.kept_pages + keeps.pages_behind)
        return min(whole, sinks + -(-chunk // self.page_size))

    def open_pages_kept(self, tokens: int) -> int:
        """16-bit pages of a sequence of `tokens` between steps: the sinks, and the page being filled."""
        if not self.sealed:
            return 0
        being_filled = bool(self.tail and tokens % self.page_size and tokens // self.page_size >= self.sinks)
        evicted = max(0, min(self.sinks, self.first_page(tokens)) - self.kept_pages) if self.retention else 0
        return min(-(-tokens // self.page_size), self.sinks) - evicted + being_filled

    def sealed_rows(self, length: int) -> int:
        """How many of the first `length` rows are sealed, or would be if they were not sinks."""
        return length // self.page_size * self.page_size if self.tail else length

    def newly_sealed(self, start: int, end: int) -> tuple[int, int]:
        """The rows [first, last) that are sealed as rows [start, end) come; there are none where first >= last."""
        first, last = (max(self.sealed_rows(n), self.sinks * self.page_size) for n in (start, end))
        return first, last

    def open_class(self) -> GroupLayout | None:
        """These layers in 16 bits, for the sinks and for pages that are being filled; None if not sealed."""
        if not self.sealed:
            return None
        return replace(self, codec_k=at_least_16(self.codec_k), codec_v=at_least_16(self.codec_v))

    def pages(self, tokens: int, chunk: int) -> int:
        """Most pages that a sequence of `tokens` holds at once when it is fed in chunks of at most `chunk` tokens.

        A window, of a sliding group or of a retention, needs the pages behind the first query of a chunk, and those of
        the chunk. Kept pages stand before it.
        """
        whole = -(-tokens // self.page_size)
        if self.sealed:  # only full pages are sealed, and the sinks never
            whole = max(0, -(-self.sealed_rows(tokens) // self.page_size) - self.sinks)
        of_chunk = -(-chunk // self.page_size)
        if self.retention:
            kept = self.kept_pages - min(self.kept_pages, self.sinks if self.sealed else 0)
            return min(whole, kept + self.pages_behind + of_chunk)
        return whole if self.kind not in WINDOWED else min(whole, self.pages_behind + of_chunk)

    @property
    def pages_behind(self) -> int:
        """Most pages, of a sliding window or that of a retention, behind that of a step's first query."""
        return self.retention.pages_behind if self.retention else -(-(self.window - 1) // self.page_size)

    def shared_pages(self, tokens: int) -> tuple[int, int]:
        """Pages that sequences with the same first `tokens` hold in common: of the group, and sinks in 16 bits."""
        if self.kind in WINDOWED:
            return 0, 0
        whole = tokens // self.page_size
        if self.retention:  # each sequence has a window of its own
            whole = min(whole, self.kept_pages)
        sinks = min(whole, self.sinks) if self.sealed else 0
        return whole - sinks, sinks

    @property
    def kept_pages(self) -> int:
        """Pages at the start of a sequence that stay where others are evicted."""
        return self.retention.kept_pages if self.retention else 0

    @property
    def windowed(self) -> bool:
        """Whether a sequence lets go of pages as it grows."""
        return self.kind in WINDOWED or self.retention is not None

    def first_page(self, position: int) -> int:
        """The oldest page that a query at `position`, or any later one, can see, kept pages aside."""
        if self.retention:
            return self.retention.start(position) // self.page_size
        return self.first_row(position) // self.page_size

    def first_row(self, position: int) -> int:
        """The oldest row that a query at `position` sees in a layer with a window or chunks; 0 in others."""
        if self.kind == CHUNKED:
            return position // self.window * self.window
        return max(0, position - self.window + 1) if self.kind == SLIDING else 0

    def chunk_start(self, position: int) -> int:
        """Where the chunk of a query at `position` begins; 0 in layers without chunks."""
        return self.first_row(position) if self.kind == CHUNKED else 0

    def held_pages(self, tokens: int) -> list[int]:
        """Numbers of the pages that a sequence of `tokens` holds between steps: kept ones, and those of the window."""
        first = self.first_page(tokens)
        return [*range(min(first, self.kept_pages)), *range(first, -(-tokens // self.page_size))]

    def rows_in_use(self, number: int, tokens: int) -> int:
        """Rows of page `number` that the token behind `tokens` sees, or a later one may."""
        first, end, window = number * self.page_size, min((number + 1) * self.page_size, tokens), 0
        if self.retention:
            window = self.retention.start(tokens)
        else:
            window = self.first_row(tokens)
        kept = min(self.retention.keep, window, end) - first if self.retention else 0
        return max(0, kept) + max(0, end - max(first, window))

    def rows_seen(self, tokens: int) -> int:
        """Rows that the last of `tokens` sees."""
        if self.retention:
            return tokens - self.retention.gap(max(0, tokens - 1))
        return tokens - self.first_row(max(0, tokens - 1))


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model under one choice of cache types and page size."""

    groups: tuple[GroupLayout, ...]
    page_size: int
    state_bytes: int  # constant per sequence (recurrent layers)
    slots: tuple[tuple[int, int] | None, ...]  # model layer -> (group, index in the group); None = no rows
    grain: int = 1  # rows are gone on from behind a multiple of so many: see `GpuBackend.block`
    selection: Selection | None = None  # how rows of a sequence are selected by score; None = they are not

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
        """The layout of `config` with cache types `type_k`/`type_v` (names in CODECS).

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
        """The layout that these options name; "auto" is 16 bits. Raises UsageError, see `build`, also for two types of
        latents."""
        types = canonical(cache.type_k), canonical(cache.type_v)
        if cache.type_v != "auto" and types[0] != types[1] and all(x.kind == LATENT for x in config.layers):
            what = f"latents are keys and values at once, and cannot be {types[0]} as keys and {types[1]} as values"
            raise UsageError(what, "`type_k` is their type: leave `type_v` out")
        return cls.build(config, *types, cache.page_size, sinks=cache.sinks, tail=cache.tail)

    def evicting(self, retention: Retention | None) -> KVLayout:
        """This layout with rows evicted, but in groups with windows or chunks of their own. UsageError if all have."""
        if retention and all(g.kind in WINDOWED for g in self.groups):
            raise UsageError(*NOTHING_TO_EVICT)
        groups = (g if g.kind in WINDOWED else replace(g, retention=retention) for g in self.groups)
        return replace(self, groups=tuple(groups))

    def selecting(self, selection: Selection | None) -> KVLayout:
        """This layout with rows selected by score, but in groups as in `evicting`, which says what is raised."""
        if selection and all(g.kind in WINDOWED for g in self.groups):
            raise UsageError(*NOTHING_TO_EVICT)
        if selection and any(g.kind == LATENT for g in self.groups):
            raise UsageError(f"{selection.policy} does not select latents, which all heads share", "`evict=sink` does")
        return replace(self, selection=selection)

    def by_layer(self, by_layer: bool) -> KVLayout:
        """This layout with chunks by layer, or by page. A GPU walks through one layer's pages at a time, and looks up
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

    def token_bytes(self, length: int = 0) -> int:
        """Bytes that one more token costs after `length` tokens: in every group but those whose window is full."""
        return sum(g.token_bytes for g in self.groups if not 0 < g.window <= length)

    def read_bytes(self, tokens: int) -> int:
        """Bytes of rows and scales that attention reads for one query at the end of `tokens`."""
        most = self.selection.most(tokens) if self.selection else tokens
        return sum(g.token_bytes * min(g.rows_seen(tokens), most) for g in self.groups)

    def selection_bytes(self, tokens: int) -> int:
        """Bytes that selecting rows of a sequence of `tokens` takes: notes, positions; of a layer, rows and scores."""
        if self.selection is None:
            return 0
        groups = [g for g in self.groups if g.kind not in WINDOWED]
        heads = sum(len(g.layers) * g.kv_heads for g in groups)
        noted = MASS_BYTES * tokens * heads if self.selection.scorer.watches else 0
        places = POSITION_BYTES * min(tokens, self.selection.stays(tokens)) * heads
        each = max(g.kv_heads * (3 * CENTRE_BYTES * max(g.dim_k, g.dim_v) + 8 * SCORE_BYTES) for g in groups)
        return noted + places + tokens * each


def _group_key(layer: LayerConfig) -> tuple[str, int, int, int, int]:
    kind = layer.kind if layer.window or layer.kind not in WINDOWED else FULL
    return kind, layer.kv_heads, layer.dim_k, layer.dim_v, layer.window


def _types(k: Codec, v: Codec, kind: str, window: int) -> tuple[Codec, Codec]:
    """The types of a group: as chosen, but at least 16 bits where a sliding window is small, and for what RoPE turns
    beside latents, whose type is that of keys."""
    if kind == LATENT:
        return at_least_16(k), k
    return (at_least_16(k), at_least_16(v)) if kind in WINDOWED and window <= SMALL_WINDOW else (k, v)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
