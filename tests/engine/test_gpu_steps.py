"""Steps of several rows on a GPU, by graphs over buffers that never move, against the backend in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import tiny
import torch
from gpucases import COMPILED, DEVICE, MORE, OPS
from kernelcases import one_thread

from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.language import AFTER, SERIAL
from kvcli.kernels.gpu.launching import collecting
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.graph import stepgraph
from kvcli.runtime.engine.graph.pages import GroupTables
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import graphs

VOCAB, PAGE, CONTEXT = 64, 16, 128


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs, "STEP_ROWS", (4, 16))
    monkeypatch.setattr(stepgraph, "SMALLEST_BUCKET", 32)
    with one_thread(), torch.inference_mode():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types", "retention"),
    [
        pytest.param("gemma3", "f16", None, marks=MORE),
        pytest.param("llama", "f16", Rolling(20, 32, PAGE), marks=COMPILED),
        ("gemma3", "int8", Rolling(5, 32, PAGE)),
        pytest.param("qwen3moe", "f16", None, marks=COMPILED),
    ],
)
def test_hidden_states_are_those_of_the_reference(arch: str, types: str, retention: Retention | None) -> None:
    """Steps that fill graphs and that do not, in the middle of pages, across their ends, and beyond windows."""
    file = GGUFFile.open(tiny.make_even(arch, False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    layouts = [KVLayout.build(config, types, types, PAGE).by_layer(gpu).evicting(retention) for gpu in (False, True)]
    gpu = GpuBackend(torch.device(DEVICE))
    theirs, ours = load(config, Weights(file), OPS), load(config, Weights(file), gpu)
    seqs = [Sequence(PagePool(x, device=ops.device)) for x, ops in zip(layouts, (OPS, gpu), strict=True)]
    steps, by_graph, generator = StepGraph(ours, layouts[1], CONTEXT), 0, torch.manual_seed(3)
    for count in (3, 16, 18, 1, 13, 16):  # the second one fills the first page
        ids = torch.randint(VOCAB, (count,), generator=generator).tolist()
        a, b = (seq.reserve(ids) for seq in seqs)
        expected, found = theirs.hidden(Step((a,))), steps.run(b)
        by_graph += found is not None
        if found is None:
            found = ours.hidden(Step((b,)))
        for seq in seqs:
            seq.commit(ids)
        limit = 8e-3 if types == "f16" else 3e-2
        assert float((found.cpu() - expected).norm() / expected.norm()) < limit, seqs[0].length
    assert by_graph == 5


@pytest.mark.slow
def test_what_graphs_leave_to_others() -> None:
    """Rows that are sealed one by one."""
    file = GGUFFile.open(tiny.make_even("llama", False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    model = load(config, Weights(file), GpuBackend(torch.device(DEVICE)))
    for tail, runs in ((1, (True, True)), (0, (False, False))):
        layout = KVLayout.build(config, "int8", "int8", PAGE, tail=tail).by_layer(True)
        seq = Sequence(PagePool(layout, device=model.ops.device))
        steps = StepGraph(model, layout, CONTEXT)
        for by_graph in runs:
            part = seq.reserve([1] * 12)
            assert (steps.run(part) is not None) == by_graph
            if not by_graph:
                model.hidden(Step((part,)))
            seq.commit([1] * 12)


def test_lists_that_are_too_long_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With too few programs for what a block reads; and the same step has a graph once there are enough."""
    file = GGUFFile.open(tiny.make_even("llama", False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    model = load(config, Weights(file), GpuBackend(torch.device(DEVICE)))
    layout = KVLayout.build(config, "f16", "f16", PAGE).by_layer(True)
    seq = Sequence(PagePool(layout, device=model.ops.device))
    model.hidden(Step((seq.reserve([1] * 20),)))
    seq.commit([1] * 20)
    steps, part = StepGraph(model, layout, CONTEXT), seq.reserve([1] * 3)
    with monkeypatch.context() as few:
        few.setattr(GroupTables, "parts", lambda *_: 1)
        assert steps.run(part) is None
    assert steps.run(part) is not None


@pytest.mark.thorough
@pytest.mark.parametrize(("arch", "types"), [("llama", "int4"), ("gemma3", "int8"), ("qwen3moe", "f16")])
def test_prompts_together_are_those_alone(arch: str, types: str) -> None:
    """Rows of two sequences by one graph, in first pages and behind them, and by one each, against each by itself."""
    even = arch in ("llama", "gemma3", "qwen3moe")
    file = GGUFFile.open(tiny.make_even(arch, False, VOCAB) if even else tiny.make(arch).path)
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    gpu, generator = GpuBackend(torch.device(DEVICE)), torch.manual_seed(3)
    model, layout = load(config, Weights(file), gpu), KVLayout.build(config, types, types, PAGE).by_layer(True)
    pools = PagePool(layout, device=gpu.device), PagePool(layout, device=gpu.device)
    alone, joined = ([Sequence(pool) for _ in range(2)] for pool in pools)
    steps, by_graph = StepGraph(model, layout, CONTEXT), list[bool]()
    steps.joined.add((16, 2))
    run = steps._run
    steps._run = lambda parts: by_graph.append(len(parts) == 2) or run(parts)  # type: ignore[func-returns-value, method-assign]
    assert steps.joins
    for counts in ((13, 7), (5, 6), (6, 5), (7, 7)):  # in the middle, one alone fills its first page
        ids = [torch.randint(VOCAB, (count,), generator=generator).tolist() for count in counts]
        expected = [model.hidden(Step((seq.reserve(own),))) for seq, own in zip(alone, ids, strict=True)]
        found = steps.together(tuple(seq.reserve(own) for seq, own in zip(joined, ids, strict=True)))
        for one, other in zip(expected, found.split(list(counts)), strict=True):
            assert float((other - one).norm() / one.norm()) < 5e-3
        for seqs in (alone, joined):
            for seq, own in zip(seqs, ids, strict=True):
                seq.commit(own)
    assert by_graph == ([True] * 4 if types == "f16" else [True, False, False, False, False, True])


@pytest.mark.parametrize("types", ["f16", "int8"])
def test_what_is_compiled_ahead_is_what_steps_launch(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are launched ahead of each other are other kernels for the compiler."""

    @contextmanager
    def ahead(self: GpuBackend) -> Iterator[None]:  # as where the card can
        self.pdl = AFTER
        yield
        self.pdl = SERIAL

    monkeypatch.setattr(GpuBackend, "ahead", ahead)
    file = GGUFFile.open(tiny.make_even("llama", False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    model = load(config, Weights(file), GpuBackend(torch.device(DEVICE)))
    steps = StepGraph(model, KVLayout.build(config, types, types, PAGE).by_layer(True), CONTEXT)
    with collecting() as compiled:
        steps.dry_run(shortest=True)
    for fixes in (False, True) if types == "int8" else (False,):
        with collecting() as launched:
            steps._of(4, 1).launch(stepgraph.SMALLEST_BUCKET, fixes)
        assert launched and launched <= compiled


@pytest.mark.parametrize("types", ["int8", pytest.param("f16", marks=MORE), pytest.param("int4", marks=MORE)])
def test_a_step_of_fewer_rows_than_queries_are_computed_together(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may reach into a second block of queries all the same."""
    monkeypatch.setattr(graphs, "STEP_ROWS", (8, 16))
    file = GGUFFile.open(tiny.make_even("llama", False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    gpu, seqs, models = GpuBackend(torch.device(DEVICE)), [], []
    for ops in (OPS, gpu):
        layout = KVLayout.build(config, types, types, PAGE).by_layer(ops is gpu)
        models.append(load(config, Weights(file), ops))
        seqs.append(Sequence(PagePool(layout, device=ops.device)))
    steps, generator = StepGraph(models[1], layout, CONTEXT), torch.manual_seed(3)
    assert steps._of(8, 1).places[0].pages.tables[0].block > 8
    for count in (13, 5, 8, 3, 7):  # the second one fills a page, and the last
        ids = torch.randint(VOCAB, (count,), generator=generator).tolist()
        a, b = (seq.reserve(ids) for seq in seqs)
        expected, found = models[0].hidden(Step((a,))), steps.run(b)
        assert found is not None
        assert float((found.cpu() - expected).norm() / expected.norm()) < 3e-2, seqs[0].length
        for seq in seqs:
            seq.commit(ids)
