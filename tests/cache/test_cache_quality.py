"""What cache types cost on real models stays within limits.

One chunk of one text: enough to notice what has become worse. `benchmarks/cache_types.py` measures more.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import ROOT

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import quality
from kvcli.runtime.evaluate.quality import Scoring, Summary


def _measured(
    name: str, path: Path, types: list[tuple[str, str]], protocol: Scoring, tail: int = 1
) -> dict[str, Summary]:
    """Of one chunk at the start of the long golden text, by keys/values."""
    ids = json.loads((ROOT / "tests" / "data" / f"goldens_{name}.json").read_text())["long"]["ids"]
    engine = Engine.open(path, LoadOptions(name), CacheOptions(tail=tail))
    found = quality.measure(engine, [[ids[: protocol.chunk]]], types, protocol, lambda *_: None)
    return {"/".join(t): quality.summarize(scores, found[quality.BASE]) for t, scores in found.items()}


@pytest.mark.models
def test_smollm2(smollm2_path: Path):
    found = _measured("smollm2", smollm2_path, [("int8", "int8"), ("int4", "int4")], Scoring(512, 1, 256))
    assert found["int8/int8"].kld <= 0.0001 and found["int4/int4"].kld <= 0.0080
    assert found["int4/int4"].top1 >= 93.5 and found["int8/int8"].top1 >= 99.5


@pytest.mark.models
@pytest.mark.thorough
def test_smollm2_with_other_types_and_without_a_tail(smollm2_path: Path):
    found = _measured("smollm2", smollm2_path, [("fp8", "fp8"), ("int8", "int4")], Scoring(512, 1, 256))
    assert found["fp8/fp8"].kld <= 0.007 and found["int8/int4"].kld <= 0.0010
    no_tail = _measured("smollm2", smollm2_path, [("int4", "int4")], Scoring(512, 1, 256), tail=0)
    assert no_tail["int4/int4"].kld <= 0.030


@pytest.mark.models
@pytest.mark.thorough
def test_gemma3(gemma3_path: Path):
    found = _measured("gemma3", gemma3_path, [("int8", "int8"), ("int4", "int4")], Scoring(640, 1, 512))
    assert found["int8/int8"].kld <= 0.0002 and found["int4/int4"].kld <= 0.016
