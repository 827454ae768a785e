"""Rows of prompts that are computed in blocks on a GPU: their bits depend on nothing that is computed beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import tiny
import torch
from gpucases import DEVICE, MORE
from kernelcases import one_thread

from kvcli.errors import UsageError
from kvcli.kernels.gpu import past
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import AttendOptions, CacheOptions, LoadOptions, LoraOption
from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.engine import strictrepeat
from kvcli.runtime.engine.graph import stepgraph
from kvcli.runtime.engine.graph.stepgraph import StepGraph
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights
from kvcli.runtime.plan import graphs
from kvcli.runtime.promptcache.caches import live_rows

VOCAB, PAGE, BLOCK, CONTEXT = 64, 16, 16, 128
IDS = torch.randint(VOCAB, (100,), generator=torch.manual_seed(4)).tolist()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "STEP_ROWS", (8, BLOCK, 2 * BLOCK))
    monkeypatch.setattr(stepgraph, "SMALLEST_BUCKET", 32)
    monkeypatch.setattr(past, "LEAST_QUERIES", BLOCK)
    monkeypatch.setattr(past, "LEAST_ROWS", BLOCK)
    with one_thread(), torch.inference_mode():
        yield


class Model:
    """A tiny model on the device, whose rows are computed in blocks or not."""

    def __init__(self, arch: str, types: str, block: int, packed: bool = False) -> None:
        file = GGUFFile.open(tiny.make_even(arch, packed, VOCAB))
        config = from_gguf(file.metadata, {name: t.shape for name, t in file.tensors.items()})
        self.layout = KVLayout.build(config, types, types, PAGE).by_layer(True)
        self.layout = replace(self.layout, grain=block or 1)
        self.decoder = load(config, Weights(file), GpuBackend(torch.device(DEVICE), block))
        self.pool = PagePool(self.layout, device=self.decoder.ops.device)
        self.steps = StepGraph(self.decoder, self.layout, CONTEXT)

    def rows(self, steps: list[int]) -> tuple[torch.Tensor, dict[PageKey, bytes]]:
        """The last hidden state after steps of so many rows, and all pages that are full."""
        seq = Sequence(self.pool)
        for count in steps:
            ids = IDS[seq.length : seq.length + count]
            part = seq.reserve(ids)
            hidden = self.steps.run(part)
            if hidden is None:
                hidden = self.decoder.hidden(Step((part,)))
            seq.commit(ids)
        pages = {
            key: bytes(self.pool.page(key[0], page).cpu().numpy())
            for key, page in seq.numbered().items()
            if (key[1] + 1) * PAGE <= seq.length
        }
        seq.close()
        return hidden[-1].clone(), pages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "types", "ways"),
    [("llama", "int8", ([16, 17],)), pytest.param("gemma3", "f16", ([32, 1], [16, 17]), marks=MORE)],
)
def test_rows_do_not_depend_on_how_many_are_computed_together(
    arch: str, types: str, ways: tuple[list[int], ...]
) -> None:
    """A prompt in one step, in graphs of one and two blocks, behind one that was there, and with one row alone."""
    model = Model(arch, types, BLOCK)
    hidden, pages = model.rows([33])
    for steps in ways:
        found, there = model.rows(steps)
        assert torch.equal(found, hidden), steps
        same = pages.keys() & there.keys()  # windows let go of others in a step of fewer rows
        assert same and all(there[key] == pages[key] for key in same), steps


def test_a_prompt_goes_on_behind_whole_blocks() -> None:
    model = Model("llama", "f16", BLOCK)
    seq = Sequence(model.pool)
    seq.reserve(IDS[:100])
    seq.commit(IDS[:100])
    assert [live_rows(seq, IDS[:n]) for n in (100, 96, 95, 31)] == [96, 96, 80, 16]


@pytest.mark.parametrize(
    ("load", "cache", "named"),
    [
        (LoadOptions("m", exact=True), CacheOptions(), "`exact`"),
        (LoadOptions("m", lora=(LoraOption("a"),)), CacheOptions(), "`lora`"),
        (LoadOptions("m"), CacheOptions(tail=0), "`tail=0`"),
        (LoadOptions("m"), CacheOptions(ubatch=64), "`ubatch=64`"),
        (LoadOptions("m"), CacheOptions(attend=AttendOptions(share=0.25)), "`prefill_sparse`"),
    ],
)
def test_what_is_not_known_to_repeat_is_refused(load: LoadOptions, cache: CacheOptions, named: str) -> None:
    config = from_gguf(*_header("llama"))
    with pytest.raises(UsageError, match=named):
        strictrepeat.check(load, cache, config)
    strictrepeat.check(LoadOptions("m"), CacheOptions(ubatch=512), config)


def test_mixtures_are_refused() -> None:
    with pytest.raises(UsageError, match="a mixture of experts"):
        strictrepeat.check(LoadOptions("m"), CacheOptions(), from_gguf(*_header("mixtral")))


def _header(variant: str):
    file = GGUFFile.open(tiny.make(variant).path)
    return file.metadata, {name: t.shape for name, t in file.tensors.items()}
