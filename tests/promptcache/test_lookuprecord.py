"""What is recorded while prompts are answered, and rows that are computed since reading them would be slower."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engines import PROMPT, run
from reusecases import FOUR, Told, ask, engine_of, files_in, store_in

from kvcli.options import PromptCacheOptions
from kvcli.runtime.promptcache import lookuprecord, worth
from kvcli.runtime.promptcache.lookuprecord import Choice, Lookups
from kvcli.runtime.promptcache.worth import ModelWorth, key_of


def _model(root: Path) -> ModelWorth:
    (model,) = worth.read(root / "prompts").models.values()
    return model


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_look_ups_are_counted(variant: str, tmp_path: Path) -> None:
    engine = engine_of(variant)
    ask(engine, PROMPT[:100], store_in(tmp_path))
    first = _model(tmp_path)
    assert (first.lookups, first.prompt_tokens, first.disk.hits) == (1, 100, 0)
    (path,) = files_in(tmp_path)
    assert worth.read(tmp_path / "prompts").files[key_of(path)].cost_s == pytest.approx(first.prefill.seconds(0, 100))
    end = ask(engine, [*PROMPT[:100], 5, 6], store_in(tmp_path))
    again = _model(tmp_path)
    assert (again.lookups, again.prompt_tokens) == (2, 202)
    assert (again.disk.hits, again.disk.tokens) == (1, end.usage.cache_read_tokens) and again.read_s > 0
    assert worth.read(tmp_path / "prompts").files[key_of(path)].uses.hits == 1
    ask(engine, PROMPT[:7], store_in(tmp_path))
    assert _model(tmp_path).lookups == 2, "too short to be looked for"


def test_prompts_that_are_computed_together_tell_nothing_of_speed(tmp_path: Path) -> None:
    engine = engine_of("llama")
    with closing(engine.prompt_caches(store_in(tmp_path), Told())) as caches:
        sequences = [engine.new_sequence() for _ in range(2)]
        both = [
            engine.request(seq, [number, *PROMPT[:100]], FOUR, caches=caches) for number, seq in enumerate(sequences)
        ]
        while not all(request.finished for request in both):
            engine.step(both)
        for seq in sequences:
            seq.close()
    assert _model(tmp_path).lookups == 2 and _model(tmp_path).prefill.seconds(0, 1) is None


def test_rows_in_memory_are_counted_apart(tmp_path: Path) -> None:
    engine = engine_of("llama")
    with closing(engine.prompt_caches(replace(store_in(tmp_path), memory=True), Told())) as caches:
        for _ in range(2):
            seq = engine.new_sequence()
            run(engine, seq, PROMPT[:100], FOUR, caches=caches)
            seq.close()
    model = _model(tmp_path)
    assert model.memory_tokens >= 64 and model.disk.hits == 0 and model.lookups == 2


def test_rows_of_a_named_file_and_converted_ones_were_not_in_memory(tmp_path: Path) -> None:
    wide, options = engine_of("llama"), store_in(tmp_path)
    ask(wide, PROMPT[:100], options)
    assert ask(engine_of("llama", "int8"), [*PROMPT[:100], 5, 6], options).usage.cache_how == "converted from f16"
    ask(wide, PROMPT[20:120], PromptCacheOptions(file=tmp_path / "named"))
    assert ask(wide, [*PROMPT[20:120], 5], replace(options, file=tmp_path / "named")).usage.disk_tokens >= 96
    models = worth.read(tmp_path / "prompts").models.values()
    assert sorted(model.lookups for model in models) == [1, 2] and not any(model.memory_tokens for model in models)
    assert [model.disk.hits for model in models if model.convert_bytes] == [1]
    assert not any(model.read_bytes for model in models)


@pytest.mark.parametrize("slow", [True, False])
def test_conversions_are_predicted_from_conversions(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are measured first, and tried again later where they were slower than computing."""
    monkeypatch.setattr(worth, "LEAST_READ", 1)
    prompt, engine, told = [*PROMPT[:100], 5, 6], engine_of("llama", "int8"), Told()
    ask(engine_of("llama"), PROMPT[:100], store_in(tmp_path))
    ask(engine, PROMPT[20:120], store_in(tmp_path))  # tells how long computing takes
    first = ask(engine, prompt, store_in(tmp_path))
    assert first.usage.cache_how and first.usage.choice is None

    def measured(record: worth.Worth) -> None:
        (model,) = (each for each in record.models.values() if each.convert_bytes)
        model.convert_s = 1e6 if slow else 0.0

    worth.change(tmp_path / "prompts", measured)
    again = ask(engine, prompt, store_in(tmp_path), told)
    choice = again.usage.choice
    assert choice is not None and choice.converts and choice.reads is not slow
    assert bool(again.usage.cache_how) is not slow and any("converting them" in line for line in told.lines) is slow
    if slow:
        assert again.ids == ask(engine, prompt, PromptCacheOptions()).ids


@pytest.mark.parametrize("slow", [True, False])
def test_whichever_is_predicted_to_be_faster(slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same; the receipt has both figures."""
    engine, told = engine_of("llama"), Told()
    ask(engine, PROMPT[:100], store_in(tmp_path))
    asked: list[tuple[int, int, int]] = []

    def predict(self: Lookups, start: int, end: int, nbytes: int, converts: bool) -> Choice:
        asked.append((start, end, nbytes))
        return Choice(9.0, 2.0) if slow else Choice(2.0, 9.0)

    monkeypatch.setattr(lookuprecord.Lookups, "predict", predict)
    end = ask(engine, [*PROMPT[:100], 5, 6], store_in(tmp_path), told)
    fresh = ask(engine, [*PROMPT[:100], 5, 6], PromptCacheOptions())
    layout = engine.layout
    assert asked == [(0, 100, sum(-(-100 // 16) * arena.page_bytes for arena in layout.arenas))]
    assert end.ids == fresh.ids and end.usage.choice is not None
    assert end.usage.cache_read_tokens == (0 if slow else 100)
    why = "100 tokens are stored, and computed again: that is predicted to take 2.00 s, reading them 9.00 s"
    assert (end.usage.cache_miss == why) is slow and (why in told.lines) is slow
