"""Sampling on the device against the host's sampler: in Triton's interpreter, compiled where there is a GPU.

The kernels run in a process of their own: whether they are interpreted is settled when Triton is imported.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcli.errors import KVError
from kvcli.options import SampleOptions
from kvcli.runtime.sampler import Sampler, uniform

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SCRIPT = """
import json, sys
import torch
from kvcli.kernels.gpu.sample import DeviceSampler

device, cases = sys.argv[1], torch.load(sys.argv[2])
found = []
for effective, numbers, logits in cases:
    sampler = DeviceSampler(effective, logits.shape[1], device)
    out, drawn = torch.zeros(1, dtype=torch.int64, device=device), []
    for number, row in zip(numbers, logits):
        sampler.launch(row.to(device), number[None].to(device), out)
        drawn.append(int(out))
    found.append(drawn)
print(json.dumps(found))
"""

Case = tuple[SampleOptions, torch.Tensor]  # options, logits [draws, vocab]


def drawn_on_device(cases: list[Case], folder: Path) -> list[list[int]]:
    """Draw i of a case is that of position i."""
    data: list[Any] = []
    for options, logits in cases:
        sampler = Sampler(options, {}, logits.shape[1])
        numbers = [uniform(sampler.seed, 0, i) for i in range(len(logits))]
        data.append((sampler.effective, torch.tensor(numbers), logits))
    torch.save(data, folder / "cases.pt")
    (folder / "draw.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if DEVICE == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, folder / "draw.py", DEVICE, folder / "cases.pt"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


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


def test_tokens_are_those_of_the_sampler(tmp_path: Path) -> None:
    cases = list(combinations())
    cases += [(SampleOptions(seed=3), logits_like("plain", 60, 2049, 3))]  # the built-in values
    for vocab, kind in ((100, "ties"), (1003, "plain"), (4999, "ties"), (77, "equal")):
        options = SampleOptions(0.0, logit_bias={5: -math.inf} if vocab > 1000 else {})
        cases.append((options, logits_like(kind, 20, vocab, vocab)))
    expected = []
    for options, logits in cases:
        sampler = Sampler(options, {}, logits.shape[1])
        expected.append([sampler.sample(row, [], i) for i, row in enumerate(logits)])
    assert sum(map(len, expected)) >= 200
    for (options, _), got, wanted in zip(cases, drawn_on_device(cases, tmp_path), expected, strict=True):
        assert got == wanted, options


def test_what_is_not_a_number_is_reported(tmp_path: Path) -> None:
    from kvcli.kernels.gpu.sample import DeviceSampler

    rows = logits_like("plain", 6, 300, 4)
    rows[0, 299], rows[1, 5], rows[2, 17] = math.nan, -math.nan, math.inf
    rows[3], rows[4, 1:] = -math.inf, -math.inf
    cases = [(SampleOptions(0.0), rows), (SampleOptions(0.7, seed=1), rows), (SampleOptions(1.0, 300, 1.0), rows)]
    for (options, _), got in zip(cases, drawn_on_device(cases, tmp_path), strict=True):
        assert got[:5] == [-1, -1, -1, -2, 0]
        sampler = Sampler(options, {}, 300)
        assert got[5] >= 0
        for row, code in zip(rows[:4], got, strict=False):
            with pytest.raises(KVError, match=DeviceSampler.error(code)):
                sampler.sample(row, [], 0)


def test_what_the_host_must_sample() -> None:
    """In this process: `supports` runs nothing."""
    from kvcli.kernels.gpu.sample import DeviceSampler

    def reason(options: SampleOptions) -> str:
        return DeviceSampler.supports(Sampler(options, {}, 5000).effective)

    plain = SampleOptions(seed=1)
    assert reason(plain) == reason(replace(plain, logit_bias={3: -math.inf})) == ""
    assert reason(replace(plain, temperature=0.0, top_k=0)) == ""
    assert reason(replace(plain, repeat_penalty=1.1, repeat_last_n=0)) == ""
    for name in ("presence_penalty", "frequency_penalty", "repeat_penalty"):
        assert "penalties" in reason(replace(plain, **{name: 1.5}))
    assert "top-k" in reason(replace(plain, top_k=0)) and "top-k" in reason(replace(plain, top_k=1025))
