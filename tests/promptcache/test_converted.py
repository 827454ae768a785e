"""Rows that are stored with a larger cache type serve a smaller one: converted, said, and never written back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engines import PROMPT, open_tiny, run
from reusecases import FOUR, NOWHERE, Told, ask, engine_of, files_in, store_in

from kvcli.options import CacheOptions, EvictOptions, PromptCacheOptions
from kvcli.runtime.promptcache.rowconversion import larger, named


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("variant", ["llama", "gemma3"])
@pytest.mark.parametrize("k", ["int8", "int4", "fp8"])
def test_a_larger_type_serves_a_smaller_one(tmp_path: Path, variant: str, k: str) -> None:
    wide, engine = engine_of(variant), engine_of(variant, k)
    ask(wide, PROMPT, store_in(tmp_path))
    (path,) = files_in(tmp_path)
    before, told, prompt = path.read_bytes(), Told(), [*PROMPT, 8, 9]
    with closing(engine.prompt_caches(store_in(tmp_path), told)) as caches:
        seq, cold = engine.new_sequence(), engine.new_sequence()
        end = run(engine, seq, prompt, FOUR, caches=caches)
        assert (end.usage.cache_how, end.usage.cache_write_tokens) == ("converted from f16", 0)
        assert end.usage.disk_tokens >= 128 and any("tokens converted from f16; answers may" in x for x in told.lines)
        expected = engine.logits(engine.forward(cold, [*seq.tokens, 3])[-1:])
        logits = engine.logits(engine.forward(seq, [3]))
        assert float((logits - expected).abs().max()) < 0.8 * float(expected.std())
        seq.close()
        cold.close()
    engine.pool.check([])
    assert files_in(tmp_path) == [path] and path.read_bytes() == before
    without = ask(engine, prompt, store_in(tmp_path, converts=False))
    assert without.usage.disk_tokens == 0 and without.ids == ask(engine, prompt, NOWHERE).ids
    again = ask(engine, prompt, store_in(tmp_path))
    assert (again.ids, again.usage.cache_how) == (without.ids, ""), "rows of its own type come first"


@pytest.mark.parametrize("named", [False, True])
def test_converted_rows_are_a_matter_of_their_prompt(tmp_path: Path, named: bool) -> None:
    """Other prompts of the process are stored; what goes on from converted rows, in memory, in a fork or in the same
    sequence, is not."""
    engine, other = engine_of("llama", "int8"), PROMPT[::-1]
    if named:
        ask(engine_of("llama"), PROMPT, PromptCacheOptions(file=tmp_path / "a"))
        options = replace(store_in(tmp_path, memory=True), file=tmp_path / "a")
    else:
        ask(engine_of("llama"), PROMPT, store_in(tmp_path))
        options = store_in(tmp_path, memory=True)
    before = files_in(tmp_path)
    with closing(engine.prompt_caches(options, Told())) as caches:
        seq, fresh, later = (engine.new_sequence() for _ in range(3))
        first = run(engine, seq, [*PROMPT, 8], FOUR, caches=caches)
        assert first.usage.cache_how == "converted from f16" and seq.foreign
        fork = seq.fork()
        for each, tokens in ((later, [*PROMPT, 9]), (fork, [*PROMPT, 8, 7]), (seq, [*PROMPT, 8, 3])):
            end = run(engine, each, tokens, FOUR, caches=caches)
            assert end.usage.cache_read_tokens >= 128 and end.usage.cache_write_tokens == 0 and each.foreign
        assert files_in(tmp_path) == before
        assert run(engine, fresh, other, FOUR, caches=caches).usage.cache_write_tokens > 0 and not fresh.foreign
        assert run(engine, seq, other, FOUR, caches=caches).usage.cache_read_tokens >= 128 and not seq.foreign
        for each in (seq, fresh, later, fork):
            each.close()
    engine.pool.check([])
    assert len(files_in(tmp_path)) == len(before) + 1


def test_what_is_not_converted(tmp_path: Path) -> None:
    """Fewer bits to more, other bits of the same number, rows of a saved chat, and where rows are evicted."""
    for have, want in (("int8", "f16"), ("f16", "bf16"), ("int8", "int4"), ("f16", "f32")):
        root = tmp_path / f"{have} {want}"
        ask(engine_of("llama", have), PROMPT, store_in(root))
        assert ask(engine_of("llama", want), PROMPT, store_in(root)).usage.disk_tokens == 0
    ask(engine_of("llama"), PROMPT, store_in(tmp_path))
    assert ask(engine_of("llama", "int8"), PROMPT, store_in(tmp_path, chat="ann")).usage.disk_tokens == 0
    options = CacheOptions(320, "int4", "int4", 16, evict=EvictOptions("sink", window=64))
    assert ask(open_tiny("llama", "native", options), PROMPT, store_in(tmp_path)).usage.disk_tokens == 0


def test_a_damaged_file_is_removed_and_its_prompt_computed(tmp_path: Path) -> None:
    ask(engine_of("llama"), PROMPT, store_in(tmp_path))
    (path,) = files_in(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    engine, told = engine_of("llama", "int8"), Told()
    found = ask(engine, PROMPT, replace(store_in(tmp_path), max_bytes=1), told)
    assert found.ids == ask(engine, PROMPT, NOWHERE).ids and not path.exists()
    assert any("was removed" in line for line in told.lines)


def test_which_layouts_are_larger() -> None:
    def names(k: str, v: str = "") -> list[str]:
        engine = engine_of("llama", k, v)
        return [named(layout) for layout in larger(engine.config, engine.layout)]

    assert names("f32") == [] and set(names("f16")) == {"f16/f32", "f32/f16", "f32"}
    assert names("int8")[0] == "f16" and names("int8")[-1] == "f32" and len(names("int8")) == 9
    assert set(names("f16", "int4")) == {"f16", "f16/bf16", "f16/f32", "f32/f16", "f32/bf16", "f32"}


def test_rows_that_no_selection_takes_are_neither_read_nor_converted(tmp_path: Path) -> None:
    """A policy that looks at all queries computes its rows; one that looks at the last ones computes these."""
    prompt, read = [*PROMPT, 8, 9], {}
    for policy in ("h2o", "snapkv", "keydiff"):
        root = tmp_path / policy
        ask(engine_of("llama"), PROMPT, store_in(root))
        for k in ("f16", "int8"):
            options = CacheOptions(320, k, k, 16, evict=EvictOptions(policy, budget="100"))
            engine, told = open_tiny("llama", "native", options), Told()
            end = ask(engine, prompt, store_in(root), told)
            read[policy, k] = end.usage.disk_tokens
            assert end.ids == ask(engine, prompt, NOWHERE).ids or k == "int8"
            if policy == "h2o":
                assert (end.usage.cache_how, end.usage.cache_read_tokens) == ("", 0)
                assert not any("converted" in line for line in told.lines)
                assert ("looks at all queries" in end.usage.cache_miss) is (k == "f16")
            else:
                assert bool(end.usage.cache_how) is (k == "int8")
    assert read["keydiff", "f16"] == len(PROMPT) and 0 < read["snapkv", "f16"] < len(PROMPT), read
