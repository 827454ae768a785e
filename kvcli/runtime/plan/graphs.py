"""The bytes of what CUDA graphs keep beside the memory that their kernels pass on: lists of pages, means and scales of
the sequence at hand, angles, and results.

Graphs are captured when they are first wanted (`kv serve`: where nobody asks); here all of them are counted that there
can be. The sizes follow `runtime/engine/graph/`, above all `GroupTables`, `BatchTables` and `StepGraph`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcli.runtime.cache.grouplayout import GroupLayout
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import LATENT, WINDOWED, ModelConfig
from kvcli.runtime.plan.footprint import DECODE_PARTS, GRAPH_PROGRAMS, STEP_ROWS, gpu_step_bytes

BATCH_ROWS = (2, 4, 8, 16, 32, 64)  # of as many sequences; with more, products are no longer those of a few rows
TOGETHER = (2, 4, 8)  # prompts that are read in one pass, of so many rows
TOGETHER_ROWS = 2048  # in all, at most: weights are expanded once for them
EDGES_OF_BLOCK = 8  # pages that are not seen wholly: of a block of queries, beside one for each page and class
EDGES_OF_ROW = 16  # and of a row of a sequence of its own, beside those of its window and of pages that stay
LATENT_PARTS = 512  # partial results of a query of latents that there is room for: MOST_PARTS of latentcombine.py
EDGE_NUMBERS = 6  # of such a page, and
CENTRE_ROWS = 16  # rows that share angles of the mean: as in kernels/
_BLOCK = 16  # queries that are computed together: of all heads of a key-value head, at least


def graph_bytes(config: ModelConfig, layout: KVLayout, tokens: int, at_once: int) -> int:
    """Of all graphs of an engine with contexts of `tokens`, and up to `at_once` answers at a time."""
    places = [1, *(rows for rows, count in steps(layout, at_once) for _ in range(count))]
    found = 4 * sum({STEP_ROWS[-1], most_rows(layout, at_once)}) * config.d_model  # what steps give, also few
    found += sum(_lists(config, group, tokens, rows) for group in layout.groups for rows in places)
    found += sum(_angles(config, group, tokens, len(places)) for group in layout.groups)
    if layout.selection is not None:  # a token's scores, and where they go
        found += sum(8 * (config.n_heads + 3) * _room(g, tokens) for g in layout.groups if g.kind not in WINDOWED)
    return found + (_batches(config, layout, tokens, at_once) if at_once > 1 else 0)


def steps(layout: KVLayout, at_once: int) -> Iterator[tuple[int, int]]:
    """Rows of each sequence, and how many there are, of the graphs of prompts."""
    for rows in sizes(layout):
        yield rows, 1
        if joins(layout):
            yield from ((rows, n) for n in TOGETHER if n <= at_once and n * rows <= TOGETHER_ROWS)


def most_rows(layout: KVLayout, at_once: int) -> int:
    """Of a graph of prompts."""
    return max(rows * count for rows, count in steps(layout, at_once))


def sizes(layout: KVLayout) -> tuple[int, ...]:
    """Rows of a sequence in a graph."""
    return tuple(rows for rows in STEP_ROWS if rows % layout.grain == 0)


def joins(layout: KVLayout) -> bool:
    """Whether there can be graphs of prompts of several sequences: none where a row's bits must not depend on its
    neighbours, nor of sequences with states, or latents."""
    latents = any(group.kind == LATENT for group in layout.groups)
    return layout.grain == 1 and not layout.states and not latents and not by_row(layout)


def by_row(layout: KVLayout) -> bool:
    """Whether rows are sealed one by one."""
    return any(group.sealed and not group.tail for group in layout.groups)


def _slots(group: GroupLayout, tokens: int) -> int:
    return -(-tokens // group.page_size) + 2


def _room(group: GroupLayout, tokens: int) -> int:
    """Rows of a list of pages, and of edges beside it."""
    return 2 * group.page_size * (_slots(group, tokens) + EDGES_OF_BLOCK)


def _pieces(rows: int, size: int) -> int:
    """How many pieces of `size` positions so many rows can be in."""
    return (rows + size - 2) // size + 1


def _lists(config: ModelConfig, group: GroupLayout, tokens: int, rows: int) -> int:
    """Of one group, for so many rows of a sequence, with its means and scales."""
    slots, heads = _slots(group, tokens), max(1, config.n_heads // group.kv_heads)
    blocks = 1 if rows == 1 else _pieces(rows, max(1, _BLOCK // heads))
    parts = LATENT_PARTS if group.record.joined else DECODE_PARTS
    found = 8 * (rows + 2 * _pieces(rows, group.page_size) + 2 * parts * blocks)
    found += 8 * EDGE_NUMBERS * (2 * slots + EDGES_OF_BLOCK * blocks) + 2 * 8 * slots
    if group.summarized and rows == 1:  # what a token chooses
        found += 2 * slots * (8 + 12 * group.kv_heads)
    return found + _bases(group)


def _bases(group: GroupLayout) -> int:
    """Float32 means and scales of all layers of a group, of one sequence."""
    each = (group.dim_k if group.sealed and group.codec_k.centred else 0) + 2
    return 4 * len(group.layers) * group.kv_heads * each


def _angles(config: ModelConfig, group: GroupLayout, tokens: int, places: int) -> int:
    """Of the means of keys: one table for all graphs, or where old rows are evicted one for each."""
    if not group.sealed or not group.codec_k.centred:
        return 0
    ropes = {rope for i in group.layers if (rope := config.layers[i].rope) is not None}
    dims = sum(rope.dim for rope in ropes) or group.dim_k  # shapes by hand have none
    each = 2 * dims * _slots(group, tokens) * (group.page_size // CENTRE_ROWS)
    return each * (places if group.retention else 1)


def _batches(config: ModelConfig, layout: KVLayout, tokens: int, at_once: int) -> int:
    """Of rows of several sequences, and what their kernels pass on, in memory of their own."""
    sizes = [rows for i, rows in enumerate(BATCH_ROWS) if not i or BATCH_ROWS[i - 1] < at_once]
    keeps = layout.retention is not None and layout.retention.keep > 0
    found = gpu_step_bytes(config, sizes[-1], 1 + keeps)
    found += max(_partials(config, group, sizes[-1]) for group in layout.groups) if layout.groups else 0
    for rows in sizes:
        found += 4 * rows * config.vocab_size
        for group in layout.groups:
            found += _apart(config, group, tokens, rows)
    return found


def _items(config: ModelConfig, group: GroupLayout, rows: int) -> int:
    """Parts of all rows."""
    kinds = (1 + 2 * group.sealed) * (1 + bool(group.retention))
    return GRAPH_PROGRAMS // group.kv_heads + rows * (2 + kinds)


def _partials(config: ModelConfig, group: GroupLayout, rows: int) -> int:
    """Their results."""
    return 4 * config.n_heads * _items(config, group, rows) * (group.dim_v + 2)


def _apart(config: ModelConfig, group: GroupLayout, tokens: int, rows: int) -> int:
    """Of one group, for so many rows of sequences of their own."""
    slots, evicts = _slots(group, tokens), group.retention
    stay = group.sinks + group.window // group.page_size + (evicts.keep // group.page_size if evicts else 0)
    edges = rows * min(2 * slots, EDGES_OF_ROW + stay)
    found = rows * (2 * 8 * slots + 8 * 6 + _bases(group)) + 8 * EDGE_NUMBERS * edges + 24 * _items(config, group, rows)
    angles = _angles(config, group, tokens, 1)
    return found + (rows * angles if evicts else 0)
