"""Models with experts: rows do not depend on their company, although products group them by expert."""

from __future__ import annotations

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from kernelcases import native, one_thread, same_bits

from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.headers.openmodel import open_model
from kvcli.runtime.model.loading import load
from kvcli.runtime.model.weights import Weights


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize("variant", ("qwen2moe", "glm4moe", "deepseek2-groups"))
def test_chunks_and_batches_give_the_bits_of_rows_one_by_one(variant: str):
    loaded = Loaded(tiny.make(variant).path, "")
    ids, other = IDS[:40], IDS[40:47]
    seq = Sequence(loaded.pool)
    whole = loaded.run(seq, ids)
    seq = Sequence(loaded.pool)
    parts = [loaded.run(seq, ids[lo:hi]) for lo, hi in ((0, 1), (1, 4), (4, 17), (17, 39), (39, 40))]
    assert same_bits(torch.cat(parts), whole)
    alone = loaded.run(Sequence(loaded.pool), other)
    steps = [Sequence(loaded.pool).reserve(each) for each in (ids, other)]
    together = loaded.model.logits(loaded.model.hidden(Step(tuple(steps))))
    assert same_bits(together[:40], whole) and same_bits(together[40:], alone)


def test_experts_in_integers_predict_what_exact_ones_do():
    """Nor do their bits depend on chunks."""
    path = tiny.make_even("qwen3moe", quantized=True)
    loaded, exact, ids = Loaded(path, ""), Loaded(path, ""), [i % 64 for i in IDS[:40]]
    if native().exact:
        pytest.skip("nothing is interleaved on this processor")
    exact.model = load(exact.config, Weights(open_model(path)), NativeBackend(2, exact=True))
    found, wanted = loaded.run(Sequence(loaded.pool), ids), exact.run(Sequence(exact.pool), ids)
    assert "experts" in loaded.model.ops.arithmetic and not same_bits(found, wanted)
    p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    assert float((p.exp() * (p - q)).sum(-1).mean()) <= 0.0005
    seq = Sequence(loaded.pool)
    assert same_bits(torch.cat([loaded.run(seq, ids[lo:hi]) for lo, hi in ((0, 1), (1, 4), (4, 39), (39, 40))]), found)
