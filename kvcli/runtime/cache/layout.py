"""`KVLayout`: the bytes of every cache row, page and layer group. The allocator and `kv estimate` both ask it.

Pure integers, no torch. A *page* holds `page_size` consecutive positions for all layers of one *group*; a *record* is
the part of a page that belongs to one layer and one KV head; see `RecordLayout`.

Cache types below 16 bits are *sealed*: a row is written in 16 bits and encoded once, when its page is full. So each
sequence also holds pages of a 16-bit class in such a group: the sinks, and those that are being filled.
Group g's 16-bit class, if it has one, is an arena of its own, behind those of all groups.

A latent is stored once, as the value; the key has beside it the part that RoPE turns. So is a value that is its key,
too (`LayerConfig.turned`), where both have one type of 8 bits or more: smaller types would save nothing, as that part
keeps 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvcli.codecs import Codec, at_least_16, canonical, codec
from kvcli.errors import UsageError
from kvcli.options import READ_ALL, AttendOptions, CacheOptions
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.grouplayout import CENTRE_BYTES, GroupLayout
from kvcli.runtime.cache.selection import Selection
from kvcli.runtime.cache.statelayout import StateLayout, state_arenas
from kvcli.runtime.config import FULL, LATENT, RECURRENT, WINDOWED, LayerConfig, ModelConfig

PAGE_SIZES = (16, 32, 64, 128)
SMALL_WINDOW = 1024  # sliding groups up to this window stay in 16 bits: they cost little and lose most
PageKey = tuple[int, int]  # (arena, page number): which page of a sequence
ADDRESS_BYTES = 8  # a block table holds the address of each page's records, per layer
NOTHING_TO_EVICT = (
    "there is nothing to evict: every layer of this model has a sliding window of its own",
    "leave `evict` out; a larger `ctx` costs no memory once the windows are full",
)
MASS_BYTES, POSITION_BYTES, SCORE_BYTES = 8, 4, 8  # of each row and KV head where rows are selected
MOMENT_BYTES = 8  # of each number of sums over queries
LEAST_LATENT_BITS = 8  # types of fewer have to be forced: see engine/guard.py


Arena = GroupLayout | StateLayout


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model under one choice of cache types and page size."""

    groups: tuple[GroupLayout, ...]
    page_size: int
    states: tuple[StateLayout, ...]  # of layers with a state: the arenas of live ones and of checkpoints, or ()
    slots: tuple[tuple[int, int] | None, ...]  # model layer -> (group, index in the group); None = no rows
    grain: int = 1  # rows are gone on from behind a multiple of so many: see `GpuBackend.block`
    selection: Selection | None = None  # how rows of a sequence are selected by score; None = they are not
    attend: AttendOptions = READ_ALL  # what queries read of the groups that keep everything

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
        keys: list[tuple[str, int, int, int, int, int]] = []
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
        once = k == v and k.bits >= LEAST_LATENT_BITS
        groups = tuple(
            GroupLayout(
                kind,
                tuple(layers),
                heads,
                turned,
                dim_v,
                window,
                at_least_16(k),
                v,
                page_size,
                sinks,
                tail,
                joined=True,
            )
            if turned and once
            else GroupLayout(
                kind, tuple(layers), heads, dim_k, dim_v, window, *_types(k, v, kind, window), page_size, sinks, tail
            )
            for (kind, heads, dim_k, dim_v, window, turned), layers in zip(keys, members, strict=True)
        )
        return cls(groups, page_size, state_arenas(config.layers, page_size), tuple(slots))

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
        return replace(self.apart() if selection else self, selection=selection)

    def attending(self, attend: AttendOptions) -> KVLayout:
        """This layout where queries read only some pages, but in groups with windows or chunks of their own. UsageError
        if all have."""
        if attend == READ_ALL or not (attend.pages or attend.sparse):
            return self
        if self.state_bytes:
            hint = "leave it out"
            raise UsageError(f"{attend.named} cannot be used with layers that keep a state of all tokens", hint)
        if not any(g.kind == FULL for g in self.groups):
            raise UsageError(
                f"{attend.named} changes nothing: no layer of this model reads keys of all tokens",
                "windows, latents and states are read as they are: leave it out",
            )
        groups = (replace(g, summarized=True) if g.kind == FULL else g for g in self.apart().groups)
        return replace(self, groups=tuple(groups), attend=attend)

    @property
    def joined(self) -> bool:
        """Whether values that are keys, too, are stored once."""
        return any(g.joined for g in self.groups)

    def apart(self) -> KVLayout:
        """This layout with keys and values stored apart where values are keys, too."""
        return replace(self, groups=tuple(g.apart() for g in self.groups))

    def by_layer(self, by_layer: bool) -> KVLayout:
        """This layout with chunks by layer, or by page. A GPU walks through one layer's pages at a time, and looks up
        where memory is by stretches of 2 MiB; on a CPU a page in one piece is read and written as it is."""
        return replace(self, groups=tuple(replace(g, by_layer=by_layer) for g in self.groups))

    @property
    def retention(self) -> Retention | None:
        """What stays of a sequence; None = everything, sliding windows aside."""
        return next((g.retention for g in self.groups if g.retention), None)

    @cached_property
    def row_arenas(self) -> tuple[GroupLayout, ...]:
        """Every group, then the 16-bit classes of the sealed ones in the same order."""
        return self.groups + tuple(opened for g in self.groups if (opened := g.open_class))

    @cached_property
    def arenas(self) -> tuple[Arena, ...]:
        """What the pool keeps apart: pages of rows, then live states and checkpoints."""
        return self.row_arenas + self.states

    @cached_property
    def state_arenas(self) -> tuple[int, int] | None:
        """The numbers of the arenas of live states and of checkpoints; None where no layer has a state."""
        return (len(self.row_arenas), len(self.row_arenas) + 1) if self.states else None

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence, whatever its length."""
        return self.states[0].page_bytes if self.states else 0

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
        """Bytes per sequence that never grow and are not in the pool: means of keys, scales of fp8."""
        return sum(g.static_bytes for g in self.groups)

    def pages(self, tokens: int, chunk: int) -> tuple[int, ...]:
        """Pages per group for one sequence of `tokens`."""
        return tuple(g.pages(tokens, chunk) for g in self.groups)

    def arena_pages(self, tokens: int, chunk: int, sequences: int = 1, shared: int = 0) -> tuple[int, ...]:
        """Most pages per arena for `sequences` of `tokens` that have their first `shared` tokens in common.

        Whole shared pages are counted once. Sliding groups hold only a window each: there sharing is not counted. Each
        sequence has a live state, and all of them together what checkpoints there is room for; beside those at ends of
        pages the one before guesses.
        """
        counts, opened = [], []
        for g, n in zip(self.groups, self.pages(tokens, chunk), strict=True):
            kept, sinks = g.shared_pages(min(shared, tokens))
            counts.append(kept + sequences * (n - kept))
            if g.sealed:
                waiting, running = g.open_pages_kept(tokens) - sinks, g.open_pages(tokens, chunk) - sinks
                opened.append(sinks + (sequences - 1) * waiting + running)
        return (*counts, *opened, *self._state_pages(tokens, sequences))

    def _state_pages(self, tokens: int, sequences: int) -> tuple[int, ...]:
        if not self.states:
            return ()
        return sequences, min(self.states[1].limit or 0, sequences * -(-tokens // self.page_size))

    def bytes(self, tokens: int, chunk: int) -> int:
        """Bytes of the pages of one sequence of `tokens`, and of its constants."""
        counts = self.arena_pages(tokens, chunk)
        return self.constant_bytes + sum(n * a.held_bytes for n, a in zip(counts, self.arenas, strict=True))

    def pool_bytes(self, tokens: int, chunk: int, sequences: int = 1, shared: int = 0) -> int:
        """Bytes that a `PagePool` commits for them: whole steps of pages, constants not included."""
        counts = self.arena_pages(tokens, chunk, sequences, shared)
        return sum(a.committed_bytes(n) for n, a in zip(counts, self.arenas, strict=True))

    def table_bytes(self, tokens: int, chunk: int, sequences: int = 1) -> int:
        """Bytes of the block tables: one address per layer and page."""
        counts = self.arena_pages(tokens, chunk)
        entries = sum(n * len(a.layers) for n, a in zip(counts, self.row_arenas, strict=False))
        return sequences * entries * ADDRESS_BYTES

    def contiguous_bytes(self, tokens: int) -> int:
        """Bytes of a cache without pages: a row in each layer for each of `tokens`, all of these types."""
        return tokens * self.token_bytes()

    def token_bytes(self, length: int = 0) -> int:
        """Bytes that one more token costs after `length` tokens: in every group but those whose window is full."""
        return sum(g.token_bytes for g in self.groups if not 0 < g.window <= length)

    def read_bytes(self, tokens: int) -> int:
        """Bytes of rows and scales, and of summaries, that attention reads for one query at the end of `tokens`."""
        return sum(self._read_of(g, tokens) for g in self.groups)

    def _read_of(self, g: GroupLayout, tokens: int) -> int:
        """Of a group."""
        seen = min(g.rows_seen(tokens), self.selection.most(tokens) if self.selection else tokens)
        if not (g.summarized and self.attend.pages):
            return g.token_bytes * seen
        rows = min(seen, attending.most_pages(self.attend) * self.page_size)
        return g.token_bytes * rows + g.summary_bytes * (seen // self.page_size)

    def selection_bytes(self, tokens: int, query_heads: int) -> int:
        """Bytes that selecting rows of a sequence of `tokens` takes: notes, positions; of a layer, rows and scores."""
        if self.selection is None:
            return 0
        groups = [g for g in self.groups if g.kind not in WINDOWED]
        heads = sum(len(g.layers) * g.kv_heads for g in groups)
        scorer = self.selection.scorer
        copies = 2 if scorer.repeats else 1 if scorer.watches else 0
        noted = copies * MASS_BYTES * tokens * heads
        if scorer.queries:
            noted += sum(len(g.layers) * MOMENT_BYTES * query_heads * g.dim_k * (g.dim_k + 1) for g in groups)
        places = POSITION_BYTES * min(tokens, self.selection.stays(tokens)) * heads
        each = max(g.kv_heads * (3 * CENTRE_BYTES * max(g.dim_k, g.dim_v) + 8 * SCORE_BYTES) for g in groups)
        return noted + places + tokens * each


def _group_key(layer: LayerConfig) -> tuple[str, int, int, int, int, int]:
    kind = layer.kind if layer.window or layer.kind not in WINDOWED else FULL
    return kind, layer.kv_heads, layer.dim_k, layer.dim_v, layer.window, layer.turned


def _types(k: Codec, v: Codec, kind: str, window: int) -> tuple[Codec, Codec]:
    """The types of a group: as chosen, but at least 16 bits where a sliding window is small, and for what RoPE turns
    beside latents, whose type is that of keys."""
    if kind == LATENT:
        return at_least_16(k), k
    return (at_least_16(k), at_least_16(v)) if kind in WINDOWED and window <= SMALL_WINDOW else (k, v)


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
