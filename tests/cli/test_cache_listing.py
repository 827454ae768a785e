"""What `kv cache` tells of the store and asks before it removes, on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from conftest import KvHere
from engines import PROMPT
from promptfiles import blocks
from promptfiles import contents as small
from reusecases import ask, engine_of, files_in, store_in

from kvcli.cli import cachefiles, render
from kvcli.options import CacheOptions, LoadOptions, PromptCacheOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.promptcache.file import write
from kvcli.runtime.promptcache.sameness import is_exact

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A store with a document, a question about it, the document in int4, and a chat."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("KV_CACHE_DIR", str(tmp_path / "prompts"))
    document = replace(store_in(tmp_path), source="doc.txt", lead=3)
    ask(engine_of("llama", "int4"), PROMPT[:100], document)  # before f16, whose rows would serve it
    ask(engine_of("llama"), PROMPT[:100], document)
    ask(engine_of("llama"), [*PROMPT[:100], 5, 6, 7], document)
    ask(engine_of("llama", page=32), PROMPT[1:61], replace(store_in(tmp_path), chat="trip"))
    return tmp_path / "prompts"


def listed(kv: KvHere) -> list[dict]:
    return json.loads(kv("cache", "ls", "--json")[1])["entries"]


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "hidden"), [(80, "model expires"), (160, ""), (40, "model used expires")])
def test_a_list_fits_the_terminal(
    root: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, columns: int, hidden: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdout)
    lines = kv_here("cache", "ls")[1].splitlines()
    head = lines[0].split()
    assert len(lines) == 5 and max(map(len, lines)) <= columns
    assert [name for name in ("model", "used", "expires") if name in head] == [
        name for name in ("model", "used", "expires") if name not in hidden.split()
    ]
    assert {line.split()[0] for line in lines[1:]} == {entry["id"] for entry in listed(kv_here)}
    cut = {line.split()[0]: line for line in lines}
    for entry in listed(kv_here):
        type_k = entry["type_k"] + " page " + str(entry["page_size"])
        assert type_k in cut[entry["id"]] or columns < 80


def test_what_goes_on_from_a_removed_file_says_what_it_needs(root: Path, kv_here: KvHere, tmp_path: Path) -> None:
    document, question = sorted(
        (e for e in listed(kv_here) if e["type_k"] == "f16" and e["source"] == "doc.txt"),
        key=lambda e: e["first_token"],
    )
    told = f"needs the first {question['first_token']}"
    assert question["goes_on_from"] == document["id"] and told not in kv_here("cache", "ls")[1]
    assert kv_here("cache", "rm", document["id"], "-y")[0] == 0
    (line,) = (line for line in kv_here("cache", "ls")[1].splitlines() if told in line)
    assert line.startswith(question["id"]) and told in kv_here("cache", "show", question["id"])[1]
    ask(engine_of("llama"), PROMPT[:100], replace(store_in(tmp_path), source="doc.txt", lead=3))
    assert told not in kv_here("cache", "ls")[1] and told not in kv_here("cache", "show", question["id"])[1]


def test_a_list_in_a_pipe_is_whole(root: Path, kv_here: KvHere) -> None:
    code, out, err = kv_here("cache", "ls")
    assert code == 0 and err == ""
    assert "expires" in out and "doc.txt: " in out and "chat trip: " in out and "int4 page 16" in out
    assert "f16 page 32" in out and "s ago" in out and "in 7 d" in out


def test_json_has_a_model_once_and_all_of_an_entry(root: Path, kv_here: KvHere) -> None:
    value = json.loads(kv_here("cache", "ls", "--json")[1])
    (model_id,) = value["models"]
    assert value["models"][model_id]["model_config"]["layers"] and value["cache_dir"] == str(root)
    assert value["size_bytes"] == sum(entry["size_bytes"] for entry in value["entries"])
    chat, question, document, int4 = value["entries"]
    assert {entry["model_id"] for entry in value["entries"]} == {model_id}
    assert "model_config" not in json.dumps(value["entries"])
    assert (chat["chat"], chat["source"], document["source"], document["chat"]) == ("trip", None, "doc.txt", None)
    assert (int4["type_k"], int4["type_v"], int4["kv_sink"], int4["lossless"]) == ("int4", "int4", 1, False)
    assert int4["losses"] == ["quantized: keys int4, values int4"] and document["lossless"] and not document["losses"]
    assert (document["first_token"], document["tokens"], question["first_token"]) == (0, 100, 96)
    assert document["used_at"].endswith("Z") and document["expires_at"] > document["used_at"] >= document["created_at"]
    assert document["prefill_s"] > 0 and document["evict"]["policy"] == "none" and document["problem"] is None
    decode = engine_of("llama").tokenizer.decode
    assert document["begins"] == " ".join(decode(PROMPT[3:67]).split())
    assert question["begins"] == " ".join(decode([*PROMPT[96:100], 5, 6, 7]).split())


@pytest.mark.parametrize("exact", [False, True])
def test_prompts_that_were_computed_exactly_are_told_apart(tmp_path: Path, exact: bool) -> None:
    engine = Engine.open(tiny.make("llama").path, LoadOptions("llama", 2, "native", exact=exact), CacheOptions(320))
    ask(engine, PROMPT[:100], store_in(tmp_path))
    (file,) = map(cachefiles.describe, files_in(tmp_path))
    told = exact and engine.loaded.decoder.ops.arithmetic != "cpu native base"  # where nothing is ever rounded
    assert file.as_json(1.0)["exact"] is told and ("exact" in file.settings.split()) is told


def test_the_name_of_what_computed_says_whether_exactly() -> None:
    said = {
        "cpu native avx2": True,
        "cpu native avx2 rows in fixed point": False,
        "cuda X": False,
        "cuda X exact": True,
    }
    assert {name: is_exact(name) for name in said} == said


def test_models_are_named_as_other_commands_take_them() -> None:
    def named(title: str) -> tuple[str | None, str | None]:
        contents = SimpleNamespace(about={"model": title}, identity={"model_config": "{}"})
        found = cachefiles.Described(Path("x"), 1, 0.0, contents).model_json()  # type: ignore[arg-type]
        return found["model"], found["model_title"]

    assert named("SmolLM2 135M Instruct") == ("smollm2", "SmolLM2 135M Instruct")
    assert named("Something else") == (None, "Something else")


def test_show_begins_with_the_text(root: Path, kv_here: KvHere) -> None:
    entry = listed(kv_here)[-1]
    out = kv_here("cache", "show", entry["id"])[1]
    assert out.splitlines()[0].split() == ["id", entry["id"]] and "from         doc.txt" in out
    assert "begins" in out and "model_config" not in out and max(map(len, out.splitlines())) < 400
    shown = json.loads(kv_here("cache", "show", entry["id"], "--json")[1])
    assert shown["model_config"]["layers"] and shown["id"] == entry["id"] and shown["kv_schema"]


def test_files_from_before_words_were_kept(root: Path, kv_here: KvHere) -> None:
    old = small(list(range(40)))
    path = root / ("0" * 32) / ("-".join(c * 32 for c in "abc") + ".safetensors")
    path.parent.mkdir()
    write(path, old, blocks(old))
    code, out, _ = kv_here("cache", "ls")
    (line,) = (line for line in out.splitlines() if line.startswith("cccccccccc"))
    assert code == 0 and line.split()[-1] == "-"
    assert [entry["begins"] for entry in listed(kv_here) if entry["id"] == "cccccccccc"] == [None]
    path.write_bytes(b"x" * 200)
    code, out, _ = kv_here("cache", "ls")
    assert code == 0 and "damaged" in out
    (entry,) = (entry for entry in listed(kv_here) if entry["problem"])
    assert entry["tokens"] is None and "is not a prompt cache" in entry["problem"]


def test_a_question_names_what_goes_and_no_means_no(
    root: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = listed(kv_here)
    for answer, code, left in (("n\n", 1, 4), ("\n", 1, 4), ("y\n", 0, 3)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        found, out, err = kv_here("cache", "rm", entries[-1]["id"])
        assert found == code and len(listed(kv_here)) == left
        assert f"Remove {entries[-1]['id']} (doc.txt: " in err and "): 1 file, " in err
        assert ("nothing was removed" in err) == (code == 1) and "aborted" not in err
        assert out.strip() == ("" if code else entries[-1]["id"])
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert "Remove " in kv_here("cache", "rm", "--all")[2]
    assert "3 files" in kv_here("cache", "rm", "--all", "--dry-run")[2]


def test_removing_as_json(root: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = listed(kv_here)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    code, out, err = kv_here("cache", "rm", entries[0]["id"], "--json")
    assert code == 2 and "-y" in json.loads(out)["error"]["hint"] and "Remove" not in err
    value = json.loads(kv_here("cache", "rm", entries[0]["id"], "--json", "-y")[1])
    assert value["removed"] == [{key: entries[0][key] for key in ("id", "path", "size_bytes")}]
    assert value["removed_bytes"] == entries[0]["size_bytes"] and "size_bytes" not in value
    value = json.loads(kv_here("cache", "prune", "--max-size", "0", "--json", "--dry-run")[1])
    assert value["dry_run"] and len(value["removed"]) == 3 and len(listed(kv_here)) == 3
    assert json.loads(kv_here("cache", "prune", "--json", "-y")[1])["removed"] == []
    assert "nothing to remove" in kv_here("cache", "prune", "-y")[2]


def test_verify_calls_files_by_their_ids(root: Path, kv_here: KvHere, tmp_path: Path) -> None:
    entries = listed(kv_here)
    code, out, _ = kv_here("cache", "verify")
    assert code == 0 and [line.split(":")[0] for line in out.splitlines()] == [entry["id"] for entry in entries]
    assert ": ok, 1 page\n" in out and ": ok, 7 pages\n" in out
    path = Path(entries[-1]["path"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, out, err = kv_here("cache", "verify")
    assert code == 6 and f"{entries[-1]['id']} is damaged" in err and str(path) not in err
    code, out, err = kv_here("cache", "verify", "--json")
    checked = json.loads(out)["entries"]
    (wrong,) = (entry for entry in checked if not entry["ok"])
    assert code == 6 and err == "" and wrong["id"] == entries[-1]["id"] and "damaged" in wrong["problem"]
    pages = {entry["id"]: entry["pages"] for entry in entries[:-1]}
    assert {entry["id"]: entry["pages"] for entry in checked if entry["ok"]} == pages
    copy = tmp_path / "copy"
    copy.write_bytes(Path(entries[0]["path"]).read_bytes())
    assert kv_here("cache", "verify", str(copy))[1] == f"{copy}: ok, {entries[0]['pages']} pages\n"


def test_where_nothing_is_kept_that_is_said(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder, why in ((tmp_path / "none", "there is no such folder"), (tmp_path / "empty", "it is empty")):
        for command in (("ls",), ("verify",), ("rm", "--all", "-y"), ("prune", "-y")):
            code, out, err = kv_here("cache", *command, "--cache-dir", str(folder))
            assert (code, out) == (0, "") and f"no prompts are kept in {folder}: {why}" in err
        assert json.loads(kv_here("cache", "ls", "--json", "--cache-dir", str(folder))[1])["entries"] == []


def test_build_and_explain_as_json(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, file = ("-m", str(tiny.make("gemma3").path)), str(tmp_path / "x")
    common = (*model, "--raw", "--no-stdin", "-t", "1")
    build = ("cache", "build", *common, "--page-size", "16", "-o", file)
    (tmp_path / "doc.txt").write_text(TEXT)
    made = json.loads(kv_here(*build, "-f", str(tmp_path / "doc.txt"), "--json")[1])
    assert made["path"] == file and made["size_bytes"] == Path(file).stat().st_size
    assert made["usage"]["cache_write_tokens"] == made["usage"]["prompt_tokens"] > 60
    assert cachefiles.describe(Path(file)).prompt.startswith("doc.txt: It was the best of times")
    told = json.loads(kv_here("cache", "explain", *common, file, "--json", TEXT.replace("worst", "wurst"))[1])
    assert told["path"] == file and told["id"] is None and told["parts_at"] == told["common_tokens"] > 5
    assert told["cache"]["token"] != told["prompt"]["token"] and told["made_with"] is None
    assert told["reused_tokens"] in (0, told["common_tokens"])
    llama = ("-m", str(tiny.make("llama").path), "--raw", "--no-stdin")
    other = json.loads(kv_here("cache", "explain", *llama, file, "--json", "x")[1])
    assert other["made_with"] == "the weights of another model or adapter" and other["reused_tokens"] is None
    before = Path(file).read_bytes()
    code, _, err = kv_here(*build, "Another text altogether, " * 5)
    assert code == 6 and "holds another prompt" in err and "--force replaces it" in err
    assert Path(file).read_bytes() == before
    assert kv_here(*build, "--force", "Another text altogether, " * 5)[0] == 0
    assert "Another" in cachefiles.describe(Path(file)).prompt
    (tmp_path / "letter").write_text("Dear Ann, this is a letter and not a cache, and it shall not be replaced. " * 3)
    code, _, err = kv_here(*build[:-1], str(tmp_path / "letter"), "--force", TEXT)
    assert code == 6 and "is not a prompt cache" in err and (tmp_path / "letter").read_text().startswith("Dear")


def test_a_prompt_of_less_than_a_page_is_no_cache(
    kv_here: KvHere, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, file = ("-m", str(tiny.make("llama").path)), tmp_path / "x"
    code, _, err = kv_here("cache", "build", *model, "--raw", "--no-stdin", "-o", str(file), "a")
    assert code == 2 and "less than a page of 64 is never read" in err and not file.exists()
    ask(engine_of("llama"), [5], PromptCacheOptions(file=file))
    code, out, _ = kv_here("cache", "verify", str(file))
    assert (code, out) == (0, f"{file}: ok, 1 page\n")
    code, _, err = kv_here("cache", "verify", str(file), "--recompute", "1", *model)
    assert code == 2 and "cannot be computed again: it has one token" in err


@pytest.mark.parametrize("words", ["ls", "verify", "prune -y --max-size 1M", "show x", "rm -y x"])
def test_a_cache_folder_that_is_a_file_is_refused(kv_here: KvHere, tmp_path: Path, words: str) -> None:
    (tmp_path / "file").write_text("x")
    code, out, err = kv_here("cache", *words.split(), "--cache-dir", str(tmp_path / "file"))
    assert (code, out) == (2, "") and f"{tmp_path / 'file'} is not a folder\n  --cache-dir or KV_CACHE_DIR" in err


@pytest.mark.parametrize("words", ["show", "verify", "rm -y"])
def test_a_prompt_file_that_is_not_there_is_a_usage_error(kv_here: KvHere, tmp_path: Path, words: str) -> None:
    missing = str(tmp_path / "none.kv")
    code, out, err = kv_here("cache", *words.split(), missing, "--cache-dir", str(tmp_path))
    assert (code, out) == (2, "") and missing in err
