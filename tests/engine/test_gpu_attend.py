"""Tokens by graph where answers read only some pages: against the backend in plain torch."""

from __future__ import annotations

import pytest
import tiny
import torch
from gpucases import DEVICE, MORE, OPS
from kernelcases import one_thread

from kvcli.kernels import Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import AttendOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine.graph import nexttoken
from kvcli.runtime.engine.graph.tokengraph import TokenGraph
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.summarizing import summarize
from kvcli.runtime.model.weights import Weights

VOCAB, PAGE, CONTEXT = 64, 16, 160
IDS = torch.randint(VOCAB, (CONTEXT,), generator=torch.manual_seed(2)).tolist()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nexttoken, "SMALLEST_BUCKET", 32)
    with one_thread(), torch.inference_mode():
        yield


class Model:
    """A tiny model whose answers read `pages` pages, with its graph or in plain torch."""

    def __init__(self, arch: str, types: str, pages: int, reference: bool) -> None:
        file = GGUFFile.open(tiny.make_even(arch, False, VOCAB))
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        self.layout = KVLayout.build(config, types, types, PAGE).by_layer(not reference).attending(AttendOptions(pages))
        ops: Backend = OPS if reference else GpuBackend(torch.device(DEVICE))
        self.decoder: Decoder = load(config, Weights(file, ()), ops)
        self.prompts = self.decoder if DEVICE == "cuda" else load(config, Weights(file, ()), OPS)
        self.seq = Sequence(PagePool(self.layout, device=ops.device))
        self.graph = None if reference else TokenGraph(self.decoder, self.layout, CONTEXT)

    def feed(self, ids: list[int], answering: bool = False) -> torch.Tensor:
        part = self.seq.reserve(ids, answering)
        summarize(self.prompts, self.layout, part)
        hidden = self.prompts.hidden(Step((part,)))
        self.seq.commit(ids)
        if self.graph:
            self.graph.unbind()
        return self.prompts.logits(hidden[-1:])[0].cpu()

    def token(self, token: int) -> torch.Tensor:
        return self.graph.run(self.seq, token).cpu().clone() if self.graph else self.feed([token], True)


def divergence(expected: torch.Tensor, found: torch.Tensor) -> float:
    p, q = (x.double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum())


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "types"), (pytest.param("llama", "f16", marks=MORE), ("gemma3", "int8")))
def test_tokens_read_what_the_reference_does(arch: str, types: str) -> None:
    """Over the edge of a page, where another one may be chosen, and from too few pages for a choice on."""
    few, many = (Model(arch, types, 2, reference) for reference in (True, False))
    for each in (few, many):
        for start in range(0, 78, 26):
            each.feed(IDS[start : start + 26])
    for i in (78, 79, 80):
        assert divergence(few.token(IDS[i]), many.token(IDS[i])) < 1e-3
    for each in (few, many):
        assert each.seq.exact == (None if few.seq.exact is None else few.seq.exact)
        each.feed(IDS[81:126])
    for i in range(126, 130):
        assert divergence(few.token(IDS[i]), many.token(IDS[i])) < 1e-3
    assert few.seq.exact == many.seq.exact is not None


@pytest.mark.slow
def test_as_many_pages_as_there_are_change_nothing() -> None:
    every, plain = Model("llama", "f16", 40, False), Model("llama", "f16", 0, False)
    for each in (every, plain):
        for start in range(0, 104, 26):
            each.feed(IDS[start : start + 26])
    for i in range(104, 106):
        assert torch.equal(every.token(IDS[i]), plain.token(IDS[i]))
    assert every.seq.exact is None
