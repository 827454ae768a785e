"""Rows that repeating the prompt needs (KVzip): which ones, against float64, and that a file of them is as good as they
are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import GREEDY, open_tiny
from reusecases import Told
from test_selection import Seen, best, probabilities, selected_layers

from kvcli.errors import CacheFileError, ContextOverflow
from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions, SampleOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import replaying
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End, Prefill

SIZE, CONTEXT = 16, 640
TEXT = torch.randint(3, 370, (205,), generator=torch.manual_seed(9)).tolist()
QUESTION = [7, 21, 8, 90, 33]


def zipping(
    variant: str = "llama", budget: str = "100", types: str = "f16", backend: str = "native", policy: str = "kvzip"
) -> Engine:
    evict = EvictOptions(policy, budget=budget)
    return open_tiny(variant, backend, CacheOptions(CONTEXT, types, types, SIZE, ubatch=48, evict=evict))


def prefilled(engine: Engine) -> Sequence:
    seq = engine.new_sequence()
    assert seq.selector is not None
    seq.selector.expect(len(TEXT))
    for start, end in engine.chunks(0, len(TEXT)):
        engine.forward(seq, TEXT[start:end])
    for _ in replaying.replay(engine, seq):
        pass
    engine.select(seq)
    return seq


def kept(engine: Engine, seq: Sequence) -> dict[int, torch.Tensor]:
    return dict(selected_layers(engine, seq))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "gemma3"])
def test_rows_stay_by_the_rule(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = zipping(variant, backend="reference")
    seen = Seen(engine, monkeypatch)
    found = kept(engine, prefilled(engine))
    assert found
    for layer, positions in found.items():
        q, k, _ = seen.of(layer)
        every = k.repeat_interleave(len(q) // len(k), 0)
        shares = probabilities(q, every, engine.model.layer_facts[layer].scale)[:, len(TEXT) :, : len(TEXT)]
        most = shares.amax(1).unflatten(0, (len(k), -1)).amax(1)
        assert torch.equal(positions, best(most, 0, 0))


@pytest.mark.slow
def test_backends_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """C notes what plain torch does; a prompt may be repeated in several pieces, which names what precedes each."""
    one, other = (kept(e, prefilled(e)) for e in (zipping(), zipping(backend="reference")))
    alike = [(a == b).double().mean() for a, b in zip(one.values(), other.values(), strict=True)]
    assert min(alike) > 0.95
    monkeypatch.setattr(replaying, "PIECE", 90)
    monkeypatch.setattr(replaying, "LEAST", 20)
    engine = zipping()
    seq = engine.new_sequence()
    engine.forward(seq, TEXT[:40])
    pieces = list(replaying._pieces(engine, seq.tokens, "kvzip"))
    assert len(pieces) == 1 and pieces[0][-40:] == TEXT[:40]
    zipped = prefilled(engine)
    assert all(len(rows[0]) == len(one[layer][0]) for layer, rows in kept(engine, zipped).items())
    engine.pool.check([*seq.holds(), *zipped.holds()])  # copies are gone


def test_later_rows_stay() -> None:
    """Those of a question, and of an answer: nothing is selected again."""
    engine = zipping()
    seq = prefilled(engine)
    rows = seq.evicted
    *_, end = engine.generate(seq, [*TEXT, *QUESTION], replace(GREEDY, max_tokens=200))
    assert isinstance(end, End) and seq.evicted == rows > 0 and end.usage.cache_read_tokens == len(TEXT)


def test_another_prompt_in_the_same_sequence() -> None:
    """What was selected is gone with the prompt that it was selected of."""
    engine = zipping()
    seq = prefilled(engine)
    for text in (TEXT[::-1], TEXT[100:] + TEXT[:100]):
        *_, end = engine.generate(seq, text, replace(GREEDY, max_tokens=3))
        assert isinstance(end, End) and seq.selected and end.usage.cache_read_tokens == 0


def test_no_room_to_repeat() -> None:
    evict = EvictOptions("kvzip", budget="50%")
    engine = open_tiny("llama", "native", CacheOptions(256, "f16", "f16", SIZE, evict=evict))
    with pytest.raises(ContextOverflow, match="repeats the prompt of 205 tokens in pieces"):
        list(engine.generate(engine.new_sequence(), TEXT, GREEDY))


def test_no_room_to_repeat_is_told_before_the_prompt_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = EvictOptions("kvzip", budget="50%")
    engine = open_tiny("llama", "native", CacheOptions(256, "f16", "f16", SIZE, evict=evict))
    monkeypatch.setattr(engine, "forward_all", lambda rows: pytest.fail("rows were computed"))
    with pytest.raises(ContextOverflow, match="repeats the prompt"):
        list(engine.generate(engine.new_sequence(), TEXT, GREEDY))


def test_progress_counts_the_repetition() -> None:
    engine = zipping()
    *events, end = engine.generate(engine.new_sequence(), TEXT, replace(GREEDY, max_tokens=2))
    told = [(event.done, event.total) for event in events if isinstance(event, Prefill)]
    assert isinstance(end, End)
    done, totals = zip(*told, strict=True)
    assert len(set(totals)) == 1 and totals[0] > 2 * len(TEXT) and list(done) == sorted(set(done))
    assert done[-1] == totals[0] and len([each for each in done if each > len(TEXT)]) > 2


def test_the_plan_has_the_rows_of_the_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lengths = zipping(), list[int]()
    forward = engine.forward

    def watched(seq: Sequence, ids: list[int]) -> torch.Tensor:
        found = forward(seq, ids)
        lengths.append(seq.length)
        return found

    monkeypatch.setattr(engine, "forward", watched)
    prefilled(engine)
    planned = replaying.most_rows(engine, len(TEXT), SIZE)
    assert 2 * len(TEXT) < max(lengths) <= planned - SIZE < max(lengths) + 2 * SIZE
    kept, others = (e.predict(len(TEXT)).row("tables and token ids").bytes for e in (engine, zipping(policy="snapkv")))
    assert kept > 1.5 * others


def test_an_answer_that_ends_while_the_prompt_is_repeated_frees_the_copy() -> None:
    engine = zipping()
    seq, told = engine.new_sequence(), list[Prefill]()
    stop = lambda: bool(told) and told[-1].done > len(TEXT)  # noqa: E731
    for event in engine.generate(seq, TEXT, GREEDY, stop):
        told += [event] if isinstance(event, Prefill) else []
    assert isinstance(event, End) and event.finish_reason == "interrupted" and told[-1].done < told[-1].total
    engine.pool.check(seq.holds())


# --- files


def built(engine: Engine, path: Path) -> Told:
    told = Told()
    caches = engine.prompt_caches(PromptCacheOptions(file=path, strict=True, awaited=True, selected=True), told)
    list(engine.generate(engine.new_sequence(), TEXT, SampleOptions(max_tokens=0), caches=caches))
    caches.close()
    return told


def answered(engine: Engine, seq: Sequence, ids: list[int], path: Path | None) -> End:
    options = PromptCacheOptions(file=path, strict=True, read_only=True) if path else PromptCacheOptions()
    caches = engine.prompt_caches(options, Told())
    *_, end = engine.generate(seq, ids, replace(GREEDY, max_tokens=12), caches=caches)
    caches.close()
    assert isinstance(end, End)
    return end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "types", "variant"),
    [("kvzip", "f16", "llama"), ("kvzip", "int4", "gemma3"), ("snapkv", "int8", "llama"), ("random", "f16", "llama")],
)
def test_restored_is_fresh(policy: str, types: str, variant: str, tmp_path: Path) -> None:
    path, budget = tmp_path / "kept.safetensors", "40%"
    engine = zipping(variant, budget, types, policy=policy)
    built(engine, path)
    fresh = prefilled(engine)
    there = zipping(variant, budget, types, policy=policy)
    seq = there.new_sequence()
    end = answered(there, seq, [*TEXT, *QUESTION], path)
    assert end.usage.cache_read_tokens == end.usage.disk_tokens == len(TEXT)
    assert policy in end.usage.cache_how
    expected = answered(engine, fresh, [*TEXT, *QUESTION], None)
    assert end.ids == expected.ids and seq.kept == fresh.kept < seq.length
    for mine, theirs in zip(kept(there, seq).values(), kept(engine, fresh).values(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_file_is_for_its_policy_and_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "kept.safetensors"
    built(zipping(budget="40%"), path)
    before = path.read_bytes()
    for engine in (zipping(budget="50%"), zipping(budget="40%", policy="snapkv"), zipping(budget="40%", types="int8")):
        with pytest.raises(CacheFileError, match="it was made with"):
            answered(engine, engine.new_sequence(), [*TEXT, *QUESTION], path)
    engine = zipping(budget="40%")
    for ids in ([*TEXT[:-1], 5, *QUESTION], TEXT):
        end = answered(engine, engine.new_sequence(), ids, path)
        assert not end.usage.cache_read_tokens and "of use behind all of them only" in end.usage.cache_miss
    assert path.read_bytes() == before
