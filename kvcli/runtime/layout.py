"""`KVLayout`: the bytes of every cache row, page and layer group. The allocator and `kv estimate` both ask it.

Pure integers, no torch. A *page* holds `page_size` consecutive positions for all layers of one *group*; a *record* is
the part of a page that belongs to one layer and one KV head: K rows, V rows, then scales where a codec has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcli.errors import UsageError
from kvcli.runtime.config import FULL, RECURRENT, SLIDING, LayerConfig, ModelConfig

PAGE_SIZES = (16, 32, 64, 128)
ALIGN = 128  # bytes a record is rounded up to


@dataclass(frozen=True)
class CodecSpec:
    """Storage of one cache type: bits per element, bytes of scale per (token, head), elements per packing unit."""

    name: str
    bits: int
    scale_bytes: int = 0
    packing: int = 1

    def row_bytes(self, dim: int) -> int:
        """Bytes of one (token, head) row of `dim` elements without its scale; padding counts."""
        padded = -(-dim // self.packing) * self.packing
        return padded * self.bits // 8


CODEC_SPECS: dict[str, CodecSpec] = {
    "f32": CodecSpec("f32", 32),
    "f16": CodecSpec("f16", 16),
    "bf16": CodecSpec("bf16", 16),
}


@dataclass(frozen=True)
class GroupLayout:
    """Layers that share one page list: same kind, heads, dims and window. `layers` are model layer numbers."""

    kind: str
    layers: tuple[int, ...]
    kv_heads: int
    dim_k: int
    dim_v: int
    window: int
    codec_k: CodecSpec
    codec_v: CodecSpec
    page_size: int

    @property
    def k_row_bytes(self) -> int:
        return self.codec_k.row_bytes(self.dim_k)

    @property
    def v_row_bytes(self) -> int:
        return self.codec_v.row_bytes(self.dim_v)

    @property
    def v_offset(self) -> int:
        """Where the V rows of a record start, in bytes."""
        return self.page_size * self.k_row_bytes

    @property
    def record_bytes(self) -> int:
        scales = self.page_size * (self.codec_k.scale_bytes + (self.codec_v.scale_bytes if self.dim_v else 0))
        return -(-(self.v_offset + self.page_size * self.v_row_bytes + scales) // ALIGN) * ALIGN

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's records in a page."""
        return self.kv_heads * self.record_bytes

    @property
    def page_bytes(self) -> int:
        return len(self.layers) * self.layer_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's rows and scales in all layers of the group, without page rounding."""
        scales = self.codec_k.scale_bytes + (self.codec_v.scale_bytes if self.dim_v else 0)
        return len(self.layers) * self.kv_heads * (self.k_row_bytes + self.v_row_bytes + scales)

    def pages(self, tokens: int, chunk: int) -> int:
        """Most pages that a sequence of `tokens` holds at once when it is fed in chunks of at most `chunk` tokens.

        A sliding group needs the pages of its window behind the first query of a chunk, and those of the chunk.
        """
        whole = -(-tokens // self.page_size)
        if self.kind != SLIDING:
            return whole
        return min(whole, -(-(self.window - 1) // self.page_size) + -(-chunk // self.page_size))

    def first_page(self, position: int) -> int:
        """The oldest page that a query at `position`, or any later one, can see."""
        if self.kind != SLIDING:
            return 0
        return max(0, position - self.window + 1) // self.page_size


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model under one choice of cache types and page size."""

    groups: tuple[GroupLayout, ...]
    page_size: int
    state_bytes: int  # constant per sequence (recurrent layers)
    slots: tuple[tuple[int, int] | None, ...]  # model layer -> (group, index in the group); None = no rows

    @classmethod
    def build(cls, config: ModelConfig, type_k: str, type_v: str, page_size: int = 64) -> KVLayout:
        """The layout of `config` with cache types `type_k`/`type_v` (names in CODEC_SPECS).

        Raises UsageError for an unknown type or page size.
        """
        if page_size not in PAGE_SIZES:
            raise UsageError(f"page size {page_size} is not available", f"choose from {_listed(PAGE_SIZES)}")
        k, v = _codec(type_k), _codec(type_v)
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
            GroupLayout(kind, tuple(layers), heads, dim_k, dim_v, window, k, v, page_size)
            for (kind, heads, dim_k, dim_v, window), layers in zip(keys, members, strict=True)
        )
        return cls(groups, page_size, sum(layer.state_bytes for layer in config.layers), tuple(slots))

    def pages(self, tokens: int, chunk: int) -> tuple[int, ...]:
        """Pages per group for one sequence of `tokens`."""
        return tuple(g.pages(tokens, chunk) for g in self.groups)

    def bytes(self, tokens: int, chunk: int) -> int:
        """Bytes of the pages of one sequence of `tokens`, and of its constant state."""
        return self.state_bytes + sum(n * g.page_bytes for n, g in zip(self.pages(tokens, chunk), self.groups, strict=True))

    def token_bytes(self) -> int:
        """Bytes one more token costs in every group while no window is full."""
        return sum(g.token_bytes for g in self.groups)


def _group_key(layer: LayerConfig) -> tuple[str, int, int, int, int]:
    kind = layer.kind if layer.window or layer.kind != SLIDING else FULL
    return kind, layer.kv_heads, layer.dim_k, layer.dim_v, layer.window


def _codec(name: str) -> CodecSpec:
    spec = CODEC_SPECS.get(name)
    if spec is None:
        raise UsageError(f"unknown cache type '{name}'", f"cache types: auto, {_listed(CODEC_SPECS)}")
    return spec


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values)
