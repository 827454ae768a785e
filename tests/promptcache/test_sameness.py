"""Settings that decide no row: one copy on disk whatever they are, and the answer of a cold run."""

from __future__ import annotations

import tempfile
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from engines import PROMPT, open_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from reusecases import NOWHERE, ask, files_in, store_in

from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache import enginecaches, store
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.sameness import ALL, evict_options, row_fields, same_rows, unevicted

BASE = CacheOptions(ctx_size=320, type_k="f16", type_v="f16", page_size=16)
SETTINGS = (
    BASE,
    replace(BASE, ctx_size=200),
    *(replace(BASE, evict=EvictOptions(name, window=64)) for name in ("sink", "window", "shift")),
    replace(BASE, ctx_size=160, evict=EvictOptions("sink", keep=20)),
    replace(BASE, sinks=3, tail=0),
)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "k"), [("llama", "f16"), ("gemma3", "f16"), ("llama", "int8")])
def test_one_copy_whatever_the_settings(tmp_path: Path, variant: str, k: str) -> None:
    """As long as nothing is evicted; below 16 bits the pages at both ends decide rows."""
    asked = [replace(each, type_k=k, type_v=k) for each in (SETTINGS if k == "f16" else SETTINGS[:-1])]
    engines = [open_tiny(variant, "native", options) for options in asked]
    prompt = PROMPT[:70]
    cold = ask(engines[0], prompt, NOWHERE)
    for first in (0, 2):
        root = tmp_path / str(first)
        for engine in (engines[first], *engines):
            found = ask(engine, prompt, store_in(root))
            assert found.ids == cold.ids and len(files_in(root)) == 1
        assert found.usage.disk_tokens >= (69 if k == "f16" else 64) and found.usage.cache_write_tokens == 0


def test_rows_behind_what_was_evicted_stay_apart(tmp_path: Path) -> None:
    """The beginning is shared in both directions, and each goes on with rows of its own."""
    plain, evicting = (open_tiny("llama", "native", options) for options in (BASE, SETTINGS[2]))
    assert evicting.retention is not None
    whole, cold = evicting.retention.whole, [ask(engine, PROMPT, NOWHERE).ids for engine in (plain, evicting)]
    for number, order in enumerate(((plain, evicting), (evicting, plain))):
        root = tmp_path / str(number)
        ask(order[0], PROMPT, store_in(root))
        found = ask(order[1], PROMPT, store_in(root))
        assert found.usage.disk_tokens <= whole and (found.usage.disk_tokens == whole) == (number == 0)
        for engine, ids in zip((plain, evicting), cold, strict=True):
            again = ask(engine, PROMPT, store_in(root))
            assert again.ids == ids and again.usage.disk_tokens == 139


def test_a_store_of_version_1_is_read_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, evicting = (open_tiny("llama", "native", options) for options in (BASE, SETTINGS[2]))
    with monkeypatch.context() as patch:
        patch.setattr(store, "seed_of", store.seed_of_version_1)
        patch.setattr(enginecaches, "sums", lambda *_: "")
        cold = ask(engine, PROMPT, store_in(tmp_path))
    (old,) = files_in(tmp_path)
    miss = ask(evicting, PROMPT[:70], replace(store_in(tmp_path), max_bytes=1)).usage.cache_miss
    assert "shares 70 tokens with this one, but was stored by an earlier version of kv, and is left alone" in miss
    found = ask(engine, PROMPT, store_in(tmp_path))
    assert (found.ids, found.usage.disk_tokens) == (cold.ids, 139) and len(files_in(tmp_path)) == 2
    old.unlink()
    assert ask(engine, PROMPT, store_in(tmp_path)).usage.disk_tokens == 139
    assert ask(evicting, PROMPT[:70], store_in(tmp_path)).usage.disk_tokens == 69


def test_pages_of_any_size(tmp_path: Path) -> None:
    """One copy, whose pages are cut anew; and the same rows to the bit, so the same tokens."""
    engines = [open_tiny("gemma3", "native", replace(BASE, page_size=size)) for size in (16, 64, 32, 128)]
    assert not any(enginecaches.sums(each.loaded, each.layout) for each in engines)
    prompt, cold = PROMPT[:138], ask(engines[0], PROMPT[:138], NOWHERE)
    for engine in (*engines, engines[0]):
        found = ask(engine, prompt, store_in(tmp_path))
        assert found.ids == cold.ids and len(files_in(tmp_path)) == 1
        assert found.usage.disk_tokens == (0 if found.usage.cache_write_tokens else 137)


def test_where_pages_decide_sums() -> None:
    """On a GPU whose steps are in blocks, and in the reference."""
    layout = open_tiny("gemma3", "native", BASE).layout
    evicting = replace(layout, groups=layout.groups).evicting(Rolling(4, 64, 16))
    for block, evicted, expected in ((0, False, ""), (0, True, ""), (512, True, "pages of 16, evicting keep 4 window")):
        ops = SimpleNamespace(sums_by_page=block > 0, device=SimpleNamespace(type="cuda"))
        loaded = SimpleNamespace(decoder=SimpleNamespace(ops=ops))
        found = enginecaches.sums(loaded, evicting if evicted else layout)  # type: ignore[arg-type]
        assert found.startswith(expected) and bool(found) == bool(expected)
    plain = open_tiny("gemma3", "reference", BASE)
    assert enginecaches.sums(plain.loaded, plain.layout) == "pages of 16"


def test_what_rows_depend_on() -> None:
    f16 = {"weights": "a", "tokenizer": "b", "cache_type_k": "f16", "cache_type_v": "f16", "page_size": "64",
           "sinks": "0", "tail": "0", "eviction": "none"}  # fmt: skip
    sink = {**f16, "eviction": "keep 4 window 128", "page_size": "32"}
    assert set(row_fields(f16)) == {"weights", "cache_type_k", "cache_type_v"}
    assert same_rows({**f16, "tokenizer": "c"}, f16) == ALL and same_rows(f16, {**f16, "weights": "b"}) == 0
    assert same_rows(sink, f16) == same_rows(f16, sink) == unevicted(sink) == 32 + 128 - 1
    int4 = {**f16, "cache_type_v": "int4"}
    assert same_rows({**int4, "page_size": "32"}, int4) == 0 and same_rows(f16, int4) == 0
    assert same_rows(f16, {**f16, "computed_on": "x"}) == 0 and same_rows({**f16, "computed_on": "x"}, f16) == ALL
    for nonsense in ("x", "keep 4", "keep x window 3", "none at all", "bad keep 4 window 64"):
        assert unevicted({**f16, "eviction": nonsense}) == 0
        with pytest.raises(ValueError):
            evict_options(nonsense)


_ENGINES: dict[CacheOptions, Engine] = {}


def _opened(options: CacheOptions) -> Engine:
    if options not in _ENGINES:
        _ENGINES[options] = open_tiny("gemma3", "native", options)
    return _ENGINES[options]


@pytest.mark.slow
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("none", "sink", "window", "shift", "keydiff", "snapkv", "h2o")),
            st.sampled_from((192, 320)),
            st.sampled_from((16, 32)),
            st.sampled_from(("f16", "int8")),
            st.sampled_from(("", "cuda some card")),
            st.integers(20, 110),
        ),
        min_size=3,
        max_size=6,
    )
)
def test_any_order_of_settings(runs: list[tuple[str, int, int, str, str, int]]) -> None:
    """Beginnings of one prompt under any settings, on a CPU and on what passes for a GPU: the answer of a cold run, and
    never two copies of a row that is the same."""
    with tempfile.TemporaryDirectory() as name:
        root, longest, before = Path(name), dict[tuple[str, int, str], int](), set[tuple[str, int, str]]()
        for policy, ctx, page, k, card, n in runs:
            scored = policy in eviction.scoring()
            how = {} if policy == "none" else {"budget": "100"} if scored else {"window": 64}
            evict = EvictOptions(policy, **how)  # type: ignore[arg-type]
            engine, prompt = _opened(CacheOptions(ctx, k, k, page, ubatch=32, evict=evict)), [*PROMPT[:n], 7, 8]
            with mock.patch.object(enginecaches, "computed_on", lambda _, on=card: on) if card else nullcontext():
                found = ask(engine, prompt, store_in(root, converts=False))
            assert found.ids == ask(engine, prompt, NOWHERE).ids
            whole = engine.retention.whole if engine.retention else 1 << 20
            if scored:
                with closing(engine.new_sequence()) as seq:
                    whole = seq.reusable(len(prompt))
            like = k, page if k == "int8" else 0, card  # what decides rows
            common = min(longest.get(like, 0), n, whole) // 32 * 32
            assert found.usage.cache_read_tokens >= common - 32
            if like not in before:
                assert found.usage.cache_read_tokens == 0, "rows of other devices are none of this one's"
            before.add(like)
            if scored or n + 2 <= whole:
                longest[like] = max(longest.get(like, 0), n)
        rows: dict[tuple[str | int, ...], int] = {}
        for path in files_in(root):
            with PromptCacheFile(path) as file:
                c = file.contents
            for arena, number in c.pages:
                size = int(c.identity["page_size"])
                if arena == 1 and (number + 1) * size <= c.end - 2:  # whole pages without what ends each prompt
                    at = *map(c.identity.get, ("cache_type_k", "eviction", "page_size", "computed_on")), arena, number
                    rows[at] = rows.get(at, 0) + 1
        assert all(count == 1 for count in rows.values()), rows
