"""Which numbers the sampler draws: Philox, the distribution of the draws, and the stream of a seed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvcli.options import SampleOptions
from kvcli.runtime.engine.sampler import Sampler, philox4x32, uniform

OFF = SampleOptions(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
PROBABILITIES = [0.05, 0.4, 0.1, 0.25, 0.2]
LOGITS = torch.tensor(PROBABILITIES).log()


# --- random numbers


def test_philox_known_answers():
    """The vectors published with Random123."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox4x32(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_uniform():
    numbers = [uniform(7, 0, position) for position in range(20_000)]
    assert min(numbers) >= 0 and max(numbers) < 1 and len(set(numbers)) > 19_900
    counts = [0] * 20
    for number in numbers:
        counts[int(number * 20)] += 1
    assert sum((count - 1000) ** 2 / 1000 for count in counts) < 43.8  # chi-square, 19 degrees, p = 0.001


def test_uniform_depends_on_every_argument_and_never_reaches_one():
    points = [(1, 0, 0), (2, 0, 0), (1 + (1 << 32), 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 1 << 32), (0, 0, 0)]
    assert len({uniform(*point) for point in points}) == len(points)
    assert uniform((1 << 64) - 1, (1 << 32) - 1, 10_000_000) < 1


TRITON_SCRIPT = """
import torch, triton, triton.language as tl
from kvcli.runtime.engine.sampler import philox4x32, uniform

@triton.jit
def draw(floats, words, seed, first, n: tl.constexpr):
    offsets = first + tl.arange(0, n)
    tl.store(floats + tl.arange(0, n), tl.rand(seed, offsets))
    a, b, c, d = tl.randint4x(seed, offsets)
    tl.store(words + tl.arange(0, n) * 4, a)
    tl.store(words + tl.arange(0, n) * 4 + 1, b)
    tl.store(words + tl.arange(0, n) * 4 + 2, c)
    tl.store(words + tl.arange(0, n) * 4 + 3, d)

for seed, first in ((0, 0), (1, 7), (42, 10_000_000), (0x123456789ABCDEF0, 5)):
    floats, words = torch.zeros(64), torch.zeros(64, 4, dtype=torch.int32)
    draw[(1,)](floats, words, seed, first, 64)
    assert floats.tolist() == [uniform(seed, 0, first + i) for i in range(64)], seed
    key = (seed & 0xFFFFFFFF, seed >> 32)
    ours = [philox4x32((first + i, 0, 0, 0), key) for i in range(64)]
    assert [tuple(w & 0xFFFFFFFF for w in row) for row in words.tolist()] == ours, seed
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_numbers_are_those_of_triton(tmp_path):
    script = tmp_path / "draw.py"
    script.write_text(TRITON_SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout == "equal\n", done.stderr[-2000:]


# --- the distribution that is drawn from


def check_frequencies(options: SampleOptions, logits: torch.Tensor, expected: dict[int, float], limit: float):
    """Chi-square of 3,000 draws; `limit` is the 0.1 % point for len(expected) - 1 degrees of freedom."""
    sampler, draws = Sampler(options, {}, len(logits)), 3000
    counts = dict.fromkeys(expected, 0)
    for position in range(draws):
        counts[sampler.sample(logits, [], position)] += 1  # KeyError: a token that must never be drawn
    assert sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items()) < limit


@pytest.mark.parametrize("seed", [0, 1, 1 << 63])
def test_draws_follow_the_softmax(seed: int):
    check_frequencies(replace(OFF, seed=seed), LOGITS, dict(enumerate(PROBABILITIES)), 18.47)


def test_draws_follow_the_temperature():
    weights = [p**2 for p in PROBABILITIES]  # temperature 0.5
    expected = {i: w / sum(weights) for i, w in enumerate(weights)}
    check_frequencies(replace(OFF, temperature=0.5), LOGITS, expected, 18.47)


def test_draws_follow_top_k():
    check_frequencies(replace(OFF, top_k=2), LOGITS, {1: 0.4 / 0.65, 3: 0.25 / 0.65}, 10.83)


# --- the stream


def stream(options: SampleOptions, sequence: int = 0, positions: range = range(60)) -> list[int]:
    sampler = Sampler(replace(options, sequence=sequence), {}, 50)
    logits = torch.randn(50, generator=torch.Generator().manual_seed(5))
    return [sampler.sample(logits, [], position) for position in positions]


def test_same_seed_same_stream_whatever_came_before():
    whole = stream(replace(OFF, seed=9))
    assert whole == stream(replace(OFF, seed=9)) and len(set(whole)) > 10
    assert whole[40:] == stream(replace(OFF, seed=9), positions=range(40, 60))


def test_other_seeds_sequences_and_positions_differ():
    whole = stream(replace(OFF, seed=9))
    assert whole != stream(replace(OFF, seed=10)) and whole != stream(replace(OFF, seed=9), sequence=1)
    assert whole != stream(replace(OFF, seed=9), positions=range(1, 61))


def test_random_seeds_are_reported_and_repeatable():
    samplers = [Sampler(replace(OFF, seed=-1), {}, 50) for _ in range(4)]
    assert len({sampler.seed for sampler in samplers}) > 1
    assert all(0 <= sampler.seed < 1 << 32 for sampler in samplers)
    seed = samplers[0].effective["seed"]
    logits = torch.zeros(50)
    again = Sampler(replace(OFF, seed=seed), {}, 50)
    assert [samplers[0].sample(logits, [], i) for i in range(20)] == [again.sample(logits, [], i) for i in range(20)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "options", [SampleOptions(seed=3), OFF, replace(OFF, top_p=0.9), replace(OFF, temperature=0.0)]
)
def test_gpu_draws_what_the_cpu_draws(options: SampleOptions):
    options = replace(options, repeat_penalty=1.1, logit_bias={3: 1.0})
    sampler = Sampler(options, {}, 5003)
    for position in range(50):
        logits = torch.randn(5003, generator=torch.Generator().manual_seed(position)) * 3
        assert sampler.sample(logits.cuda(), [1, 2], position) == sampler.sample(logits, [1, 2], position)
