"""What graphs keep on a GPU is planned: lists, means, angles and results of all that there can be."""

from __future__ import annotations

import gc
from dataclasses import replace
from types import SimpleNamespace

import gpucases  # noqa: F401  # before anything of kvcli.kernels.gpu
import pytest
import torch
from plancases import CONFIGS

from kvcli.options import AttendOptions
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.config import LATENT, RECURRENT, ModelConfig, RopeConfig
from kvcli.runtime.engine.graph import batchgraph, pages, stepgraph
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.model.rope import RopeTables
from kvcli.runtime.plan import graphs

META = torch.device("meta")
CONTEXT = 20000


def model_of(name: str) -> tuple[ModelConfig, SimpleNamespace]:
    """A model's config, with RoPE, and what graphs ask of the model, without weights."""
    found = CONFIGS[name]
    layers = tuple(replace(x, rope=RopeConfig(1e4, x.dim_k)) if x.dim_k else x for x in found.layers)
    config = replace(found, layers=layers)
    ops, taps = SimpleNamespace(device=META), ()
    return config, SimpleNamespace(config=config, ops=ops, ropes=RopeTables(config, {}), taps=taps)


def made(model: SimpleNamespace, layout: KVLayout, at_once: int) -> list[object]:
    """All graphs that there can be, none of them captured."""
    steps = stepgraph.StepGraph(model, layout, CONTEXT)
    plain = all(layer.kind not in (LATENT, RECURRENT) for layer in model.config.layers)
    for rows in steps.sizes:
        steps._of(rows, 1)
        for count in graphs.TOGETHER:
            if plain and count <= at_once and rows * count <= graphs.TOGETHER_ROWS:
                steps._of(rows, count)
    sizes = [n for i, n in enumerate(graphs.BATCH_ROWS) if i == 0 or graphs.BATCH_ROWS[i - 1] < at_once]
    batches = [batchgraph.BatchGraph(model, layout, CONTEXT, n) for n in sizes if at_once > 1]
    return [NextToken(model, layout, CONTEXT), steps, *batches]


def storages() -> dict[int, int]:
    """Bytes of what tensors without memory would take, each storage once."""
    there = (x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and x.device == META)
    return {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in there}


@pytest.mark.parametrize(
    ("name", "codec", "more", "at_once"),
    [
        ("llama", "int8", {}, 1),
        ("gemma3", "int4", {}, 8),
        ("MLA", "int8", {}, 64),
        ("MQA", "f16", {}, 3),
        ("hybrid", "fp8", {}, 16),
        ("odd window", "int8", {"retention": Rolling(64, 4096, 64)}, 5),
        ("llama", "f16", {"attend": AttendOptions(pages=4)}, 1),
    ],
)
def test_what_graphs_keep_is_planned(name: str, codec: str, more: dict[str, object], at_once: int) -> None:
    config, model = model_of(name)
    layout = KVLayout.build(config, codec, codec).by_layer(True)
    layout = layout.evicting(more.get("retention")).attending(more.get("attend", layout.attend))
    gc.collect()
    before = storages()
    kept = made(model, layout, at_once)
    allocated = sum(size for key, size in storages().items() if key not in before)
    planned = graphs.graph_bytes(config, layout, CONTEXT, at_once)
    assert set(kept[1]._rows) == set(graphs.steps(layout, at_once))  # type: ignore[attr-defined]
    assert kept and allocated > 4 * 1024 * config.d_model
    assert allocated <= planned
    if at_once == 1:  # else also what kernels pass on
        assert planned < 2 * allocated


def test_graphs_share_angles_where_nothing_is_evicted() -> None:
    """And keep them no longer than the last one that has them."""
    config, model = model_of("llama")
    layout = KVLayout.build(config, "int8", "int8")
    for each, same in ((layout, True), (layout.evicting(Rolling(64, 4096, 64)), False)):
        a, b = (stepgraph.Place(model, each, CONTEXT, rows).pages.tables[0] for rows in (8, 16))
        assert (a.centres is b.centres) == same
    key = a.centres.pages.size, layout.page_size, META
    assert key in pages._SHARED or not same
    del a, b
    gc.collect()
    assert key not in pages._SHARED
