"""Sampling on the device against the host's sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpucases import DEVICE
from kernelcases import one_thread

from kvcli.errors import KVError
from kvcli.kernels.gpu.sample import DeviceSampler
from kvcli.options import SampleOptions
from kvcli.runtime.sampler import Sampler, uniform

Case = tuple[SampleOptions, torch.Tensor]  # options, logits [draws, vocab]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def drawn_on_device(options: SampleOptions, logits: torch.Tensor) -> list[int]:
    """Draw i is that of position i."""
    host = Sampler(options, {}, logits.shape[1])
    sampler, drawn = DeviceSampler(host.effective, logits.shape[1], DEVICE), []
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for i, row in enumerate(logits):
        sampler.launch(row.to(DEVICE), torch.tensor([uniform(host.seed, 0, i)], device=DEVICE), out)
        drawn.append(int(out))
    return drawn


def logits_like(kind: str, draws: int, vocab: int, seed: int) -> torch.Tensor:
    x = torch.randn(draws, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":
        return (x * 2).round() / 2  # some are -0.0
    if kind == "equal":
        return torch.full_like(x, -0.5)
    if kind == "sparse":
        return torch.where(x > 4, x, -math.inf).index_fill(1, torch.tensor([vocab // 2]), 1.0)
    return x


def combinations() -> Iterator[Case]:
    """Every pair of top-k and top-p; other options, vocabularies and kinds of logits taken in turn."""
    sizes, kinds = itertools.cycle((100, 1003, 4999)), itertools.cycle(("plain", "ties", "sparse", "equal", "plain"))
    temperatures, biases = itertools.cycle((0.8, 1.0, 0.1, 30.0)), itertools.cycle((False, True, False))
    least = itertools.cycle((0.0, 0.05, 1.0))
    for number, (k, p) in enumerate(itertools.product((1, 2, 40, 333, 1024), (0.05, 0.5, 0.95, 1.0))):
        vocab, kind = next(sizes), next(kinds)
        bias = {1: -math.inf, 7: 2.5, vocab - 1: 9.0} if next(biases) else {}
        options = SampleOptions(next(temperatures), k, p, next(least), seed=number, logit_bias=bias)
        yield options, logits_like(kind, 3, vocab, number)


def test_tokens_are_those_of_the_sampler() -> None:
    cases = list(combinations())
    cases += [(SampleOptions(seed=3), logits_like("plain", 24, 2049, 3))]  # the built-in values
    for vocab, kind in ((100, "ties"), (1003, "plain"), (4999, "ties"), (77, "equal")):
        options = SampleOptions(0.0, logit_bias={5: -math.inf} if vocab > 1000 else {})
        cases.append((options, logits_like(kind, 5, vocab, vocab)))
    assert sum(len(logits) for _, logits in cases) >= 100
    for options, logits in cases:
        sampler = Sampler(options, {}, logits.shape[1])
        expected = [sampler.sample(row, [], i) for i, row in enumerate(logits)]
        assert drawn_on_device(options, logits) == expected, options


def test_what_is_not_a_number_is_reported() -> None:
    rows = logits_like("plain", 6, 300, 4)
    rows[0, 299], rows[1, 5], rows[2, 17] = math.nan, -math.nan, math.inf
    rows[3], rows[4, 1:] = -math.inf, -math.inf
    for options in (SampleOptions(0.0), SampleOptions(0.7, seed=1), SampleOptions(1.0, 300, 1.0)):
        got = drawn_on_device(options, rows)
        assert got[:5] == [-1, -1, -1, -2, 0]
        sampler = Sampler(options, {}, 300)
        assert got[5] >= 0
        for row, code in zip(rows[:4], got, strict=False):
            with pytest.raises(KVError, match=DeviceSampler.error(code)):
                sampler.sample(row, [], 0)


def test_what_the_host_must_sample() -> None:
    def reason(options: SampleOptions) -> str:
        return DeviceSampler.supports(Sampler(options, {}, 5000).effective)

    plain = SampleOptions(seed=1)
    assert reason(plain) == reason(replace(plain, logit_bias={3: -math.inf})) == ""
    assert reason(replace(plain, temperature=0.0, top_k=0)) == ""
    assert reason(replace(plain, repeat_penalty=1.1, repeat_last_n=0)) == ""
    for name in ("presence_penalty", "frequency_penalty", "repeat_penalty"):
        assert "penalties" in reason(replace(plain, **{name: 1.5}))
    assert "top-k" in reason(replace(plain, top_k=0)) and "top-k" in reason(replace(plain, top_k=1025))
