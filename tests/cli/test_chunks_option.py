"""`kv run --chunks` and `kv cache build --chunks`: documents that are cached one by one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import tiny
from conftest import KvHere

from kvcli.runtime.engine import chunkcaches, chunks

TEXT = "the pages of a cache are read again and again while rows are written into them once; "


@pytest.fixture
def documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of two files; every chunk may be moved."""
    assert str(tiny.make("llama").path) in MODEL
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(chunkcaches, "LEAST", 64)
    monkeypatch.setattr(chunks, "LIMIT", math.inf)
    (tmp_path / "a.txt").write_text(TEXT * 3)
    (tmp_path / "b.txt").write_text(TEXT.title() * 3)
    return ["-f", str(tmp_path / "a.txt"), "-f", str(tmp_path / "b.txt")]


MODEL = ("-m", str(tiny.path_of("llama")), "--page-size", "16")


@pytest.mark.slow
def test_what_was_built_serves_any_prompt_that_has_it(kv_here: KvHere, documents: list[str]):
    code, out, err = kv_here("cache", "build", "--chunks", *MODEL, *documents)
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == [documents[1], documents[3]]
    assert out.count(" 0 of them stored before") == 2
    code, out, err = kv_here("cache", "build", "--chunks", *MODEL, *documents, "--json")
    built = json.loads(out)["chunks"]
    assert code == 0 and all(0 < each["cache_disk_tokens"] < each["tokens"] for each in built)
    run = ("run", *MODEL, "--raw", "-n", "2", "-c", "1k", "--no-stdin", "--json", "--chunks")
    code, out, err = kv_here(*run, *documents[2:], *documents[:2], "what is read?")
    assert code == 0, err
    value = json.loads(out)
    usage, kv = value["usage"], value["kv"]
    assert [each["name"] for each in usage["chunks"]] == [documents[3], documents[1]]
    assert usage["cache_read_tokens"] == sum(each["moved_tokens"] for each in usage["chunks"]) > 0
    assert usage["cache_disk_tokens"] > 0 and usage["cache_how"] == "2 of 2 documents moved, lossy"
    assert not kv["lossless"] and kv["losses"][0].startswith("moved: ")
    assert usage["chunks"][0]["kld"] is None and usage["chunks"][1]["kld"] > 0  # the first one begins the prompt
    told = kv_here(
        "run", *MODEL, "--raw", "-n", "2", "-c", "1k", "--chunks", *documents, "--stats", "--no-stdin", "what?"
    )[2]
    assert "2 of 2 documents moved, lossy" in told and "warning: lossy: moved: chunks from row" in told
    several = ("-n", "2", "-c", "1k", "--chunks", *documents, "-v", "--n-samples", "2", "--no-stdin", "what?")
    told = kv_here("run", *MODEL, "--raw", *several)[2]
    assert "2 answers to a prompt, reused" in told and "2 of 2 documents moved, lossy" in told
    stored = json.loads(kv_here("cache", "ls", "--json")[1])["entries"]
    assert len(stored) == 2  # no prompt with moved rows is there


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--chunks", "hello"), "--chunks needs documents"),
        (("run", "--chunks", "--prompt-cache", "x.kvc", "-f", __file__, "hello"), "--chunks and --prompt-cache cannot"),
        (("run", "--chunks", "--batch", "x.jsonl"), "--chunks and --batch cannot"),
        (("run", "--chunks", "--evict", "sink", "-c", "1k", "-f", "SHORT", "hello"), "old rows are evicted"),
        (("cache", "build", "--chunks"), "--chunks needs documents"),
        (("cache", "build", "--chunks", "-f", __file__, "-o", "x.kvc"), "--chunks and -o cannot"),
        (("cache", "build", "--chunks", "-f", __file__, "hello"), "--chunks and a prompt cannot"),
        (("cache", "build", "hello"), "--output is missing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense(kv_here: KvHere, documents: list[str], args: tuple[str, ...], message: str):
    args = tuple(documents[1] if word == "SHORT" else word for word in args)
    code, out, err = kv_here(*args, *MODEL, "--no-stdin") if args[0] == "run" else kv_here(*args, *MODEL)
    assert (code, out) == (2, "") and message in err


def test_a_document_that_is_too_short_is_not_stored(kv_here: KvHere, documents: list[str], tmp_path: Path):
    (tmp_path / "c.txt").write_text("A short text.")
    code, _, err = kv_here("cache", "build", "--chunks", *MODEL, "-f", str(tmp_path / "c.txt"))
    assert code == 2 and "not worth storing" in err
