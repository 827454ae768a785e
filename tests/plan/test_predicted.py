"""Predicted bytes are allocated bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plancases import CONFIGS, TYPES, WEIGHTS, each_config, layout_of

from kvcli.runtime.cache.grouplayout import CHUNK_BYTES
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.plan.plan import Setting

# --- predicted == allocated ---


def steps(layout: KVLayout, tokens: int, chunk: int) -> Iterator[int]:
    """Steps as the engine cuts them, with one begun behind the sinks, and one where a window is just full: then most is
    held."""
    size = layout.page_size
    window = max((g.window for g in layout.groups), default=0)
    turns = sorted((layout.groups[0].sinks * size, -(-max(0, window - 1) // size) * size))
    start = 0
    while start < tokens:
        end = min([tokens, *(turn for turn in turns if turn > start)])
        stop = min(end, start + chunk, (start // size + -(-chunk // size)) * size)
        yield stop - start
        start = stop


def allocated(layout: KVLayout, tokens: int, chunk: int, sequences: int = 1) -> int:
    """Bytes that a real pool commits for sequences of `tokens`, with the open pages of sealed groups."""
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence

    pool = PagePool(layout)
    made = []
    for _ in range(sequences):
        seq = Sequence(pool)
        made.append(seq)
        for n in steps(layout, tokens, chunk):
            ids = [0] * n
            seq.reserve(ids)
            seq.commit(ids)
    assert all(seq.length == tokens for seq in made)
    return pool.committed_bytes + _room_for_checkpoints(pool, tokens, chunk, sequences)


def _room_for_checkpoints(pool: Any, tokens: int, chunk: int, sequences: int) -> int:
    """Bytes that are planned for checkpoints of other prompts, and for a live state that was not needed yet."""
    layout = pool.layout
    if layout.state_arenas is None:
        return 0
    pages, room = layout.arena_pages(tokens, chunk, sequences), 0
    for arena in layout.state_arenas:  # a step that ends with a page leaves its state in a checkpoint alone
        free = pages[arena] - pool.peak(arena)
        assert free >= 0
        room += free * layout.arenas[arena].page_bytes
    return room


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVLayout, int, int]:
    """A layout, a chunk and a context at or beside one of the layout's boundaries."""
    name = draw(st.sampled_from(sorted(CONFIGS)))
    type_k, type_v = draw(st.sampled_from(TYPES)), draw(st.sampled_from(TYPES))
    size = draw(st.sampled_from((16, 32, 64)))
    chunk = draw(st.sampled_from((1, 16, 100, 512)))
    tail, sinks = draw(st.sampled_from(((1, 1), (1, 0), (1, 3), (0, 1), (0, 2))))
    layout = layout_of(name, type_k, type_v, size, tail=tail, sinks=sinks)
    window = max((g.window for g in layout.groups), default=0)
    per_chunk = layout.groups[0].pages_per_chunk
    marks = [size, 3 * size, window, window + chunk, window + chunk + size, (per_chunk % 50) * size]
    tokens = max(1, draw(st.sampled_from(marks)) + draw(st.sampled_from((-1, 0, 1))))
    return layout, chunk, tokens


@pytest.mark.slow
@settings(max_examples=60)
@given(cases())
def test_predicted_bytes_are_allocated(case: tuple[KVLayout, int, int]) -> None:
    layout, chunk, tokens = case
    assert allocated(layout, tokens, chunk) == layout.pool_bytes(tokens, chunk)


@each_config
@pytest.mark.parametrize("kind", TYPES)
def test_predicted_bytes_are_allocated_for_every_type(name: str, kind: str) -> None:
    layout = layout_of(name, kind)
    assert allocated(layout, 700, 128) == layout.pool_bytes(700, 128)


@pytest.mark.parametrize("name", ["llama", "gemma3", "odd window"])
def test_predicted_bytes_of_several_sequences(name: str) -> None:
    layout = layout_of(name, "int8", "int4", 16)
    assert allocated(layout, 333, 64, sequences=3) == layout.pool_bytes(333, 64, sequences=3)


@pytest.mark.parametrize("kind", ("f32", "int4"))
@pytest.mark.parametrize(("tail", "sinks"), ((1, 1), (1, 0), (1, 4), (0, 1), (0, 4), (1, 20), (0, 20)))
def test_a_shared_prefix_is_allocated_once(kind: str, tail: int, sinks: int) -> None:
    from kvcli.runtime.cache.pool import PagePool
    from kvcli.runtime.cache.sequence import Sequence

    layout = layout_of("llama", kind, page_size=16, tail=tail, sinks=sinks)
    pool = PagePool(layout)
    first = Sequence(pool)
    for n in steps(layout, 150, 16):
        first.reserve([0] * n)
        first.commit([0] * n)
    others = [first.fork() for _ in range(9)]
    for seq in (first, *others):
        for n in (10, 5):  # to the end of the page, and on
            seq.reserve([1] * n)
            seq.commit([1] * n)
    planned = layout.arena_pages(165, 16, sequences=10, shared=150)
    assert [pool.peak(a) for a in range(len(layout.arenas))] == list(planned)
    assert pool.committed_bytes == layout.pool_bytes(165, 16, sequences=10, shared=150)
    assert pool.committed_bytes < layout.pool_bytes(165, 512, sequences=10)


@pytest.mark.parametrize("name", ["llama", "gemma3", "MHA", "MQA"])
@pytest.mark.parametrize(("kind", "least"), [("int8", 704), ("int4", 384)])
def test_a_smaller_type_takes_less_at_every_context(name: str, kind: str, least: int) -> None:
    """From `least` tokens on, and never two pages more: a short prompt is open and sealed at the same time."""
    setting = Setting(CONFIGS[name], WEIGHTS)
    layout, base = layout_of(name, kind), layout_of(name)
    allowed = 2 * sum(g.page_bytes for g in base.groups)
    for tokens in range(1, 4096, 13):
        more = layout.bytes(tokens, setting.step(layout)) - base.bytes(tokens, setting.step(base))
        assert more < (0 if tokens >= least else allowed), tokens


def test_memory_is_committed_in_steps() -> None:
    group = layout_of("llama").groups[0]
    assert group.pages_per_chunk == max(1, CHUNK_BYTES // group.page_bytes) == 1
    small = layout_of("MQA").groups[0]
    assert small.pages_per_chunk == CHUNK_BYTES // small.page_bytes > 10
    assert small.committed_bytes(0) == 0
    assert small.committed_bytes(1) == small.committed_bytes(small.pages_per_chunk) <= CHUNK_BYTES
    assert small.committed_bytes(small.pages_per_chunk + 1) == 2 * small.committed_bytes(1)
