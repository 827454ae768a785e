"""A layout with a sliding and a full group, and rows that say which token, position and layer they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from kernelcases import page as page_of

from kvcli.kernels import PagedKV
from kvcli.kernels.reference.store import store
from kvcli.runtime.cache import grouplayout as layouts
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool, _Arena
from kvcli.runtime.cache.sequence import Part, Sequence, chunk_end
from kvcli.runtime.config import FULL, SLIDING, LayerConfig, ModelConfig
from kvcli.runtime.engine.engine import Engine

SIZE, WINDOW = 16, 21
KINDS = (SLIDING, FULL, SLIDING)  # groups are numbered as they appear: 0 slides, 1 is full


class SmallPool(PagePool):
    """Commits little memory at a time: in a chunk of the usual size are thousands of tiny pages, each a tensor."""

    def _grow(self, arena: _Arena) -> bool:
        with mock.patch.object(layouts, "CHUNK_BYTES", 1 << 14):
            return super()._grow(arena)


def tiny_layout(window: int = WINDOW, size: int = SIZE) -> KVLayout:
    layers = tuple(LayerConfig(kind, 1, 2, 2, window if kind == SLIDING else 0) for kind in KINDS)
    config = ModelConfig("llama", "tiny", 10, 2, 2, 1, 4096, 1e-5, layers, 1.0)
    return KVLayout.build(config, "f32", "f32", size)


def chunks(start: int, end: int, ubatch: int, size: int = SIZE) -> Iterator[tuple[int, int]]:
    """As the engine cuts a prompt."""
    engine = SimpleNamespace(chunk_end=lambda start, end: chunk_end(start, end, ubatch, size))
    return Engine.chunks(engine, start, end)  # type: ignore[arg-type]


def rows(tokens: list[int], start: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What the test keeps for tokens at positions start..: [T, 1, 2] keys and values that name both and the layer."""
    token, position = (
        torch.tensor(tokens, dtype=torch.float32),
        torch.arange(start, start + len(tokens)).float(),
    )
    return torch.stack([token, position], 1)[:, None], torch.stack([token + 0.5, position + 1000 * layer], 1)[:, None]


def write(part: Part, tokens: list[int]) -> None:
    for layer in range(len(KINDS)):
        store(*rows(tokens, part.start, layer), part.kv(layer), part.start)


def append(seq: Sequence, tokens: list[int]) -> None:
    write(seq.reserve(tokens), tokens)
    seq.commit(tokens)


def read(kv: PagedKV, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [start, end) of a layer, float32 [T, 1, 2] each."""
    size, parts = kv.record.page_size, []
    for page in range(start // size, -(-end // size)):
        k, v = kv.slots(page_of(kv, page), max(0, start - page * size), min(size, end - page * size))
        parts.append([x[0].contiguous().view(torch.float32) for x in (k, v)])
    k, v = (torch.cat(x)[:, None] for x in zip(*parts, strict=True))
    return k, v


def check_rows(seq: Sequence, tokens: list[int]) -> None:
    """Every row that a query at the sequence's end, or a later one, can see."""
    assert seq.tokens == tokens and seq.length == len(tokens)
    index = {0: 0, 1: 0}
    for layer, kind in enumerate(KINDS):
        group = 0 if kind == SLIDING else 1
        first = max(0, seq.length - WINDOW + 1) if kind == SLIDING else 0
        if first < seq.length:
            kv = seq.views()[group][index[group]]
            for found, expected in zip(read(kv, first, seq.length), rows(tokens[first:], first, layer), strict=True):
                assert torch.equal(found, expected), f"layer {layer} of {len(tokens)} tokens"
        index[group] += 1
