"""Rows selected by score on a GPU, against the backend in plain torch: prompts, selection, and tokens by graph."""

from __future__ import annotations

import pytest
import tiny
import torch
from gpucases import COMPILED, DEVICE, OPS
from kernelcases import one_thread

from kvcli.kernels import MASS_UNIT, Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import EvictOptions, SampleOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.selector import LayerFacts
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.graph.nexttoken import NextToken
from kvcli.runtime.engine.graph.rowgraph import RowGraph
from kvcli.runtime.engine.graph.tokengraph import TokenGraph
from kvcli.runtime.engine.sampler import Sampler
from kvcli.runtime.engine.tokenstream import graph_tokens
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Attention, Decoder
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights

VOCAB, PAGE, CONTEXT = 64, 16, 256
ROWS, STAY = (150, 100) if DEVICE == "cuda" else (100, 70)
PROMPT = torch.randint(VOCAB, (ROWS,), generator=torch.manual_seed(4)).tolist()


@pytest.fixture(autouse=True)
def _small():
    with one_thread(), torch.inference_mode():
        yield


def facts_of(model: Decoder) -> dict[int, LayerFacts]:
    found = {}
    for each in model.weights.sublayers:
        if isinstance(each.inner, Attention):
            rope = model.ropes.table(model.config.layers[each.inner.layer].rope)
            found[each.inner.layer] = LayerFacts(each.inner.how.scale, rope.at_positions if rope else None)
    return found


def selected(arch: str, types: str, policy: str, ops: Backend) -> tuple[Decoder, KVLayout, Sequence, torch.Tensor]:
    """A model, and the rows of the prompt in two steps, of which some stay; the hidden state of one token more."""
    file = GGUFFile.open(tiny.make_even(arch, False, VOCAB))
    config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
    selection = eviction.selection(EvictOptions(policy, budget=str(STAY)), CONTEXT, PAGE)
    layout = KVLayout.build(config, types, types, PAGE).by_layer(ops is not OPS).selecting(selection)
    model, seq = load(config, Weights(file), ops), Sequence(PagePool(layout, device=ops.device))
    assert seq.selector is not None
    seq.selector.expect(len(PROMPT))
    for ids in (PROMPT[: ROWS // 2 - 5], PROMPT[ROWS // 2 - 5 :]):
        model.hidden(Step((seq.reserve(ids),)))
        seq.commit(ids)
    seq.select(facts_of(model).__getitem__)
    hidden = model.hidden(Step((seq.reserve([5]),)))
    seq.commit([5])
    return model, layout, seq, hidden.cpu()


def stays(seq: Sequence) -> list[set[tuple[int, int, int]]]:
    """(layer, KV head, position) of the rows that were selected."""
    found = [held.selected.positions.tolist() for held in seq._lists if held.selected is not None]
    return [
        {(i, head, at) for i, layer in enumerate(x) for head, rows in enumerate(layer) for at in rows} for x in found
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types"), [("gemma3", "f16"), *(pytest.param("llama", x, marks=COMPILED) for x in ("int8", "int4"))]
)
def test_rows_that_stay_give_the_states_of_the_reference(arch: str, types: str):
    """Of rows that were drawn: the same ones on both."""
    gpu = GpuBackend(torch.device(DEVICE))
    (_, _, theirs, expected), (model, layout, ours, found) = (selected(arch, types, "random", x) for x in (OPS, gpu))
    assert stays(theirs) == stays(ours) and ours.kept == STAY + 1
    limits = {"f16": 8e-3, "int8": 3e-2, "int4": 6e-2}  # codes of four bits that fall either way are far apart
    assert float((found - expected).norm() / expected.norm()) < limits[types]
    twin, graph = ours.fork(), TokenGraph(model, layout, CONTEXT)
    logits = graph.run(ours, 9).cpu()
    plain = model.logits(model.hidden(Step((twin.reserve([9]),))))[0].cpu()
    assert float((logits - plain).norm() / plain.norm()) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["h2o", *(pytest.param(x, marks=COMPILED) for x in ("expected", "snapkv"))])
def test_nearly_the_same_rows_stay(policy: str):
    """Scores differ in last bits."""
    gpu = GpuBackend(torch.device(DEVICE))
    (_, _, theirs, _), (_, _, ours, _) = (selected("llama", "f16", policy, x) for x in (OPS, gpu))
    (a,), (b,) = stays(theirs), stays(ours)
    assert len(a) == len(b) and len(a & b) > 0.95 * len(a)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types", "kind"),
    [
        pytest.param("gpt-oss", "f16", TokenGraph, marks=COMPILED),
        pytest.param("llama", "int4", RowGraph, marks=COMPILED),
    ],
)
def test_tokens_by_graph_give_rows_what_steps_give_them(arch: str, types: str, kind: type[NextToken]):
    model, layout, ours, _ = selected(arch, types, "h2o", GpuBackend(torch.device(DEVICE)))
    twin, graph, tokens = ours.fork(), kind(model, layout, CONTEXT), (9, 3)
    assert ours.selector is not None and twin.selector is not None
    before = {group: mass.clone() for group, mass in ours.selector._mass.items()}
    for token in tokens:
        graph.run(ours, token)
        model.hidden(Step((twin.reserve([token]),)))
        twin.commit([token])
    for group, first in before.items():
        found, expected = (x.selector._mass[group][..., : first.shape[-1]] - first for x in (ours, twin))
        assert expected.any() and float((found - expected).double().norm() / expected.double().norm()) < 0.03
        if arch == "llama":  # without sinks each query gives all of its probability to rows
            heads = model.config.n_heads // layout.groups[group].kv_heads
            assert float((found.sum(-1).double() / MASS_UNIT / (heads * len(tokens)) - 1).abs().max()) < 1e-3


@pytest.mark.slow
@COMPILED
def test_the_last_row_before_a_selection_is_not_computed_ahead():
    """What its query gives others could not be taken back."""
    model, layout, seq, hidden = selected("llama", "f16", "h2o", GpuBackend(torch.device(DEVICE)))
    graph, history = TokenGraph(model, layout, CONTEXT), [*PROMPT, 5]
    sampler = Sampler(SampleOptions(temperature=0.0, repeat_penalty=1.0), {}, VOCAB)
    assert seq.selector is not None
    seq.selector.due = seq.length + 3
    for token in graph_tokens(graph, VOCAB, seq, history, sampler, model.logits(hidden.to(DEVICE))[0]):
        history.append(token)
    assert len(history) == seq.selector.due and seq.length == seq.selector.due - 1
