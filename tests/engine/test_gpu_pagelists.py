"""The page lists of graphs, as they stand on the device: while sequences grow, fork, go back, join and leave, each row
is shown what the list of its sequence says, once."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import gpucases  # before anything of kvcli.kernels.gpu
import numpy as np
import pytest
import torch
from plancases import CONFIGS

from kvcli.kernels.gpu.pages import PageLists
from kvcli.kernels.gpu.places import ADDRESS_BITS
from kvcli.kernels.gpu.shares import NOTHING, WHOLE
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Part, Sequence
from kvcli.runtime.config import SLIDING, RopeConfig
from kvcli.runtime.engine.graph.batchpages import BatchPages
from kvcli.runtime.engine.graph.pages import GraphPages
from kvcli.runtime.model.rope import RopeTables

PAGE, CONTEXT, ROWS = 16, 320, 4
Rows = list[tuple[int, int, int]]  # address, slot, and whether it is scored by the turned query
CASES = [
    ("llama", "f16", None, 1),
    ("llama", "int4", None, 1),
    ("llama", "int8", None, 0),
    ("llama", "int4", Rolling(20, 40, PAGE), 1),
    ("gemma3", "int8", None, 1),
    ("MLA", "int8", Rolling(0, 50, PAGE), 1),
]


def made(name: str, types: str, retention: Retention | None, tail: int) -> tuple[Any, KVLayout]:
    """A model as lists are made for one: some layers of every kind, small ones."""
    found = CONFIGS[name]
    layers = tuple(
        replace(layer, dim_k=16, dim_v=16, window=min(layer.window, 40), rope=RopeConfig(1e4, 8))
        for layer in found.layers[:6]
    )
    config = replace(found, layers=layers)
    layout = KVLayout.build(config, types, types, PAGE, tail=tail).evicting(retention)
    ops = SimpleNamespace(device=torch.device(gpucases.DEVICE))
    return SimpleNamespace(config=config, ops=ops, ropes=RopeTables(config, {})), layout


def expected(part: Part, group: int, window: int) -> Rows:
    """What the entries of the part's first row show it."""
    found, at = [], part.start
    for kv in part.groups[group][0].classes:
        e = kv.entries
        for i, n in enumerate(e.shows(np.array([at]))[0].tolist()):
            slots = range(int(e.lo[i]), int(e.lo[i]) + n)
            seen = [s for s in slots if not window or e.first[i] + s > at - window]
            found += [(int(e.addresses[i]), slot, int(e.turned[i])) for slot in seen]
    return sorted(found)


def read(lists: PageLists, work: list[list[int]], at: int, window: int) -> Rows:
    """What programs with this work show a row at that position."""
    found, table, edges = [], lists.table.tolist(), lists.edges.tolist()
    for kind, turned, lo, hi in work:
        if kind == WHOLE:
            found += [(word, slot, turned) for word in table[lo:hi] for slot in range(PAGE)]
        elif kind != NOTHING:
            for word, first, a, b, since, until in edges[lo:hi]:
                slots = range(a, min(b, at + 1 - first)) if since <= at < until else ()
                found += [(word, s, turned) for s in slots if not window or first + s > at - window]
    return sorted((word & ((1 << ADDRESS_BITS) - 1), slot, turned) for word, slot, turned in found)


def another(seqs: list[Sequence], pool: PagePool, chance: random.Random) -> Sequence:
    """With pages of its own, or with those of another one, of which the last rows may be taken back."""
    if not seqs or chance.random() < 0.5:
        seq, rows = Sequence(pool), chance.randint(1, 8 * PAGE)
        seq.reserve([0] * rows)
        seq.commit([0] * rows)
        return seq
    seq = chance.choice(seqs).fork()
    seq.rewind_to(max(1, seq.length - chance.randint(0, PAGE)))
    return seq


@pytest.mark.parametrize(("name", "types", "retention", "tail"), CASES)
def test_lists_of_a_sequence_after_the_other(name: str, types: str, retention: Retention | None, tail: int) -> None:
    chance = random.Random(f"{name} {types} {tail}")
    model, layout = made(name, types, retention, tail)
    pool = PagePool(layout, device=model.ops.device)
    pages = GraphPages(model, layout, CONTEXT, torch.zeros(1, dtype=torch.int64, device=model.ops.device))
    seqs: list[Sequence] = []
    for _ in range(12):
        if len(seqs) < 3:
            seqs.append(another(seqs, pool, chance))
        seq = chance.choice(seqs)
        for _ in range(chance.randint(1, 2 * PAGE)):
            part = seq.reserve([0], answering=True)
            pages.bind(part, 256)
            for g, tables in enumerate(pages.tables):
                window = tables.group.window if tables.group.kind == SLIDING else 0
                rows = read(tables.lists, tables.lists.work[0].tolist(), part.start, window)
                assert rows == expected(part, g, window), (seq.length, g)
                into = part.groups[g][0].into.addresses[0]
                assert int(tables.lists.into[0]) & ((1 << ADDRESS_BITS) - 1) == into
            seq.commit([0])
        if seq.length > CONTEXT - 4 * PAGE:
            seqs.remove(seq)
            seq.close()


@pytest.mark.parametrize(("name", "types", "retention", "tail"), CASES)
def test_lists_of_sequences_side_by_side(name: str, types: str, retention: Retention | None, tail: int) -> None:
    chance = random.Random(f"{name} {types} {tail}")
    model, layout = made(name, types, retention, tail)
    pool = PagePool(layout, device=model.ops.device)
    pages = BatchPages(model, layout, CONTEXT, torch.zeros(ROWS, dtype=torch.int64, device=model.ops.device))
    prompts = [another([], pool, chance) for _ in range(2)]
    seats: dict[int, Sequence] = {}
    parts: dict[int, Part] = {}
    for _ in range(24):
        row = chance.randrange(ROWS)
        if row in seats and (chance.random() < 0.3 or seats[row].length > CONTEXT - 4 * PAGE):
            seats.pop(row).close()
            pages.set(row, None)
        elif row not in seats:
            seats[row] = another(prompts, pool, chance)
        for _ in range(chance.randint(1, PAGE)):
            for row, seq in seats.items():
                if seq.length >= pages.end(row):
                    parts[row] = seq.reserve([0], answering=True)
                    pages.set(row, parts[row])
            pages.send()
            for g, tables in enumerate(pages.batch):
                window = tables.group.window if tables.group.kind == SLIDING else 0
                starts, work = tables.lists.starts.tolist(), tables.lists.work.tolist()
                for row, seq in seats.items():
                    mine = [item[:4] for item in work[: starts[ROWS]] if item[4] == row]
                    part = replace(parts[row], start=seq.length)
                    assert len(mine) == starts[row + 1] - starts[row]
                    assert read(tables.lists, mine, seq.length, window) == expected(part, g, window), (row, g)
            for seq in seats.values():
                seq.commit([0])
