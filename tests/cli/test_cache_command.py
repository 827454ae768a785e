"""`kv cache` and the prompt-cache flags of `kv run`, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import time
from pathlib import Path

import pytest
import tiny
from conftest import Kv, KvHere

from kvcli.cli.cachefiles import check_pages
from kvcli.runtime.promptcache.file import PART, PromptCacheFile

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
RUN = ("--raw", "--no-stdin", "--temp", "0", "-n", "4", "--ignore-eos", "--page-size", "16", "-t", "1")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KV_CACHE_DIR", raising=False)
    return ("-m", str(tiny.make("gemma3").path))


def _run(kv: KvHere, *args: str) -> dict:
    code, out, err = kv("run", *RUN, "--json", *args)
    assert code == 0, err
    return json.loads(out) | {"stderr": err}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("types", ["f16", "int8", "int8/int4"])
def test_the_size_of_a_file_is_what_estimate_says(variant: str, types: str, kv_here: KvHere, tmp_path: Path) -> None:
    """Whatever the steps are: a file has no page of one. Its header may take a page of the disk more."""
    model, file = str(tiny.make(variant).path), tmp_path / "a.kv"
    built = ("cache", "build", "-m", model, "-o", str(file), "-ct", types, "--raw", "--no-stdin", TEXT * 4)
    assert kv_here(*built, "--page-size", "16", "-ub", "64")[0] == 0
    with PromptCacheFile(file) as made:
        tokens = str(len(made.contents.tokens))
    told = kv_here("estimate", model, "-c", tokens, "-ct", types, "--page-size", "16", "--device", "cpu", "--json")
    planned = json.loads(told[1])["types"][0]["prompt_cache_bytes"]
    assert planned > 20_000 and -4096 <= file.stat().st_size - planned <= 16_384


@pytest.mark.slow
def test_states_are_stored_and_found_by_another_process(kv: Kv, kv_here: KvHere, tmp_path: Path) -> None:
    """A prompt with another end goes on from the last checkpoint; what was alike behind it is told."""
    model, file = ("-m", str(tiny.make("lfm2").path)), ("--prompt-cache", str(tmp_path / "a.kv"), "--no-cache")

    def run(*args: str) -> dict:
        code, out, err = kv_here("run", *RUN, *model, "--json", *args)
        assert code == 0, err
        return json.loads(out)

    done = kv("run", *RUN, *model, "--json", *file, TEXT * 2 + "Who?")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    again, cold = run(*file, TEXT * 2 + "Why is it?"), run("--no-cache", TEXT * 2 + "Why is it?")
    read = again["usage"]["cache_disk_tokens"]
    assert read % 16 == 0 and first["usage"]["prompt_tokens"] - 40 < read < first["usage"]["prompt_tokens"]
    assert again["text"] == cold["text"]
    told = kv_here("cache", "show", str(tmp_path / "a.kv"))[1]
    assert re.search(r"^starts +at ", told, re.M) and re.search(r"^states +\d checkpoints? of 768 B", told, re.M)
    assert kv_here("cache", "verify", str(tmp_path / "a.kv"), *model)[0] == 0


def test_how_much_of_the_pages_is_in_use(kv_here: KvHere, model: tuple[str, ...]) -> None:
    """Full pages but the last one, and windows that begin inside a page."""
    value = _run(kv_here, *model, "--no-cache", "-n", "1", "-c", "128", TEXT)
    facts = value["kv"]
    assert 0.4 < facts["page_utilization"] < 1 and facts["contiguous_bytes"] > facts["bytes"] > 0
    told = kv_here("run", *RUN, *model, "--no-cache", "-c", "128", "-v", TEXT)[2]
    assert " % of it in use, " in told and " KiB without pages" in told
    assert "without pages" not in kv_here("run", *RUN, *model, "--no-cache", "--stats", TEXT)[2]


def _listed(kv: KvHere, *args: str) -> dict:
    code, out, err = kv("cache", "ls", "--json", *args)
    assert code == 0, err
    return json.loads(out)


def test_the_store_by_itself(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    store = ("--cache-min-tokens", "50")
    first = _run(kv_here, *model, *store, TEXT + "Who?")
    assert first["usage"]["cache_write_tokens"] == first["usage"]["prompt_tokens"] > 60
    assert first["stderr"].count("\n") == 1 and "--no-cache turns that off" in first["stderr"]
    second, cold = (
        _run(kv_here, *model, *store, TEXT + "Why is it?"),
        _run(kv_here, *model, "--no-cache", TEXT + "Why is it?"),
    )
    assert second["usage"]["cache_disk_tokens"] == second["usage"]["cache_read_tokens"] > 50
    assert second["text"] == cold["text"] and second["stderr"] == ""
    assert cold["usage"]["cache_read_tokens"] == 0
    code, out, _ = kv_here("cache", "ls", "--json")
    listed = json.loads(out)["entries"]
    assert code == 0 and len(listed) == 2 and {entry["type_k"] for entry in listed} == {"f16"}
    code, out, _ = kv_here("cache", "show", next(e["id"] for e in listed if not e["first_token"]), "--tokens")
    assert code == 0 and len(out.split()) == first["usage"]["prompt_tokens"]
    assert kv_here("cache", "verify")[0] == 0
    assert kv_here("cache", "rm", "--all", "--dry-run")[0] == 0 and len(kv_here("cache", "ls")[1].splitlines()) == 3
    code, _, err = kv_here("cache", "rm", "--all")
    assert code == 2 and "-y" in err
    assert kv_here("cache", "rm", listed[0]["id"][:6], "-y")[1].strip() == listed[0]["id"]
    assert kv_here("cache", "prune", "--max-size", "0", "-y")[1].strip() == listed[1]["id"]
    assert json.loads(kv_here("cache", "ls", "--json")[1])["entries"] == []
    assert kv_here("cache", "path")[1].strip() == str(tmp_path / "cache" / "kv" / "prompts")


def test_a_file_that_is_built_and_explained(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    document, file = tmp_path / "doc.txt", str(tmp_path / "x.safetensors")
    document.write_text(TEXT)
    options = ("--raw", "--no-stdin", "-t", "1", "-f", str(document))
    code, out, err = kv_here("cache", "build", *model, *options, "-ct", "int8", "--page-size", "16", "-o", file)
    assert (code, out) == (0, file + "\n") and "prefilled" in err
    code, out, err = kv_here("cache", "explain", file, *model, *options, "And then?")
    assert code == 0, err
    assert "the prompt goes on from what the cache holds" in out or "they part at token" in out
    code, out, _ = kv_here("cache", "explain", file, *model, "--raw", "--no-stdin", "It was the best of wines")
    assert code == 0 and "they part at token" in out and "wines" in out
    assert "not usable with this model: it was made with the weights of another" in kv_here(
        "cache", "explain", file, "-m", str(tiny.make("llama").path), "--raw", "--no-stdin", "x")[1]  # fmt: skip
    code, out, err = kv_here("cache", "verify", file, "--recompute", "3", "-t", "1", *model)
    assert code == 0 and "max error 0, KL divergence of the next token 0" in out, err
    code, out, _ = kv_here("cache", "show", file)
    assert code == 0 and "lossless" in out and "no: quantized: keys int8, values int8" in out
    assert kv_here("cache", "show", file, "--text", *model)[1].startswith("It was the best of times")
    used = _run(kv_here, *model, "-ct", "int8", "--prompt-cache", file, "--prompt-cache-ro", TEXT + "\n\nAnd then?")
    assert used["usage"]["cache_disk_tokens"] > 60
    data = bytearray(Path(file).read_bytes())
    with PromptCacheFile(Path(file)) as opened:
        data[opened._places[opened.contents.pages[1]][0] + 7] ^= 1
    Path(file).write_bytes(data)
    code, out, err = kv_here("cache", "verify", file)
    assert (code, out) == (6, "") and "checksum of page" in err
    code, out, _ = kv_here("run", *RUN, *model, "-ct", "int8", "--prompt-cache", file, "--prompt-cache-strict", TEXT)
    assert (code, out) == (6, "")


def test_a_file_of_a_prompt_in_another_template(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    template, file = tmp_path / "t.jinja", str(tmp_path / "x.safetensors")
    template.write_text("{{ lead }} {{ messages[0].content }} So")
    asked = (*model, "--no-stdin", "--no-raw", "--chat-template", str(template), "--template-var", 'lead="Read"', TEXT)
    code, _, err = kv_here("cache", "build", *asked, "--page-size", "16", "-o", file)
    assert code == 0, err
    assert kv_here("cache", "show", file, "--text", *model)[1].startswith("Read It was the best")
    code, out, err = kv_here("cache", "explain", file, *asked)
    assert code == 0 and "they part" not in out, out + err
    assert "they part at token" in kv_here("cache", "explain", file, *asked, "--template-var", 'lead="Hear"')[1]
    code, _, err = kv_here("cache", "build", *model, "--raw", "--no-stdin", "--reasoning", "on", "-o", file, TEXT)
    assert code == 2 and "--raw and --reasoning cannot be used together" in err


def test_a_file_of_the_store_by_its_name(kv_here: KvHere, model: tuple[str, ...]) -> None:
    store = ("--cache-min-tokens", "50")
    for text in (TEXT + "Who?", TEXT + "Who? " + TEXT + "Why?"):
        _run(kv_here, *model, *store, text)
    files = {entry["first_token"]: entry["path"] for entry in _listed(kv_here)["entries"]}
    assert len(files) == 2
    later = max(files)
    before = Path(files[0]).read_bytes()
    named = ("--no-cache", "--prompt-cache", files[0])
    for types in ((), ("-ct", "int8")):  # as it is, and converted
        used = _run(kv_here, *model, *named, *types, TEXT + "Who? And then.")
        assert used["usage"]["cache_disk_tokens"] > 50 and Path(files[0]).read_bytes() == before, used["stderr"]
    explained = kv_here("cache", "explain", *model, files[0], "--raw", "--no-stdin", TEXT + "Why?")[1]
    assert f"reused   {_run(kv_here, *model, *named, TEXT + 'Why?')['usage']['cache_disk_tokens']} tokens" in explained
    code, out, err = kv_here("run", *RUN, *model, "--prompt-cache", files[later], "--prompt-cache-strict", TEXT)
    assert (code, out) == (6, "") and f"holds only tokens {later} to" in err
    code, out, err = kv_here("cache", "verify", "--recompute", "1", "-t", "1", *model)
    assert (code, err) == (0, "") and f"not computed again: it begins at token {later}" in out and "max error 0" in out
    code, _, err = kv_here("cache", "verify", files[later], "--recompute", "1", *model)
    assert code == 2 and f"cannot be computed again: it begins at token {later}" in err
    assert kv_here("cache", "verify", "--recompute", "-1", *model)[0] == 2


def test_less_than_a_page_is_not_reused(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    path, prompt = str(tmp_path / "x.safetensors"), "It wasn't so."
    _run(kv_here, *model, "--no-cache", "--prompt-cache", path, TEXT)
    explained = kv_here("cache", "explain", *model, path, "--raw", "--no-stdin", prompt)[1]
    assert "reused   0 tokens" in explained and "common   0 tokens" not in explained
    assert _run(kv_here, *model, "--no-cache", "--prompt-cache", path, prompt)["usage"]["cache_disk_tokens"] == 0


def test_what_makes_no_sense_is_said_at_once(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = kv_here("run", *RUN, *model, "--prompt-cache", "", TEXT)
    assert code == 2 and "--prompt-cache is empty\n  give the name of a file" in err
    code, out, err = kv_here("run", *RUN, *model, "--prompt-cache", "/", TEXT)
    assert (code, out, err) == (74, "", "kv: error: cannot write /: it is a folder\n  name a file\n")
    code, _, err = kv_here("run", *RUN, *model, "--cache-size", "much", TEXT)
    assert code == 2 and "share" not in err
    (tmp_path / "file").write_text("")
    used = _run(kv_here, *model, "--cache-min-tokens", "50", "--cache-dir", str(tmp_path / "file" / "x"), TEXT)
    assert "cannot make the folder" in used["stderr"] and used["usage"]["cache_write_tokens"] == 0
    told = "kv: warning: cannot write into /proc/self: prompts are read from there, and none is kept"
    store = ("--cache-min-tokens", "50", "--cache-dir", "/proc/self")
    assert _run(kv_here, *model, *store, TEXT)["stderr"].splitlines()[0] == told
    _run(kv_here, *model, "--cache-dir", str(tmp_path / ("long" * 75)), "x")  # a name that no system takes
    _run(kv_here, *model, "--no-cache", "--prompt-cache", str(tmp_path / "y"), TEXT)
    assert kv_here("cache", "show", str(tmp_path / "y"), "--json", "--tokens")[0] == 2


def test_files_without_16_bit_pages_at_the_start(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    types = ("-ct", "int8", "--kv-sink", "0", "--force")
    _run(kv_here, *model, *types, "--prompt-cache", path, "--no-cache", TEXT + "Who?")
    code, out, err = kv_here("cache", "explain", *model, path, "--raw", "--no-stdin", "-p", TEXT + "Why?")
    assert code == 0 and "reused" in out, err
    code, _, err = kv_here("cache", "verify", *model, path, "--recompute", "2")
    assert code == 0, err


def test_a_file_that_keeps_the_whole_prompt(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    path = str(tmp_path / "x.safetensors")
    evict = ("--evict", "sink", "--keep", "-1", "-c", "320")
    assert (
        kv_here("cache", "build", *model, *evict, "--page-size", "16", "--raw", "--no-stdin", "-o", path, TEXT)[0] == 0
    )
    again = _run(kv_here, *model, *evict, "--no-cache", "--prompt-cache", path, "--prompt-cache-strict", TEXT)
    assert again["usage"]["cache_read_tokens"] > 40 and again["kv"]["keep"] == again["usage"]["prompt_tokens"]


def test_what_a_killed_run_left_beside_a_file_goes(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    left, other = tmp_path / f".x.safetensors{PART}a", tmp_path / f".y.safetensors{PART}a"
    for path in (left, other):
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    _run(kv_here, *model, "--no-cache", "--prompt-cache", str(tmp_path / "x.safetensors"), TEXT)
    assert not left.exists() and other.exists()


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("--prompt-cache-all",), "--prompt-cache-all needs --prompt-cache FILE"),
        (("--prompt-cache", "x", "--prompt-cache-all", "--prompt-cache-ro"), "cannot be used together"),
        (("--prompt-cache", "/", "--prompt-cache-ro"), "--prompt-cache / is a folder"),
        (("--cache-ttl", "7"), "--cache-ttl must be a time, not '7'"),
        (("--cache-size", "many"), "--cache-size must be a size, not 'many'"),
        (("--cache-min-tokens", "0"), "1 or more"),
        (("--n-samples", "2", "--verify-estimate"), "leave --n-samples out"),
        (("--n-samples", "0"), "1 or more"),
    ],
)
def test_flags_that_make_no_sense(kv_here: KvHere, model: tuple[str, ...], args: tuple[str, ...], hint: str) -> None:
    code, _, err = kv_here("run", *model, "hello", *args)
    assert code == 2 and hint in err


@pytest.mark.parametrize(
    "args", [("show", "abcd"), ("show", "ab"), ("rm",), ("rm", "/etc/hosts", "-y"), ("show", "/dev/null")]
)
def test_names_that_are_none(kv_here: KvHere, model: tuple[str, ...], args: tuple[str, ...]) -> None:
    code, out, err = kv_here("cache", *args)
    assert code in (2, 6) and out == "" and err.count("\n") <= 2


def test_several_answers_from_one_prefill(kv_here: KvHere, model: tuple[str, ...]) -> None:
    common = ("run", *model, "--raw", "--no-stdin", "-t", "1", "--temp", "3", "-s", "5", "-n", "6", "--ignore-eos")
    code, out, _ = kv_here(*common, "--jsonl", "--n-samples", "4", TEXT)
    events = [json.loads(line) for line in out.splitlines()]
    numbers = [event["sample"] for event in events]
    assert numbers == sorted(numbers) and set(numbers) == {0, 1, 2, 3}
    ends = [event for event in events if event["event"] == "end"]
    assert code == 0 and [end["sampling"]["sequence"] for end in ends] == [0, 1, 2, 3]
    prompt = ends[0]["usage"]["prompt_tokens"]
    assert [end["usage"]["cache_read_tokens"] for end in ends] == [0, *[prompt] * 3]
    assert len({end["text"] for end in ends}) > 2
    assert json.loads(kv_here(*common, "--json", TEXT)[1])["text"] == ends[0]["text"]


@pytest.mark.slow
def test_kills_while_runs_write(
    kv_command: list[str], kv_env: dict[str, str], kv_here: KvHere, model: tuple[str, ...], tmp_path: Path
) -> None:
    """kill -9 while the file is written and when it is there: then every file is whole, and the next run is right."""
    words = ["run", *model, *RUN, "--json", "--cache-min-tokens", "16", "-n", "200", "-c", "512", TEXT]
    folder = tmp_path / "xdg_cache_home" / "kv" / "prompts"
    for pattern in (f"*/.*{PART}*", "*/*.safetensors"):
        command = [*kv_command, *words]
        process = subprocess.Popen(command, env=kv_env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end and not list(folder.glob(pattern)):
            time.sleep(0.002)
        process.kill()
        process.communicate()
        for path in folder.glob("*/*.safetensors"):
            check_pages(path)
    cold = json.loads(kv_here(*words, "--no-cache")[1])
    warm = json.loads(kv_here(*words, "--cache-dir", str(folder))[1])
    assert warm["text"] == cold["text"] and warm["usage"]["completion_tokens"] == 200


def test_a_full_disk_and_a_folder_that_is_read_only(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    cold = _run(kv_here, *model, TEXT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "full").mkdir()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
        full = _run(kv_here, *model, "--prompt-cache", str(tmp_path / "full" / "x"), TEXT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full["text"] == cold["text"] and list((tmp_path / "full").iterdir()) == []
    assert full["stderr"].count("\n") == 1 and "was not written: File too large" in full["stderr"]
    assert full["usage"]["cache_write_tokens"] == 0 and "File too large" in full["warnings"][-1]
    none = _run(kv_here, *model, "--prompt-cache", "/proc/x", TEXT)  # nobody can write there, root included
    assert none["text"] == cold["text"] and none["stderr"].count("\n") == 1 and "was not written" in none["stderr"]
    store = ("--cache-min-tokens", "50", "--cache-dir")
    (tmp_path / "file").write_text("")
    for reason, *flags in (
        ("cannot make the folder", *store, str(tmp_path / "file" / "x")),
        ("more than the 1.0 KiB of the store", *store, str(tmp_path / "small"), "--cache-size", "1KiB"),
    ):
        unkept = _run(kv_here, *model, *flags, TEXT)
        assert unkept["text"] == cold["text"] and unkept["usage"]["cache_write_tokens"] == 0
        assert reason in "".join(unkept["warnings"]) and reason in unkept["stderr"]
