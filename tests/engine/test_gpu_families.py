"""Families whose tokens have no graph: their steps on a GPU are those of the reference."""

from __future__ import annotations

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from gpucases import DEVICE
from kernelcases import one_thread

from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "types", "limit"),
    [("llama4", "f16", 1e-4), ("gemma4", "int8", 2e-3), ("gemma4-experts", "f16", 1e-4), ("gemma3n", "f16", 1e-4)],
)
def test_steps_are_those_of_the_reference(variant: str, types: str, limit: float):
    """Prompts and single tokens, in the middle of pages, across their ends, beyond windows and chunks."""
    path = tiny.make(variant).path
    with one_thread():
        theirs, ours = Loaded(path, "reference", types=types), Loaded(path, "reference", types=types)
        ours.model = load(ours.config, Weights(GGUFFile.open(path)), GpuBackend(torch.device(DEVICE)))
        ours.pool = PagePool(ours.pool.layout.by_layer(True), device=ours.model.ops.device)
        seqs, at = (Sequence(theirs.pool), Sequence(ours.pool)), 0
        for count in (18, 1, 14, 1):
            expected, found = (m.run(s, IDS[at : at + count]) for m, s in zip((theirs, ours), seqs, strict=True))
            p, q = (x.double().log_softmax(-1) for x in (expected, found.cpu()))
            assert (p.exp() * (p - q)).sum(-1).max() < limit
            at += count
