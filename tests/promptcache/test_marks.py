"""Marks: prompts start from where others parted from them, on layers with windows too, and answer like a cold run."""

from __future__ import annotations

import functools
import random
from contextlib import closing
from pathlib import Path

import pytest
from engines import open_tiny, run
from reusecases import FOUR, NOWHERE, Told, ask, files_in, store_in

from kvcli.options import CacheOptions, PromptCacheOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.engine.events import End
from kvcli.runtime.promptcache import held, marks
from kvcli.runtime.promptcache.marks import (
    EVEN,
    FILE,
    MOST,
    SHARED,
    SYSTEM,
    TURN,
    USER,
    Mark,
    affordable,
    behind,
    behind_text,
    evenly,
    nearest,
    of_segments,
    pages_of,
    settled,
)
from kvcli.runtime.promptcache.prefixpages import common_length

LEAD = 150  # tokens of the system message


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(held, "REWIND_ROWS", 0)  # else all of a tiny prompt is near its end


@functools.cache
def engine_of(variant: str, k: str = "f16") -> Engine:
    """Its steps are short, so that windows move while a prompt is read."""
    return open_tiny(variant, "native", CacheOptions(320, k, k, 16, ubatch=32))


def lead(seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=LEAD)


def document(seed: int, count: int = 90) -> list[int]:
    return random.Random(100 + seed).choices(range(3, 300), k=count)


def points(end: End) -> list[tuple[int, str, bool, bool]]:
    return [(p.mark.at, p.mark.kind, p.reused, p.kept) for p in end.usage.breakpoints]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gemma3", "llama"])
@pytest.mark.parametrize("k", ["f16", "int8"])
def test_one_system_message_and_other_documents(tmp_path: Path, variant: str, k: str) -> None:
    """Cut anywhere, and edited in the middle: as much is reused as the longest mark that both have allows."""
    engine, generator = engine_of(variant, k), random.Random(3)
    size, sealed = engine.layout.page_size, any(group.sealed for group in engine.layout.groups)
    seen: list[tuple[list[int], list[Mark]]] = []
    for n in range(8):
        body = document(n // 3)
        if n % 3 == 1:
            body = body[: generator.randrange(20, 80)]
        elif n % 3 == 2:
            body[generator.randrange(10, 80)] = 301
        prompt, marks = [*lead(), *body, 5, 6], [Mark(LEAD, SYSTEM), Mark(LEAD + len(body), FILE, "x.txt")]
        found = ask(engine, prompt, store_in(tmp_path), marks=marks)
        assert found.ids == ask(engine, prompt, NOWHERE).ids, n
        common = [m.at for other, theirs in seen for m in theirs if m.at <= common_length(prompt, other)]
        least = max(common, default=0)
        assert found.usage.disk_tokens >= (least // size * size if sealed else least), n
        told = points(found)
        assert all(kept for *_, kept in told) and (sealed or (LEAD, SYSTEM, n > 0, True) in told)
        seen.append((prompt, marks))


@pytest.mark.parametrize("disk", [True, False])
def test_where_two_prompts_part_a_third_one_starts(tmp_path: Path, disk: bool) -> None:
    """Nobody has said where: the second one knows from what is stored, or from what is in memory."""
    engine = engine_of("gemma3")
    prompts = [[*lead(), *document(n)] for n in range(3)]
    cold = [ask(engine, prompt, NOWHERE).ids for prompt in prompts]
    if disk:
        found = [ask(engine, prompt, store_in(tmp_path)) for prompt in prompts]
    else:
        with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
            found = []
            for prompt in prompts:
                seq = engine.new_sequence()
                found.append(run(engine, seq, prompt, FOUR, caches=caches))
                seq.close()
                engine.pool.check(caches.tree.holds())
        engine.pool.check([])
    assert [end.ids for end in found] == cold
    assert [end.usage.cache_read_tokens for end in found] == [0, 0, LEAD]
    assert [points(end) for end in found] == [[], [(LEAD, SHARED, False, True)], []]
    if disk:
        page = engine.layout.arenas[1].page_bytes + engine.layout.arenas[0].page_bytes
        sizes = [path.stat().st_size for path in files_in(tmp_path)]
        assert len(sizes) == 3 and sum(sorted(sizes)[:2]) < max(sizes) + 12 * page


@pytest.mark.parametrize("k", ["f16", "int8"])
def test_a_prompt_without_marks_is_gone_on_from_at_even_places(
    tmp_path: Path, k: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first prompt that parts from it, and what goes on from its end; each answers as a cold run."""
    monkeypatch.setattr(marks, "LEAST_STEP", 64)
    engine, first = engine_of("gemma3", k), [*lead(), *document(1)]
    prompts = [first, [*lead(), *document(2)], [*first[:200], *document(3)], [*first, *document(4, 30)], first[:100]]
    shortest = 64 if k == "f16" else 0  # the even marks of an int8 prompt have less room: windows stay in 16 bits
    for prompt, least in zip(prompts, (0, 128, 192, 208, shortest), strict=True):
        found = ask(engine, prompt, store_in(tmp_path))
        assert found.ids == ask(engine, prompt, NOWHERE).ids and found.usage.cache_read_tokens >= least
    layout = engine.layout
    places = [mark.at for mark in evenly(layout, 240)]
    assert places == [64, 128, 192] and evenly(layout, 64 * 9 + 1) == [Mark(at, EVEN) for at in range(128, 577, 128)]
    cost = sum(layout.arenas[0].page_bytes for key in pages_of(layout, 192) if key[0] == 0)
    every = [Mark(150, SYSTEM), *evenly(layout, 240)]
    kept = affordable(layout, every, 1 << 30, cost)
    assert [mark.at for mark in kept][-1] == 192 and len(kept) < 4 and Mark(150, SYSTEM) in kept
    assert not evenly(engine_of("llama").layout, 240)


def test_in_memory_a_mark_is_kept_without_a_store() -> None:
    engine, marks, found = engine_of("gemma3"), [Mark(LEAD, SYSTEM)], list[list[int]]()
    with closing(engine.prompt_caches(NOWHERE, Told())) as caches:
        for n in range(3):
            seq, prompt = engine.new_sequence(), [*lead(), *document(n)]
            end = run(engine, seq, prompt, FOUR, caches=caches, marks=marks)
            seq.close()
            assert end.usage.cache_read_tokens == (LEAD if n else 0)
            assert points(end) == [(LEAD, SYSTEM, n > 0, True)]
            found.append(end.ids)
    engine.pool.check([])
    assert found == [ask(engine, [*lead(), *document(n)], NOWHERE).ids for n in range(3)]


def test_marks_in_a_file_of_ones_own(tmp_path: Path) -> None:
    engine, marks = engine_of("gemma3"), [Mark(LEAD, SYSTEM)]
    options = PromptCacheOptions(file=tmp_path / "x.safetensors")
    ask(engine, [*lead(), *document(0)], options, marks=marks)
    found = ask(engine, [*lead(), *document(1)], options)
    assert found.usage.disk_tokens == LEAD
    assert found.ids == ask(engine, [*lead(), *document(1)], NOWHERE).ids


def test_a_budget_is_kept(tmp_path: Path) -> None:
    engine = engine_of("gemma3")
    marks = [Mark(60, TURN), Mark(100, FILE), Mark(LEAD, SYSTEM), Mark(200, TURN), Mark(130, USER)]
    cost = {m.at: sum(engine.layout.arenas[a].page_bytes for a, _ in pages_of(engine.layout, m.at)) for m in marks}
    for budget, kept in ((0, []), (cost[130], [130]), (1 << 30, sorted(cost))):
        assert [m.at for m in affordable(engine.layout, marks, budget)] == kept
    assert {130, LEAD} <= {m.at for m in affordable(engine.layout, marks, cost[130] + cost[LEAD])}
    options = store_in(tmp_path, max_bytes=8 * (cost[130] + 1))
    prompt = [*lead(), *document(0)]
    found = ask(engine, prompt, options, marks=marks)
    kept = [p.mark.at for p in found.usage.breakpoints if p.kept]
    assert kept == [100, 130]  # what 130 needs is enough for 100
    assert ask(engine, [*prompt[:100], *document(7)], options).usage.disk_tokens == 100
    assert engine_of("llama").layout.arenas and affordable(engine_of("llama").layout, marks, 0) != []


@pytest.mark.parametrize("named", [True, False])
def test_a_mark_in_rows_that_are_reused_is_kept_only_where_windows_have_theirs(tmp_path: Path, named: bool) -> None:
    engine, prompt, told = engine_of("gemma3"), [*lead(), *document(0)], Told()
    options = PromptCacheOptions(file=tmp_path / "x.safetensors") if named else store_in(tmp_path)
    ask(engine, prompt, options, marks=[Mark(LEAD, SYSTEM)])
    found = ask(engine, prompt, options, told, [Mark(60, USER, "x"), Mark(LEAD, USER, "y")])
    assert found.usage.cache_write_tokens == 0
    assert points(found) == [(60, USER, True, False), (LEAD, USER, True, True)]
    (line,) = told.lines
    assert line.startswith("the mark behind 'x' (token 60) is not kept: rows that sliding windows need")
    for at, reused in ((60, 0), (LEAD, LEAD)):
        assert ask(engine, [*prompt[:at], *document(7)], options).usage.disk_tokens == reused


def test_a_file_that_is_written_again_has_its_marks(tmp_path: Path) -> None:
    engine, prompt, marks = engine_of("gemma3"), [*lead(), *document(0)], [Mark(LEAD, SYSTEM)]
    options = PromptCacheOptions(file=tmp_path / "x.safetensors")
    ask(engine, prompt, options, marks=marks)
    found = ask(engine, [*prompt, *document(1, 40)], options, marks=marks)
    assert found.usage.cache_write_tokens and points(found) == [(LEAD, SYSTEM, True, True)]
    assert ask(engine, [*lead(), *document(7)], options).usage.disk_tokens == LEAD


@pytest.mark.parametrize("variant", ["gemma3", "llama"])
def test_nothing_is_kept_where_nothing_is_written(tmp_path: Path, variant: str) -> None:
    engine, prompt, told = engine_of(variant), [*lead(), *document(0)], Told()
    damaged = tmp_path / "x.safetensors"
    damaged.write_bytes(b"no cache")
    options = PromptCacheOptions(file=damaged, read_only=True)
    found = ask(engine, prompt, options, told, [Mark(60, USER, "x"), Mark(LEAD, FILE, "y")])
    assert points(found) == [(60, USER, False, False), (LEAD, FILE, False, False)]
    assert told.lines[-1] == "the mark behind 'x' (token 60) is not kept: nothing of this prompt is written"


def test_places_are_settled_once() -> None:
    layout = engine_of("gemma3").layout
    marks = [Mark(40, TURN), Mark(40, USER, "x"), Mark(5, SYSTEM), Mark(90, FILE), Mark(20, TURN)]
    assert settled(layout, marks, 90) == [Mark(20, TURN), Mark(40, USER, "x")]


def test_marks_that_a_user_made_stay_where_there_are_too_many() -> None:
    layout = engine_of("gemma3").layout
    turns = [Mark(200 + 64 * i, TURN) for i in range(MOST)]
    even = evenly(layout, 9000)
    found = settled(layout, [Mark(100, SYSTEM), Mark(150, USER, "mine"), *turns, *even], 9000)
    assert even and len(found) == MOST and found == sorted(found, key=lambda mark: mark.at)
    assert found[:2] == [Mark(100, SYSTEM), Mark(150, USER, "mine")] and found[2:] == turns[2:]


class Letters:
    """A tokenizer of two letters each; 0 is a control token."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token // 256, token % 256]).lstrip(b"\0") if token else b""

    def encode_segments(self, segments: list[tuple[str, bool]], add_bos: bool) -> list[int]:
        text = "".join(text for text, _ in segments).encode()
        return [0, *(int.from_bytes(text[i : i + 2], "big") for i in range(0, len(text), 2))]


def test_places_of_texts_in_tokens() -> None:
    text = Letters()
    ids = text.encode_segments([("<user>one two. three", True)], True)
    assert behind(text, ids, 3, "one two. three", [3, 8, 14]) == [5, 8, 11]
    assert behind(text, ids, 3, "One", [1, 2]) == [None, None]
    assert behind_text(text, ids, "two.") == [Mark(8, USER, "two.")]
    assert [m.at for m in behind_text(text, ids, "e")] == [3, 5, 10, 11] and behind_text(text, ids, "x") == []
    segments = [("<s>", True), ("be good", False), ("<u>", True), ("why?", False), ("<a>", True)]
    ids = text.encode_segments(segments, True)
    assert of_segments(text, ids, segments, True) == [Mark(7, SYSTEM)]
    many = [("ab", False), ("cd", True)] * 8
    assert [m.at for m in of_segments(text, text.encode_segments(many, True), many, False)] == [3, 9, 11, 13, 15]


def test_a_prompt_goes_on_from_the_nearest_mark() -> None:
    """Within a page: those of other prompts may lie a little before, or behind."""
    marks = [Mark(100, SYSTEM), Mark(150, USER, "mine")]
    found = [nearest(marks, have, 64) for have in (0, 30, 37, 96, 124, 126, 213, 214)]
    assert found == ["", "", SYSTEM, SYSTEM, SYSTEM, USER, USER, ""] and nearest([], 100, 64) == ""
