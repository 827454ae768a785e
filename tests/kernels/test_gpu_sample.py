"""Sampling on the device against the host's sampler."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpucases import DEVICE, MORE
from kernelcases import one_thread

from kvcli.errors import KVError
from kvcli.kernels.gpu.sample import DeviceSampler, uniforms
from kvcli.options import SampleOptions
from kvcli.runtime.engine.sampler import Sampler, uniform

Case = tuple[SampleOptions, torch.Tensor]  # options, logits [draws, vocab]


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def drawn_on_device(options: SampleOptions, logits: torch.Tensor, history: list[int] | None = None) -> list[int]:
    """Draw i is that of position i."""
    host = Sampler(options, {}, logits.shape[1])
    sampler, drawn = DeviceSampler([host.effective], logits.shape[1], DEVICE, [history or []]), []
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


@pytest.mark.slow
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


PENALISED = [
    (SampleOptions(0.0, repeat_penalty=1.3), 70),
    (SampleOptions(0.0, repeat_penalty=0.7, presence_penalty=2.5, repeat_last_n=3, logit_bias={2: 3.5}), 2),
    (SampleOptions(0.8, 40, 0.9, 0.0, repeat_penalty=1.1, repeat_last_n=-1), 200),
    (SampleOptions(1.2, 3, 1.0, 0.1, frequency_penalty=0.7, presence_penalty=0.3, repeat_last_n=5), 0),
    (SampleOptions(2.0, 20, 1.0, 0.0, 1.1, 4, 0.1, 1.5, logit_bias={0: -math.inf}), 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "known"), [pytest.param(*case, marks=MORE if i % 2 else ()) for i, case in enumerate(PENALISED)]
)
def test_penalised_tokens_are_those_of_the_sampler(options: SampleOptions, known: int) -> None:
    """Each that is chosen counts for the next ones, until it is too long ago. The favourites stay about the same."""
    options, changed = replace(options, seed=7), []
    for vocab, kind in ((9, "ties"), (1500, "sparse")):
        logits = logits_like(kind, 1, vocab, 2) + logits_like("ties", 10, vocab, known) / 8
        before = torch.randint(vocab, (known,), generator=torch.manual_seed(1)).tolist()
        sampler, history = Sampler(options, {}, vocab), list(before)
        for i, row in enumerate(logits):
            history.append(sampler.sample(row, history, i))
        chosen = history[known:]
        assert drawn_on_device(options, logits, before) == chosen
        changed.append(drawn_on_device(replace(options, repeat_last_n=0), logits, before) != chosen)
    assert any(changed)


SIDE_BY_SIDE = {
    "drawn": [
        SampleOptions(0.0), SampleOptions(0.8, 40, 0.9, 0.0, seed=1 << 40),
        SampleOptions(1.3, 5, 1.0, 0.1, seed=(1 << 64) - 3),
        SampleOptions(0.7, 300, 0.5, 0.0, 1.3, 3, logit_bias={2: 3.5}, seed=5, sequence=7),
        SampleOptions(0.0, repeat_penalty=0.7, repeat_last_n=-1), SampleOptions(2.0, 1, 1.0, 0.0, 1.1, 64, 0.1, 1.5),
    ],
    "greedy": [SampleOptions(0.0), SampleOptions(0.0, repeat_penalty=1.4, repeat_last_n=2), SampleOptions(0.0)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_rows_side_by_side_have_options_of_their_own(kind: str) -> None:
    """Each row is that of a sampler alone; positions are far apart, and beyond 32 bits."""
    vocab, options = 701, SIDE_BY_SIDE[kind]
    hosts = [Sampler(replace(x, seed=i if x.seed == -1 else x.seed), {}, vocab) for i, x in enumerate(options)]
    before = [torch.randint(vocab, (3 * i,), generator=torch.manual_seed(i)).tolist() for i in range(len(hosts))]
    histories, n = [list(x) for x in before], len(hosts)
    device = DeviceSampler([x.effective for x in hosts], vocab, DEVICE, before)
    seeds = np.array([x.seed for x in hosts], np.uint64).view(np.int64)
    numbers = seeds.tolist(), [x.sequence for x in hosts], [i << 33 | 5 for i in range(n)]
    seeds, sequences, position = (torch.tensor(x, device=DEVICE) for x in numbers)
    drawn, out = torch.zeros(n, device=DEVICE), torch.zeros(n, dtype=torch.int64, device=DEVICE)
    favourites = logits_like("ties", n, vocab, 3)
    for step in range(4):
        logits = favourites + logits_like("ties", n, vocab, 20 + step) / 8
        uniforms(seeds, sequences, position + step, drawn)
        device.launch(logits.to(DEVICE), drawn, out)
        at = [int(x) + step for x in position]
        expected = [h.sample(row, text, p) for h, row, text, p in zip(hosts, logits, histories, at, strict=True)]
        assert out.tolist() == expected
        for text, token in zip(histories, expected, strict=True):
            text.append(token)


@pytest.mark.slow
def test_what_is_not_a_number_is_reported() -> None:
    rows = logits_like("plain", 6, 300, 4)
    rows[0, 299], rows[1, 5], rows[2, 17] = math.nan, -math.nan, math.inf
    rows[3], rows[4, 1:] = -math.inf, -math.inf
    penalised = SampleOptions(0.7, seed=1, repeat_penalty=1.1, repeat_last_n=2)
    for options in (SampleOptions(0.0), SampleOptions(0.7, seed=1), SampleOptions(1.0, 300, 1.0), penalised):
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
    for name in ("presence_penalty", "frequency_penalty", "repeat_penalty"):
        assert reason(replace(plain, **{name: 1.5})) == ""
    assert "DRY" in reason(replace(plain, dry_multiplier=0.8))
    assert reason(replace(plain, dry_multiplier=0.8, dry_penalty_last_n=0)) == ""
    assert "log probabilities" in reason(replace(plain, logprobs=0))
    assert "top-k" in reason(replace(plain, top_k=0)) and "top-k" in reason(replace(plain, top_k=1025))
