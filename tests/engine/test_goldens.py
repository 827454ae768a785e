"""The real models against log-probabilities and greedy tokens of an independent implementation.

The texts, ids and figures in data/goldens_*.json were made by another program from the same two files. Bars: mean
negative log-likelihood within 0.002, the last token's ten best within 0.02, greedy tokens equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kernelcases import need_native

from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine.engine import Engine

pytestmark = pytest.mark.models
DATA = Path(__file__).parents[1] / "data"
GOLDENS: dict[str, dict[str, Any]] = {
    name: json.loads((DATA / f"goldens_{name}.json").read_text("utf-8")) for name in ("smollm2", "gemma3")
}
TO_THE_END = {("smollm2", "chatml"), ("gemma3", "plain")}  # all 48 greedy tokens; the others: 16
ROWS = 128  # logits at a time: a row of gemma3's takes 1 MiB
TEXTS = [(name, text) for name in GOLDENS for text in GOLDENS[name]]


@pytest.fixture(scope="module")
def paths(smollm2_path: Path, gemma3_path: Path) -> dict[str, Path]:
    return {"smollm2": smollm2_path, "gemma3": gemma3_path}


def open_model(path: Path, backend: str, type_: str) -> Engine:
    if backend == "native":
        need_native()
    engine = Engine.open(path, LoadOptions(path.stem, backend=backend), CacheOptions(0, type_, type_))
    assert engine.loaded.backend == backend
    return engine


def check_text(engine: Engine, seq: Sequence, golden: dict[str, Any], greedy: int, every_row: bool = True) -> None:
    """Prefill as the engine does; then mean NLL, where `every_row` has its logits, last row and `greedy` tokens."""
    ids, loss, last = golden["ids"], 0.0, torch.empty(0)
    for start, end in engine.chunks(0, len(ids)):
        hidden = engine.forward(seq, ids[start:end])
        for at in range(start, end, ROWS) if every_row else [end - 1]:
            logp = engine.logits(hidden[at - start : at - start + ROWS]).log_softmax(-1)
            targets = torch.tensor(ids[at + 1 : at + 1 + len(logp)])
            loss -= float(logp[: len(targets)].gather(1, targets[:, None]).double().sum())
            last = logp[-1]
    assert not every_row or loss / (len(ids) - 1) == pytest.approx(golden["mean_nll"], abs=0.002)
    assert len(golden["last_top10"]) == 10
    for token, expected in golden["last_top10"]:
        assert float(last[token]) == pytest.approx(expected, abs=0.02)
    found = [int(last.argmax())]
    while len(found) < greedy:
        last = engine.logits(engine.forward(seq, found[-1:]))[0]
        found.append(int(last.argmax()))
    assert found == golden["greedy_ids"][:greedy]


@pytest.fixture(scope="module")
def exact(paths: dict[str, Path]) -> dict[str, Engine]:
    """Native kernels, 32-bit cache."""
    return {name: open_model(path, "native", "f32") for name, path in paths.items()}


def test_all_texts_are_there():
    assert len(TEXTS) == 11 and set(TEXTS) > TO_THE_END


# The long text of gemma3 has a test of its own.
@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param(*pair, marks=pytest.mark.thorough if pair[1] == "long" else ())
        for pair in TEXTS
        if pair != ("gemma3", "long")
    ],
)
def test_native(name: str, text: str, exact: dict[str, Engine]):
    seq = exact[name].new_sequence()
    check_text(exact[name], seq, GOLDENS[name][text], 48 if (name, text) in TO_THE_END else 16)
    seq.close()


@pytest.mark.parametrize("name", GOLDENS)
def test_default_cache_of_16_bits(name: str, paths: dict[str, Path]):
    engine = open_model(paths[name], "native", "auto")
    assert engine.loaded.cache_types == ("f16", "f16")
    for text in ("code", "unicode"):
        check_text(engine, engine.new_sequence(), GOLDENS[name][text], 16)


@pytest.mark.parametrize("name", GOLDENS)
def test_reference(name: str, paths: dict[str, Path]):
    engine = open_model(paths[name], "reference", "f32")
    shortest = min(GOLDENS[name].values(), key=lambda golden: len(golden["ids"]))
    check_text(engine, engine.new_sequence(), shortest, 1)


@pytest.mark.parametrize("every_row", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_gemma3_holds_its_window_and_a_chunk(exact: dict[str, Engine], every_row: bool):
    """The long text, of 2,108 tokens: fifteen sliding layers (window 512) stay at 16 pages of 64."""
    engine = exact["gemma3"]
    assert (engine.ubatch, engine.layout.page_size) == (512, 64)
    seq = engine.new_sequence()
    check_text(engine, seq, GOLDENS["gemma3"]["long"], 16, every_row)
    assert seq.length == 2108 + 15
    sliding = next(g for g, group in enumerate(engine.layout.groups) if group.window == 512)
    assert engine.pool.peak(sliding) == engine.layout.pages(2123, 512)[sliding] == 8 + 8  # ceil(511 / 64) + 512 / 64
    assert engine.pool.peak(1 - sliding) == 34
    engine.pool.check(seq.holds())
    seq.close()
