"""Why stored rows are not used: the closest prompt is looked at, and what differs is said as options say it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from engines import PROMPT, open_tiny
from reusecases import ask, files_in, store_in

from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.promptcache.rowsettings import Difference, cache_options, differences, sentence

BASE = CacheOptions(ctx_size=320, type_k="f16", type_v="f16", page_size=16)
SINK = EvictOptions("sink", window=32, keep=4)
INT4 = replace(BASE, type_k="int4", type_v="int4")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def miss(root: Path, options: CacheOptions, prompt: list[int] = PROMPT, variant: str = "llama") -> str:
    """Of a run that keeps nothing itself."""
    engine = open_tiny(variant, "native", options)
    found = ask(engine, prompt, replace(store_in(root), max_bytes=1, converts=False))
    assert found.usage.cache_read_tokens == 0
    return found.usage.cache_miss


def keep(root: Path, options: CacheOptions, prompt: list[int] = PROMPT, variant: str = "llama") -> None:
    ask(open_tiny(variant, "native", options), prompt, store_in(root))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (replace(INT4, sinks=2), "`sinks` 1, this run has 2"),
        (replace(INT4, tail=0), "`tail` 1, this run has 0"),
        (replace(BASE, type_k="int8", type_v="int8"), "cache type int4, this run has int8"),
        (replace(INT4, type_k="int8"), "cache type int4, this run has int8/int4"),
        (replace(INT4, page_size=32), "page size 16, this run has 32"),
        (replace(BASE, page_size=32, type_k="fp8", type_v="fp8"), "cache type f16, this run has fp8"),
    ],
)  # fmt: skip
def test_the_closest_entry_is_named(tmp_path: Path, options: CacheOptions, told: str) -> None:
    """The same prompt is stored as f16 and as int4: what has the fewest other settings is compared with."""
    keep(tmp_path, INT4)  # before f16, whose rows would serve it
    keep(tmp_path, BASE)
    assert miss(tmp_path, options) == f"a stored prompt shares 140 tokens with this one, but was stored with {told}"


def test_what_has_expired_is_named(tmp_path: Path) -> None:
    keep(tmp_path, BASE)
    for path in files_in(tmp_path):
        os.utime(path, (0, 0))
    assert miss(tmp_path, BASE).startswith("a stored prompt shares 140 tokens with this one, but has expired: ")


def test_types_of_small_windows_are_not_named(tmp_path: Path) -> None:
    keep(tmp_path, INT4, variant="gemma3")
    options = replace(INT4, type_k="int8", type_v="int8")
    assert "cache type int4, this run has int8" in miss(tmp_path, options, variant="gemma3")


def test_of_entries_with_as_many_other_settings_the_longest_is_named(tmp_path: Path) -> None:
    keep(tmp_path, replace(BASE, type_k="int8", type_v="int8"), PROMPT[:100])
    keep(tmp_path, INT4, PROMPT[:120])
    assert "shares 120 tokens with this one, but was stored with cache type int4" in miss(tmp_path, BASE)


def test_other_settings_are_no_reason_for_another_prompt(tmp_path: Path) -> None:
    keep(tmp_path, INT4, [9, *PROMPT[:100]])
    assert miss(tmp_path, BASE) == "" and miss(tmp_path, BASE, variant="gemma3") == ""
    keep(tmp_path, BASE, [*PROMPT[:5], 9, *PROMPT[:90]])
    assert "differs at token 5" in miss(tmp_path, BASE)
    keep(tmp_path, INT4)
    assert "shares 140 tokens with this one, but was stored with cache type int4" in miss(tmp_path, BASE)


def test_settings_in_words() -> None:
    f16 = {"weights": "a", "cache_type_k": "f16 f16", "cache_type_v": "f16 f16", "page_size": "64", "sinks": "0 0",
           "tail": "0 0", "eviction": "none", "computed_on": "cpu"}  # fmt: skip
    int4 = {**f16, "cache_type_k": "f16 int4", "cache_type_v": "f16 int8", "sinks": "0 2", "tail": "0 1"}
    assert differences(f16, f16) == [] and differences(f16, int4) == [Difference("cache type", "f16", "int4/int8")]
    assert (
        sentence(differences(f16, {**f16, "weights": "b", "page_size": "32"}))
        == "the weights of another model or adapter"
    )
    assert sentence(differences(f16, {**f16, "computed_on": "cuda X"})) == "device cpu, this run has cuda X"
    assert cache_options(int4).sinks == 2 and cache_options(f16).sinks == CacheOptions.sinks
    assert cache_options({**int4, "eviction": "keep 4 window 96"}).evict == EvictOptions("sink", 96, 4)
    for damaged in ({"eviction": "x"}, {"page_size": ""}, {"sinks": ""}, {"cache_type_k": "int3"}):
        with pytest.raises(ValueError):
            cache_options({**int4, **damaged})
