"""Latents and states, in every family that keeps them and every cache type: rows are what they were, wherever they are
cut, gone back to, saved and read again, in this process and in another."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from conftest import PACKAGE_ROOT
from engines import PROMPT, open_tiny, states
from hypothesis import given, settings
from hypothesis import strategies as st
from kernelcases import one_thread

from kvcli.codecs import CODECS
from kvcli.options import CacheOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache import enginecaches, savedsequence

CTX, PAGE, LENGTH = 128, 16, 80
KEPT = (
    "qwen35", "qwen35-named", "qwen35moe", "qwen3next", "granitehybrid", "granitehybrid-dense", "falcon-h1",
    "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2-biased", "lfm2moe", "deepseek2", "deepseek2-groups", "deepseek2-glm",
    "mistral4",
)  # fmt: skip
GO_ON = f"""
import hashlib, itertools, json, sys
sys.path.insert(0, {str(PACKAGE_ROOT)!r})
from kvcli import environment
environment.prepare()
import torch
from pathlib import Path
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache import enginecaches, savedsequence
for path, codec, file, ids in json.load(sys.stdin):
    cache = CacheOptions(ctx_size={CTX}, type_k=codec, type_v=codec, page_size={PAGE}, force_types=True)
    engine = Engine.open(Path(path), LoadOptions(path, 1), cache)
    with torch.inference_mode():
        seq = savedsequence.load(enginecaches.view(engine), Path(file))
        hidden = engine.forward(seq, ids[seq.length :])
    print(hashlib.sha256(hidden.numpy().tobytes()).hexdigest(), len(hidden))
"""


def options(codec: str) -> CacheOptions:
    return CacheOptions(ctx_size=CTX, type_k=codec, type_v=codec, page_size=PAGE, force_types=True)


def test_every_family_is_here() -> None:
    """By its layers: whatever keeps something else than rows."""
    found = set()
    for name, variant in tiny.VARIANTS.items():
        keys = " ".join(variant.keys)
        if any(key in keys for key in ("ssm.", "shortconv.", "kv_lora_rank")):
            found.add(variant.arch)
        assert name not in KEPT or variant.arch in found
    assert found == {tiny.VARIANTS[name].arch for name in KEPT}


@pytest.fixture(scope="module", params=KEPT)
def opened(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with one_thread():
        yield open_tiny(request.param, "native", options("f32"))


def whole_of(engine: Engine) -> torch.Tensor:
    seq = engine.new_sequence()
    whole = states(engine, seq, PROMPT[:LENGTH])
    seq.close()
    return whole


def rest(engine: Engine, seq: Sequence, cuts: list[int]) -> torch.Tensor:
    """Hidden states of what a sequence lacks, in steps that end at these lengths."""
    start = seq.length
    ends = [start, *(cut for cut in cuts if start < cut < LENGTH), LENGTH]
    return torch.cat([states(engine, seq, PROMPT[a:b]) for a, b in itertools.pairwise(ends)])


cutting = st.sets(st.integers(1, LENGTH - 1), max_size=5).map(sorted)


@pytest.mark.parametrize("examples", [1, pytest.param(25, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_are_what_they_were(opened: Engine, codec: str, examples: int, tmp_path: Path) -> None:
    engine, path = opened.beside(options(codec)), tmp_path / "x.safetensors"

    @settings(max_examples=examples, deadline=None, database=None)
    @given(cutting, cutting, st.integers(0, LENGTH - 1), st.integers(PAGE, LENGTH - 1), st.integers(0, 20))
    @torch.inference_mode()
    def check(cuts: list[int], others: list[int], back: int, kept: int, astray: int) -> None:
        seq = engine.new_sequence()
        assert torch.equal(rest(engine, seq, cuts), whole)
        length = seq.rewind_to(back)
        if astray:
            states(engine, seq, list(range(3, 3 + astray)))
            length = seq.rewind_to(length)
        assert length <= back and torch.equal(rest(engine, seq, others), whole[length:])
        length = seq.rewind_to(kept)
        savedsequence.save(view, seq, path)
        seq.close()
        seq = savedsequence.load(view, path)
        assert seq.length == (length // PAGE * PAGE if seq.states else length)
        start = seq.length
        assert torch.equal(rest(engine, seq, cuts), whole[start:])
        seq.close()
        engine.pool.check([])

    with one_thread(), torch.inference_mode():
        view, whole = enginecaches.view(engine), whole_of(engine)
        check()


def test_another_process_goes_on(tmp_path: Path) -> None:
    """Of each family with one type, the rest of the rows, bit by bit."""
    asked, expected = [], []
    with one_thread(), torch.inference_mode():
        for name, codec in zip(KEPT, itertools.cycle(CODECS)):
            engine, file = open_tiny(name, "native", options(codec)), tmp_path / f"{name}.safetensors"
            whole, seq = whole_of(engine), engine.new_sequence()
            states(engine, seq, PROMPT[:50])
            savedsequence.save(enginecaches.view(engine), seq, file)
            start = 48 if seq.states else 50
            expected.append(f"{hashlib.sha256(whole[start:].numpy().tobytes()).hexdigest()} {LENGTH - start}")
            asked.append([str(tiny.make(name).path), codec, str(file), PROMPT[:LENGTH]])
    found = subprocess.run(
        [sys.executable, "-c", GO_ON], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split("\n")[:-1] == expected
