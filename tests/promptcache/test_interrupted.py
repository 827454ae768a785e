"""Work that is interrupted is kept: the next run goes on from its rows, and answers like a cold one."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engines import PROMPT, open_tiny, run
from reusecases import FOUR, NOWHERE, Told, ask, files_in, store_in

from kvcli.errors import DoesNotFit, KVError
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.engine.engine import Engine

STEP = 32


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _engine(variant: str, k: str, evict: str = "") -> Engine:
    options = EvictOptions(evict, window=64) if evict else EvictOptions()
    return open_tiny(variant, "native", CacheOptions(320, k, k, 16, ubatch=STEP, evict=options))


def _stopped(
    engine: Engine, options: PromptCacheOptions, steps: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> Told:
    """A run of the prompt that is stopped in the middle of its next step after so many."""
    hidden, left, told = engine.model.hidden, iter(range(steps)), Told()

    def stopped(*args: object) -> object:
        found = hidden(*args)  # type: ignore[arg-type]
        if next(left, None) is None:
            raise error
        return found

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "hidden", stopped)
        with closing(engine.prompt_caches(options, told)) as caches:
            seq = engine.new_sequence()
            with pytest.raises(type(error)):
                run(engine, seq, PROMPT, FOUR, caches=caches)
            seq.close()
    engine.pool.check([])
    return told


@pytest.mark.parametrize(
    ("variant", "k", "evict"),
    [("llama", "f16", ""), ("gemma3", "f16", ""), ("gemma3", "int4", ""), ("llama", "int8", "sink")],
)
@pytest.mark.parametrize("error", [SystemExit(130), KVError("the disk is gone"), DoesNotFit("no room")])
def test_a_prefill_goes_on_where_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, k: str, evict: str, error: BaseException
) -> None:
    engine = _engine(variant, k, evict)
    cold = ask(engine, PROMPT, NOWHERE).ids
    told = _stopped(engine, store_in(tmp_path), 3, error, monkeypatch)
    assert any("96 of 140 prompt tokens are kept" in line for line in told.lines)
    found = ask(engine, PROMPT, store_in(tmp_path))
    assert found.ids == cold and found.usage.disk_tokens == 96
    assert ask(engine, PROMPT, store_in(tmp_path)).usage.disk_tokens >= 128


def test_it_goes_on_after_every_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine("gemma3", "f16")
    cold, options = ask(engine, PROMPT, NOWHERE).ids, store_in(tmp_path)
    for done in (1, 2, 3):
        _stopped(engine, options, 1, SystemExit(130), monkeypatch)
        with closing(engine.prompt_caches(options, Told())) as caches:
            seq = engine.new_sequence()
            assert caches.find(seq, PROMPT) == done * STEP
            seq.close()
    assert ask(engine, PROMPT, options).ids == cold


def test_a_file_of_ones_own_has_what_was_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, path = _engine("llama", "f16"), tmp_path / "x.safetensors"
    cold = ask(engine, PROMPT, NOWHERE).ids
    _stopped(engine, PromptCacheOptions(file=path), 2, SystemExit(130), monkeypatch)
    before = path.read_bytes()
    _stopped(engine, PromptCacheOptions(file=path, read_only=True), 1, SystemExit(130), monkeypatch)
    assert path.read_bytes() == before
    found = ask(engine, PROMPT, PromptCacheOptions(file=path))
    assert (found.ids, found.usage.disk_tokens) == (cold, 64)
    assert ask(engine, PROMPT, PromptCacheOptions(file=path)).usage.disk_tokens == 139


def test_a_signal_between_steps_keeps_them_too(tmp_path: Path) -> None:
    engine, asked = _engine("llama", "f16"), iter((False,) * 3)
    with closing(engine.prompt_caches(store_in(tmp_path), Told())) as caches:
        seq = engine.new_sequence()
        end = run(engine, seq, PROMPT, FOUR, cancelled=lambda: next(asked, True), caches=caches)
        assert end.finish_reason == "interrupted" and STEP <= seq.length < 140
        kept = seq.length
        seq.close()
    assert ask(engine, PROMPT, store_in(tmp_path)).usage.disk_tokens == kept


def test_what_is_too_short_or_nowhere_to_be_kept_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _engine("llama", "f16")
    for options in (replace(store_in(tmp_path), min_tokens=1000), store_in(tmp_path)):
        told = _stopped(engine, options, 0 if options.min_tokens < 100 else 2, SystemExit(130), monkeypatch)
        assert told.lines == [] and files_in(tmp_path) == []


def test_a_full_disk_costs_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine("llama", "f16")
    told = _stopped(engine, store_in(tmp_path, max_bytes=100), 2, SystemExit(130), monkeypatch)
    assert any("more than the 100 B of the store" in line for line in told.lines) and files_in(tmp_path) == []
    assert not any("prompt tokens are kept" in line for line in told.lines)
