"""The arms of `kv bench`: without a cache of keys and values, and with the rows of prefixes from several places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import KvHere
from engines import open_tiny
from jsonchecks import check

from kvcli.errors import DoesNotFit
from kvcli.options import CacheOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.evaluate import guessing, parallels, prefixreuse, uncached
from kvcli.runtime.promptcache.file import PromptCacheFile


@pytest.mark.parametrize(("variant", "types"), [("llama", "f16"), ("llama", "int4"), ("gemma3", "f16")])
def test_every_row_is_computed_for_every_token(variant: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny(variant, "auto", CacheOptions(type_k=types, type_v=types, page_size=16))
    rows, forward = [], Engine.forward_all
    monkeypatch.setattr(Engine, "forward_all", lambda e, parts: rows.append(len(parts[0][1])) or forward(e, parts))
    heard: list[str] = []
    (both,) = uncached.run(engine, [(40, 5)], 2, False, heard.append)
    assert both.computed == (44, 40 + 41 + 42 + 43 + 44) and sum(rows) == 2 * sum(both.computed)
    assert both.same == 5 and heard == ["40 + 5 tokens, 210 rows without the cache"]
    assert len(both.cached_s) == len(both.uncached_s) == 2 and both.times == both.uncached / both.cached
    engine.pool.check([])


@pytest.mark.parametrize(("variant", "types"), [("llama", "f16"), ("llama", "int4"), ("gemma3", "f16")])
def test_prefixes_come_from_where_the_arm_says(
    variant: str, types: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = CacheOptions(100, types, types, page_size=16)
    engine = open_tiny(variant, "auto", cache)
    (found,) = prefixreuse.run(engine, [70], 12, 2, True, lambda _: None)
    computed, disk, memory = found.arms
    whole = 70 if types == "f16" else 64  # of a sealed cache whole pages
    assert computed.reused == (0, 0) and computed.hits == 0
    assert set(disk.reused) <= {64, 70} and set(memory.reused) <= {64, whole}
    assert disk.hits == memory.hits == 2 and found.stored_bytes > 0
    assert all(len(arm.ttft_s) == 2 and min(arm.ttft_s) > 0 for arm in found.arms)
    assert [path.name for path in (tmp_path / "kv").iterdir()] == ["fingerprints"]  # its store is gone
    engine.pool.check([])


def test_tables_and_json(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prefixreuse, "put_out", lambda handle, size: None)  # not every file system lets go of files
    common = ("-m", str(tiny.make("llama").path), "--page-size", "16", "-r", "1", "--no-warmup")
    arms = {
        "bench --no-kv-cache": ("--no-kv-cache", "-p", "9,20", "-n", "3"),
        "bench --prefix-reuse": ("--prefix-reuse", "-p", "40", "--suffix", "5", "-ct", "f16,int8"),
        "bench --parallel": ("--parallel", "2,1", "-d", "20", "-n", "3", "--bandwidth", "10"),
        "bench --spec": ("--spec", "ngram", "-p", "30", "-n", "3"),
    }
    for kind, flags in arms.items():
        code, out, err = kv_here("bench", *common, *flags, "--json")
        assert (code, err) == (0, ""), err
        value = json.loads(out)
        check(kind, value)
        assert len(value["results"]) == 2 and value["repetitions"] == 1
        code, out, _ = kv_here("bench", *common, *flags)
        rows = [line for line in out.splitlines() if line.startswith("| ")]
        assert code == 0 and len(rows) == 2 + (6 if kind.endswith("--prefix-reuse") else 2)
        if kind.endswith("--parallel"):
            assert [row.split("|")[2:4] for row in rows[2:]] == [[f" {n} ", " tg3 @ d20 "] for n in (1, 2)]
        elif kind.endswith("--spec"):
            assert [row.split("|")[2] for row in rows[2:]] == [" copying ", " prose "]
            drafts = "--spec", "draft", "--draft-model", common[1], *flags[2:]
            code, out, err = kv_here("bench", *common, *drafts, "--json")
            assert (code, json.loads(out)["spec"]) == (0, "draft"), err
        elif kind.endswith("--no-kv-cache"):
            assert [row.split("|")[2:4] + row.split("|")[9:10] for row in rows[2:]] == [
                [" 9 ", " 3 ", " 3 "], [" 20 ", " 3 ", " 3 "],
            ]  # fmt: skip
        else:
            assert [row.split("|")[3:5] for row in rows[2:5]] == [
                [" computed ", " 0 of 1 "], [" disk ", " 1 of 1 "], [" memory ", " 1 of 1 "],
            ]  # fmt: skip


def test_files_that_cannot_be_put_out_are_told(
    kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(handle: int, size: int) -> None:
        raise prefixreuse.ProbeFailed("no such call")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(prefixreuse, "put_out", fails)
    model = ("-m", str(tiny.make("llama").path), "--page-size", "16")
    code, out, err = kv_here("bench", *model, "--prefix-reuse", "-p", "30", "-r", "1", "--no-warmup", "--json")
    value = json.loads(out)
    assert code == 0 and "no such call" in err and value["results"][0]["page_cache_dropped"] is False
    assert "no such call" in value["warnings"][-1]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--no-kv-cache", "--prefix-reuse"), "cannot be used together"),
        (("--no-kv-cache", "-d", "4k"), "-d cannot be used with --no-kv-cache"),
        (("--no-kv-cache", "-n", "0"), "--n-gen must be 1 or more here"),
        (("--no-kv-cache", "--evict", "sink"), "--evict cannot be used with --no-kv-cache"),
        (("--prefix-reuse", "-n", "4"), "-n cannot be used with --prefix-reuse"),
        (("--prefix-reuse", "--bandwidth", "9"), "--bandwidth cannot be used with --prefix-reuse"),
        (("--suffix", "4"), "--suffix needs --prefix-reuse"),
        (("--prompt-cache", "a"), "--prompt-cache needs -d"),
        (("--prompt-cache", "a", "-d", "0"), "--prompt-cache needs -d"),
        (("--prefix-reuse", "--prompt-cache", "a"), "--prompt-cache cannot be used with --prefix-reuse"),
        (("--parallel", "2", "--spec", "off"), "--parallel and --spec cannot be used together"),
        (("--parallel", "2", "-p", "9"), "-p cannot be used with --parallel"),
        (("--parallel", "1,0"), "--parallel must be 1 to 256, not '0'"),
        (("--parallel", "2", "-n", "0"), "--n-gen must be 1 or more here"),
        (("--spec", "some"), "--spec must be suffix, ngram, draft, mtp or off, not 'some'"),
        (("--spec", "draft"), "--spec draft and --draft-model need each other"),
        (("--draft-model", "x.gguf"), "--spec draft and --draft-model need each other"),
        (("--spec", "ngram", "-d", "9"), "-d cannot be used with --spec"),
    ],
    ids=" ".join,
)
def test_options_that_mean_nothing_to_an_arm(kv_here: KvHere, args: tuple[str, ...], message: str) -> None:
    code, out, err = kv_here("bench", "-m", str(tiny.make("llama").path), *args)
    assert (code, out) == (2, "") and message in err


def test_depths_come_from_a_file(kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are computed once, for this run and the next; deeper ones are added."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    computed, forward = [], Engine.forward_all
    monkeypatch.setattr(Engine, "forward_all", lambda e, parts: computed.extend(parts[0][1]) or forward(e, parts))
    file = tmp_path / "deep.safetensors"
    common = ("-m", str(tiny.make("llama").path), "--page-size", "16", "-p", "4", "-n", "0", "-r", "1", "--no-warmup",
              "--bandwidth", "10")  # fmt: skip
    counts = []
    for depth in ("40,80", "40,80", "100"):
        computed.clear()
        code, out, err = kv_here("bench", *common, "-d", depth, "--prompt-cache", str(file), "--json")
        assert (code, err) == (0, ""), err
        assert len(json.loads(out)["results"]) == len(depth.split(","))
        counts.append(len(computed))
    assert counts == [80 + 2 * 4, 2 * 4, 20 + 4]
    with PromptCacheFile(file) as found:
        assert len(found.contents.tokens) == 100
    other = ("-m", str(tiny.make("qwen2").path), *common[2:], "-d", "40", "--prompt-cache")
    code, out, err = kv_here("bench", *other, str(file))
    assert (code, out) == (6, "") and "it was made with the weights of another model" in err
    nothing = tmp_path / "text"
    nothing.write_text("no rows")
    code, out, err = kv_here("bench", *other, str(nothing))
    assert (code, out) == (6, "") and "is not a prompt cache" in err and nothing.read_text() == "no rows"


def test_what_was_computed_of_a_depth_is_kept_however_it_ends(
    kv_here: KvHere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file, forward, left = tmp_path / "deep.safetensors", Engine.forward_all, iter(range(2))

    def stopped(engine: Engine, parts: Any) -> Any:
        if next(left, None) is None:
            raise SystemExit(130)  # as Ctrl-C does
        return forward(engine, parts)

    words = (
        "bench",
        "-m",
        str(tiny.make("llama").path),
        "--page-size",
        "16",
        "-ub",
        "32",
        "-p",
        "0",
        "-n",
        "2",
        "--bandwidth",
        "9",
    )
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "forward_all", stopped)
        code, out, err = kv_here(*words, "-d", "100", "--prompt-cache", str(file))
    assert (code, out) == (130, "") and "64 of 101 prompt tokens are kept" in err
    with PromptCacheFile(file) as found:
        assert len(found.contents.tokens) == 64
    assert kv_here(*words, "-r", "1", "-d", "100", "--prompt-cache", str(file))[0] == 0


def test_sequences_at_a_time_are_each_behind_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny("llama", "auto", CacheOptions(100, "int8", "int8", page_size=16, sequences=3))
    rows, forward = [], Engine.forward_all
    monkeypatch.setattr(Engine, "forward_all", lambda e, parts: rows.append(len(parts)) or forward(e, parts))
    heard: list[str] = []
    one, three = parallels.run(engine, [1, 3], [(40, 6)], 2, False, heard.append)
    assert (one.sequences, three.sequences, three.depth, three.tokens) == (1, 3, 40, 6)
    assert heard == ["1 x 6 tokens @ d40", "3 x 6 tokens @ d40"]
    assert rows.count(3) >= 2 * 6  # steps of all
    weights = engine.terms.setting.weights.read
    assert three.read_bytes - weights == 3 * (one.read_bytes - weights) > 0
    assert three.step_s == 3 / three.median and three.limit(1.0) == 3e9 / three.read_bytes and one.limit(None) is None
    engine.pool.check([])


def test_sequences_whose_pages_have_no_room_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_tiny("llama", "auto", CacheOptions(100, page_size=16))
    monkeypatch.setattr(engine.pool, "budget_bytes", engine.layout.pool_bytes(parallels.rows(40, 6), engine.ubatch, 2))
    found = parallels.run(engine, [2, 20_000], [(40, 6)], 1, False, lambda _: None)
    assert next(found).sequences == 2
    with pytest.raises(DoesNotFit, match=r"20000 sequences of 48 tokens need .* of pages, there is room for"):
        next(found)
    engine.pool.check([])


@pytest.mark.parametrize("method", ["suffix", "off"])
def test_guessed_answers_are_those_without(method: str) -> None:
    engine = open_tiny("llama", "auto", CacheOptions(200, page_size=16))
    copying, prose = guessing.run(engine, method, [60], [24], 2, False, lambda _: None)
    assert (copying.arm, prose.arm) == guessing.ARMS and copying.prompt > prose.prompt > 60
    for each in (copying, prose):
        assert each.same == each.tokens == 2 * 25 and len(each.rates) == len(each.plain_rates) == 2
        assert each.drafted >= each.accepted >= 0 and each.steps + each.accepted == 2 * 24
        assert each.tokens_per_step == (each.steps + each.accepted) / each.steps
        assert method == "suffix" or each.drafted == 0
    assert method == "off" or copying.drafted + prose.drafted > 0
    engine.pool.check([])
