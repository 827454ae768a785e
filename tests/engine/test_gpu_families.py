"""Families for whose tokens the kernels of the token graph are not enough: their steps on a GPU are those of the
reference, without graphs and with those of the decoder's own pass."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from gpucases import COMPILED, DEVICE, MORE
from kernelcases import one_thread

from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.graph import nexttoken, stepgraph, tokengraph
from kvcli.runtime.engine.graph.rowgraph import RowGraph
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import graphs

LIMITS = {"f16": 1e-4, "int8": 2e-3}


class OnGpu(Loaded):
    """A model with its graphs. `graphs`: whether they are used where they can be."""

    def __init__(self, variant: str, types: str, graphs: bool, retention: Retention | None = None, tail: int = 1):
        path = tiny.make(variant).path
        super().__init__(path, "reference", types=types)
        self.model = load(self.config, Weights(GGUFFile.open(path)), GpuBackend(torch.device(DEVICE)))
        layout = KVLayout.build(self.config, types, types, 16, tail=tail).by_layer(True).evicting(retention)
        self.pool = PagePool(layout, device=self.model.ops.device)
        self.token = RowGraph(self.model, layout, 96) if graphs else None
        self.steps = StepGraph(self.model, layout, 96) if graphs else None
        self.by_graph = 0

    @torch.inference_mode()
    def run(self, seq: Sequence, ids: list[int]) -> torch.Tensor:
        """Of one row that follows another the last logits alone, [1, vocab]."""
        if self.token is not None and len(ids) == 1:
            return self.token.run(seq, ids[0])[None].clone()
        part, hidden = seq.reserve(ids), None
        if self.steps is not None:
            hidden = self.steps.run(part)
            self.by_graph += hidden is not None
            self.token.unbind()
        if hidden is None:
            hidden = self.model.hidden(Step((part,)))
        seq.commit(ids)
        return self.model.logits(hidden)


def alike(ours: OnGpu, theirs: Loaded, counts: tuple[int, ...], limit: float) -> None:
    """Steps of so many rows have the same probabilities."""
    seqs, at = (Sequence(theirs.pool), Sequence(ours.pool)), 0
    for count in counts:
        expected, found = (m.run(s, IDS[at : at + count]) for m, s in zip((theirs, ours), seqs, strict=True))
        p, q = (x.double().log_softmax(-1) for x in (expected[-len(found) :], found.cpu()))
        assert (p.exp() * (p - q)).sum(-1).max() < limit, at
        at += count
    assert seqs[0].tokens == seqs[1].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types"),
    [
        pytest.param("llama4", "f16", marks=COMPILED),
        pytest.param("gemma4", "int8", marks=COMPILED),
        pytest.param("gemma4-experts", "f16", marks=COMPILED),
        pytest.param("gemma3n", "f16", marks=COMPILED),
        pytest.param("deepseek2", "f16", marks=MORE),
        pytest.param("deepseek2-groups", "f16", marks=COMPILED),
        pytest.param("mistral4", "int8", marks=COMPILED),
        pytest.param("lfm2", "f16", marks=COMPILED),
        pytest.param("lfm2-biased", "int8", marks=COMPILED),
        ("qwen35", "f16"),
        pytest.param("qwen35moe", "f16", marks=COMPILED),
        pytest.param("falcon-h1", "int8", marks=COMPILED),
        pytest.param("nemotron_h_moe", "f16", marks=COMPILED),
    ],
)
def test_steps_are_those_of_the_reference(variant: str, types: str):
    """Prompts and single tokens, in the middle of pages, across their ends, beyond windows and chunks."""
    with one_thread():
        # A state adds up what float16 rounds on a card.
        limit = LIMITS[types] * (4 if variant == "qwen35moe" else 1)
        reference = Loaded(tiny.make(variant).path, "reference", types=types)
        counts = (18, 1, 14, 1) if DEVICE == "cuda" else (15, 3, 1)
        alike(OnGpu(variant, types, False), reference, counts, limit)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types", "counts"),
    [
        pytest.param("llama4", "f16", (18, 1, 1, 11, 1, 1, 1), marks=COMPILED),
        pytest.param("gemma4", "int8", (14, 1, 1, 1, 13, 1, 1, 1), marks=COMPILED),
        pytest.param("gemma4-keys", "f16", (30, 1, 1, 1), marks=MORE),
        pytest.param("gemma4-experts", "f16", (30, 1, 1, 1), marks=COMPILED),
        pytest.param("gemma3n", "int8", (14, 1, 1, 1, 13, 1, 1, 1), marks=COMPILED),
        ("gemma3n-three", "f16", (30, 1, 1, 1) if DEVICE == "cuda" else (31, 1, 1)),
        ("deepseek2", "int8", (14, 1, 1, 1, 13, 1, 1, 1) if DEVICE == "cuda" else (15, 1, 13, 1)),
        pytest.param("qwen35", "f16", (14, 1, 1, 30, 1), marks=COMPILED),
        ("granitehybrid-dense", "f16", (18, 1)),
    ],
)
def test_graphs_of_the_decoder(variant: str, types: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch):
    """Single tokens and several, across the ends of pages, of windows and of chunks."""
    monkeypatch.setattr(graphs, "STEP_ROWS", (16, 32))
    for module in (stepgraph, nexttoken):
        monkeypatch.setattr(module, "SMALLEST_BUCKET", 64)
    with one_thread():
        ours = OnGpu(variant, types, True)
        assert tokengraph.unsupported(ours.model)
        alike(ours, Loaded(tiny.make(variant).path, "reference", types=types), counts, LIMITS[types])
    assert ours.by_graph == sum(n > 1 for n in counts)


@pytest.mark.slow
@COMPILED
def test_a_graph_where_old_rows_go_and_each_row_is_sealed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nexttoken, "SMALLEST_BUCKET", 32)
    retention = Rolling(5, 32, 16)
    with one_thread():
        ours, theirs = OnGpu("gemma3n", "int8", True, retention, tail=0), Loaded(tiny.make("gemma3n").path, "reference")
        theirs.pool = PagePool(KVLayout.build(theirs.config, "int8", "int8", 16, tail=0).evicting(retention))
        alike(ours, theirs, (46, 1, 1, 1), LIMITS["int8"])


@pytest.mark.slow
@torch.inference_mode()
def test_a_graph_that_is_captured_changes_no_state():
    """It is launched before it is replayed; and rows that are spare are nobody's."""
    with one_thread():
        ours = OnGpu("qwen35", "f16", True)
        assert ours.token is not None and ours.steps is not None
        seq = Sequence(ours.pool)
        token, rows = ours.token, ours.steps._of(16, 1)
        place = rows.places[0]
        for ids, graph, pages, legs in (
            (IDS[:1], token, token._pages, token._legs), (IDS[1:10], rows, place.pages, place.legs)
        ):  # fmt: skip
            part = seq.reserve(ids)
            assert part.states is not None and legs is not None
            states = [state for _, _, state in part.states.legs]
            kept = [state.clone() for state in states]
            pages.bind(part, 64)
            legs.bind(part)
            for changes in (False, True):
                with nullcontext() if changes else legs.idle():
                    graph.launch(64)
                assert changes != any(torch.equal(a, b) for a, b in zip(kept, states, strict=True))
            seq.commit(ids)
