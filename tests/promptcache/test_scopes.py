"""Scopes never share: what is stored in one is neither used nor told of in another."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from conftest import KvHere
from engines import PROMPT
from reusecases import Told, ask, engine_of, files_in, store_in

from kvcli.options import PromptCacheOptions
from kvcli.runtime.promptcache.file import PromptCacheFile

SCOPES = ("", "work", "home")


@pytest.mark.parametrize(("variant", "types"), [("llama", "f16"), ("gemma3", "int4")])
def test_scopes_never_share(variant: str, types: str, tmp_path: Path) -> None:
    engine, prompt = engine_of(variant, types), PROMPT[:100]
    for number, scope in enumerate(SCOPES, 1):
        told = Told()
        end = ask(engine, prompt, store_in(tmp_path, scope=scope), told)
        assert end.usage.cache_read_tokens == 0 and not end.usage.cache_miss and len(files_in(tmp_path)) == number
        assert not any("stored prompt" in line for line in told.lines)
        assert any("tokens in clear, readable by you alone" in line for line in told.lines) is (number == 1)
    for scope in SCOPES:
        assert ask(engine, [*prompt, 5], store_in(tmp_path, scope=scope)).usage.disk_tokens >= 80
    assert len({path.parent for path in files_in(tmp_path)}) == 3


def test_a_file_of_another_scope_is_refused_by_name(tmp_path: Path) -> None:
    engine = engine_of("llama")
    ask(engine, PROMPT[:100], store_in(tmp_path, scope="work"))
    named = PromptCacheOptions(file=files_in(tmp_path)[0], read_only=True)
    told = Told()
    assert ask(engine, [*PROMPT[:100], 5], named, told).usage.cache_read_tokens == 0
    assert any("scope work, this run has none" in line for line in told.lines)
    assert ask(engine, [*PROMPT[:100], 5], replace(named, scope="work")).usage.cache_read_tokens == 100


def test_scopes_are_shown(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KV_CACHE_DIR", str(tmp_path / "prompts"))
    ask(engine_of("llama"), PROMPT[:100], store_in(tmp_path, scope="work"))
    assert "scope work" in kv_here("cache", "ls")[1]
    assert [entry["scope"] for entry in json.loads(kv_here("cache", "ls", "--json")[1])["entries"]] == ["work"]
    code, out, err = kv_here("run", "--cache-scope", "a b", "hi")
    assert (code, out) == (2, "") and "'a b' is not a name for a scope" in err


def test_a_saved_chat_stays_in_its_scope(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on with it need not say so again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    words = ("chat", "--script", "-m", str(tiny.make("gemma3").path), "--no-raw", "--page-size", "16", "-n", "2")
    said = tmp_path / "said.txt"
    said.write_text("some words that stay here\n")
    for more in (("--session", "s", "--cache-scope", "work"), ("--resume", "s")):
        monkeypatch.setattr("sys.stdin", said.open())
        code, _, err = kv_here(*words, *more)
        assert code == 0, err
    assert "its rows are kept in the scope work, as before" in err and "(disk)" not in err
    listed = json.loads(kv_here("cache", "ls", "--json")[1])["entries"]
    assert listed and {entry["scope"] for entry in listed} == {"work"}


def test_documents_that_are_built_have_their_scope(kv_here: KvHere, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some words that stay here " * 14)
    words = ("cache", "build", "-m", str(tiny.make("llama").path), "-f", str(text), "--page-size", "16", "-c", "400")
    words = (*words, "--raw", "--cache-scope", "work")
    code, _, err = kv_here(*words, "--chunks", "--cache-dir", str(tmp_path / "prompts"))
    assert code == 0, err
    for each in files_in(tmp_path):
        with PromptCacheFile(each) as found:
            assert found.contents.identity["scope"] == "work"
    assert files_in(tmp_path)
    code, _, err = kv_here(*words, "-o", str(tmp_path / "rows"))
    assert code == 2 and "--cache-scope needs --chunks" in err
