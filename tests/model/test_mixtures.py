"""Models with experts: rows do not depend on their company, although products group them by expert."""

from __future__ import annotations

import pytest
import tiny
import torch
from archcases import IDS, Loaded
from kernelcases import one_thread, same_bits

from kvcli.runtime.cache.sequence import Sequence, Step


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
