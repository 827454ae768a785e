"""Latents and states on a card: steps of any size, gone back to, restored from a file and computed together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny
import torch
from archcases import Loaded
from engines import PROMPT
from gpucases import DEVICE
from kernelcases import one_thread
from reusecases import ask

from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")]
STATES = (
    "qwen35", "qwen35moe", "qwen3next", "granitehybrid", "granitehybrid-dense", "falcon-h1", "nemotron_h",
    "nemotron_h_moe", "lfm2", "lfm2moe",
)  # fmt: skip
LATENTS = ("deepseek2", "deepseek2-groups", "deepseek2-glm", "mistral4")
MIXTURES = {"granitehybrid", *LATENTS, *(name for name in STATES if "moe" in name or "next" in name)}
CASES = [(name, codec) for name in (*STATES, *LATENTS) for codec in ("f16", "int8")]
CASES += [(name, "int4") for name in ("qwen35", "falcon-h1", "deepseek2")]
LIMITS = {"f16": 4e-4, "int8": 4e-3, "int4": 8e-2}  # of KL divergence
PAGE, LENGTH = 16, 120


def divergence(expected: torch.Tensor, found: torch.Tensor, variant: str) -> float:
    """The greatest KL divergence of a row, in nats, and with experts the median, since a card may choose another one
    where two are nearly as good; NaN where a logit is not finite."""
    p, q = (x.double().cpu().log_softmax(-1) for x in (expected, found))
    rows = (p.exp() * (p - q)).sum(-1)
    return float(rows.sum() * torch.nan if rows.isnan().any() else rows.median() if variant in MIXTURES else rows.max())


def opened(variant: str, codec: str) -> Engine:
    cache = CacheOptions(ctx_size=256, type_k=codec, type_v=codec, page_size=PAGE, force_types=True)
    return Engine.open(tiny.make(variant).path, LoadOptions(variant, device="cuda"), cache)


def generated(engine: Engine, prompt: list[int], options: SampleOptions) -> list[int]:
    *_, end = engine.generate(engine.new_sequence(), prompt, options)
    assert isinstance(end, End)
    return end.ids


def logits(engine: Engine, seq: Sequence, ids: list[int], cuts: list[int]) -> torch.Tensor:
    """Of the next rows of a sequence, in steps that end at these lengths."""
    found = []
    for end in [*(cut for cut in cuts if seq.length < cut < len(ids)), len(ids)]:
        found.append(engine.logits(engine.forward(seq, ids[seq.length : end])))
    return torch.cat(found)


@torch.inference_mode()
@pytest.mark.parametrize(("variant", "codec"), CASES)
def test_steps_and_going_back(variant: str, codec: str) -> None:
    """Rows are those of plain torch, whatever the steps were, and whatever was behind them and was taken back."""
    engine, ids, draw = opened(variant, codec), PROMPT[:LENGTH], random.Random(variant + codec)
    with one_thread():
        reference = Loaded(tiny.make(variant).path, "reference", types=codec)
        exact = reference.run(Sequence(reference.pool), ids)
    for cuts in ([], sorted(draw.sample(range(1, LENGTH), 5)), list(range(40, 72))):
        seq = engine.new_sequence()
        assert divergence(exact, logits(engine, seq, ids, cuts), variant) < LIMITS[codec], cuts
        back = seq.rewind_to(draw.randrange(20, LENGTH))
        logits(engine, seq, [*ids[:back], *range(3, 40)], [])  # something else, which is taken back
        back = seq.rewind_to(back)
        again = logits(engine, seq, ids, [back + 7, back + 8])
        assert divergence(exact[back:], again, variant) < LIMITS[codec], (cuts, back)
        seq.close()
    engine.pool.check([])


@pytest.mark.parametrize(("variant", "codec"), [case for case in CASES if case[1] != "int4"])
def test_a_file_restores_it(variant: str, codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into another engine, where the next tokens are those of a prompt that is computed as a whole."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    document, longer = PROMPT[:60], [*PROMPT[:60], *range(3, 20)]
    options = PromptCacheOptions(file=tmp_path / "x.safetensors")
    assert ask(opened(variant, codec), document, options).usage.cache_write_tokens == 60
    engine = opened(variant, codec)
    with torch.inference_mode():
        seq = engine.new_sequence()
        whole = logits(engine, seq, longer, [])[-1:]
        seq.close()
        found = list[torch.Tensor]()
        make = engine.logits
        monkeypatch.setattr(engine, "logits", lambda hidden: found.append(make(hidden)) or found[-1])
        end = ask(engine, longer, options)
    assert end.usage.disk_tokens >= 48 and found
    assert divergence(whole, found[0][-1:], variant) < LIMITS[codec]


@torch.inference_mode()
@pytest.mark.parametrize(("variant", "codec"), [case for case in CASES if case[1] != "int4"])
def test_answers_together(variant: str, codec: str) -> None:
    """Those of answers one by one, as far as their tokens are not nearly as likely as others."""
    engine, options = opened(variant, codec), SampleOptions(temperature=0.0, ignore_eos=True, max_tokens=24)
    prompts = [PROMPT[: 20 + 17 * i] for i in range(4)]
    alone = [generated(engine, prompt, options) for prompt in prompts]
    requests = [engine.request(engine.new_sequence(), prompt, options) for prompt in prompts]
    while not all(request.finished for request in requests):
        engine.step([request for request in requests if not request.finished])
    together = [request.history[request.n_prompt :] for request in requests]
    same = sum(a == b for one, other in zip(alone, together, strict=True) for a, b in zip(one, other, strict=True))
    assert same > 72, (alone, together)
