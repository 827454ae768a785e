"""Layers and heads that predict further tokens, on a card: answers are those without guesses.

A step of several rows rounds otherwise than a token's kernels: answers may part where two tokens are nearly as likely.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import eagles
import pytest
import tiny
import torch
from batches import alone
from engines import GREEDY, PROMPT, last_logits
from gpucases import DEVICE

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.spec.pace import Drafted

NEAR = 0.1  # of the deviation of logits
CASES = [  # a model, whether a head guesses for it, cache types
    ("glm4moe-ahead", False, ("f16", "int4")), ("deepseek2-ahead", False, ("f16", "int8")),
    ("llama", True, ("f16", "int4")), ("qwen35-ahead", False, ("f16", "int8")),
]  # fmt: skip


def opened(variant: str, headed: bool, codec: str) -> Engine:
    head: Path | None = eagles.make(variant)[0] if headed else None
    load = LoadOptions(variant, 2, "auto", device=DEVICE, mtp=not headed)
    return Engine.open(tiny.make(variant).path, load, CacheOptions(160, codec, codec, page_size=16, ubatch=32), head)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a step of the CPU is tested in test_predictors.py")
@pytest.mark.parametrize(
    ("variant", "headed", "codec"), [(*case, codec) for *case, codecs in CASES for codec in codecs]
)
@torch.inference_mode()
def test_answers_are_those_without_guesses(
    variant: str, headed: bool, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafted, "worth", lambda self, most: max(0, min(most, 4)))
    engine, most, equal = opened(variant, headed, codec), 60, 0
    for first in range(4):
        prompt, options = PROMPT[first : first + 30], replace(GREEDY, max_tokens=most)
        plain, found = alone(engine, prompt, replace(options, spec="off")).ids, alone(engine, prompt, options)
        assert found.end.usage.drafted_tokens > 40 and len(found.ids) == most
        equal += plain == found.ids
        same = next((n for n, pair in enumerate(zip(plain, found.ids, strict=True)) if pair[0] != pair[1]), most)
        if same < most:
            with closing(engine.new_sequence()) as seq:
                logits = last_logits(engine, seq, prompt + plain[:same])[0]
            assert abs(float(logits[plain[same]] - logits[found.ids[same]])) < NEAR * float(logits.std()), (first, same)
    assert equal > 0
    engine.pool.check([])
