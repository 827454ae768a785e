"""Tokens and short steps of every known model can be launched with any cache type, on cards of any size: no query has
more partial results than are merged, and no list is longer than what was planned for it.

Tensors have shapes and no memory: nothing is computed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import gpucases  # noqa: F401  # before anything of kvcli.kernels.gpu
import pytest
import torch

from kvcli.kernels.gpu import combine, latentcombine
from kvcli.kernels.gpu.chip import H100, assumed
from kvcli.kernels.gpu.pages import Asked
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Part, Sequence
from kvcli.runtime.config import FULL, RECURRENT, Block, LayerConfig, ModelConfig
from kvcli.runtime.engine.graph.batchpages import BatchTables
from kvcli.runtime.engine.graph.pages import GroupTables
from kvcli.runtime.headers.shapes import config_from_recipe, planning_config
from kvcli.runtime.hub.recipes import load_recipes
from kvcli.runtime.plan import footprint

META = torch.device("meta")
MULTIPROCESSORS = (20, 48, 84, 108, 132, 170)
CONTEXT = 131072
DEPTHS = (0, 8191, CONTEXT - 65)  # at the ends of blocks and pages, or not


def shapes() -> dict[str, tuple[int, LayerConfig]]:
    """Every number of heads with what a layer keeps, by a model that has them."""
    found: dict[tuple[int, LayerConfig], str] = {}
    for recipe in load_recipes().values():
        if recipe.shape is not None:
            config = config_from_recipe(recipe.name, recipe.shape)
            for layer in config.layers:
                if layer.kind != RECURRENT and layer.shares_kv_with is None:
                    rows = replace(layer, mixer=None, state_bytes=0)
                    found.setdefault((config.n_heads, rows), f"{recipe.name} {layer.kind}")
    return {name: shape for shape, name in found.items()}


def merged(tables: GroupTables | BatchTables) -> int:
    """How many partial results of a query can be merged."""
    record = tables.group.record
    return latentcombine.MOST_PARTS if record.joined else combine.most_parts(record.dim_v)


def launch(config: ModelConfig, layout: KVLayout, rows: int, part: Part) -> None:
    """What a graph does with the lists of a part, with no more partial results than are planned. Raises what makes it
    fail."""
    bucket = 1024
    while bucket < part.end:
        bucket *= 2
    for g, group in enumerate(layout.groups):
        tables = GroupTables(group, CONTEXT, torch.zeros(1, dtype=torch.int64, device=META), config.n_heads, rows)
        tables.bind(part, g, bucket)
        assert len(Asked(part.start, rows, tables.block).blocks[0]) <= tables.blocks
        assert 1 <= tables.parts(bucket) <= merged(tables)
        if rows > 1:
            (layer,) = {config.layers[i] for i in group.layers}
            assert rows * tables.parts(bucket) <= footprint.graph_parts(config, layer, rows, 1)


def side_by_side(layout: KVLayout, heads: int, rows: int, parts: list[Part]) -> None:
    """The same of parts of one row, of sequences of their own."""
    for g, group in enumerate(layout.groups):
        tables = BatchTables(group, CONTEXT, torch.zeros(rows, dtype=torch.int64, device=META), heads)
        for row in range(rows):
            tables.set(row, parts[row % len(parts)], g)
        tables.upload()
        assert 1 <= tables.parts <= merged(tables)


def expect_launches(heads: int, layer: LayerConfig, codec: str, sizes: tuple[int, ...], rows: tuple[int, ...]) -> None:
    """On cards of `sizes` multiprocessors, in steps of so many rows and of so many sequences."""
    config = planning_config(
        "any", "any", [layer], Block(), vocab_size=64, d_model=64, d_ff=64, n_heads=heads, context_length=CONTEXT
    )
    layout = KVLayout.build(config, codec, codec)
    pool, singles = PagePool(layout, None, META), []
    for depth in DEPTHS:
        seq = Sequence(pool)
        if depth:
            seq.reserve([0] * depth)
            seq.commit([0] * depth)
        for count, size in product((*rows, 1), sizes):
            part = seq.reserve([0] * count)
            with assumed(replace(H100, multiprocessors=size)):
                launch(config, layout, count, part)
        singles.append(part)
    for count, size in product(rows, sizes):
        with assumed(replace(H100, multiprocessors=size)):
            side_by_side(layout, heads, count, singles)


SHAPES = shapes()
MOST_UNLIKE = "falcon-7b full", "llama-2-13b full", "gemma-2-2b sliding", "phi-3-medium sliding", "deepseek-v2 latent"
SOME = {name: SHAPES[name] for name in MOST_UNLIKE} | {"head dim 512": (16, LayerConfig(FULL, 1, 512, 512))}


@pytest.mark.parametrize(("name", "codec", "size"), [*zip(SOME, cycle(("int8", "int4", "f16")), MULTIPROCESSORS)])
def test_tokens_and_steps(name: str, codec: str, size: int) -> None:
    expect_launches(*SOME[name], codec, (size,), (8, 64))


@pytest.mark.thorough
@pytest.mark.parametrize("name", {**SHAPES, **SOME})
@pytest.mark.parametrize("codec", ["f16", "int8", "int4"])  # other types are like one of these
def test_all_tokens_and_steps(name: str, codec: str) -> None:
    expect_launches(*{**SHAPES, **SOME}[name], codec, MULTIPROCESSORS, (2, 4, 8, 16, 32, 64))
