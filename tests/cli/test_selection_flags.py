"""`--evict NAME --budget N|P%` and `kv cache show --mass`, on tiny models: what is said, refused and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from conftest import KvHere

from kvcli.cli import cachefiles
from kvcli.runtime.promptcache.sameness import evict_options

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness. "
RUN = ("--raw", "--no-stdin", "--temp", "0", "--ignore-eos", "--page-size", "16", "-t", "1", "--no-cache")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return ("-m", str(tiny.make("gemma3").path))


def test_what_went_is_told(kv_here: KvHere, model: tuple[str, ...]) -> None:
    evict = ("--evict", "random", "--budget", "60", "-n", "6")
    code, out, err = kv_here("run", *RUN, *model, *evict, "--json", TEXT * 2)
    assert code == 0, err
    value = json.loads(out)
    assert value["evict"] == {"policy": "random", "keep": None, "window": None, "budget": "60"}
    kv = value["kv"]
    assert kv["evicted_tokens"] > 50 and kv["tokens"] == 65 and not kv["lossless"]
    assert re.search(r"evicted: \d+ tokens, kept 65 of \d+ rows by random", kv["losses"][0])
    code, _, err = kv_here("run", *RUN, *model, *evict, "--stats", TEXT * 2)
    assert code == 0 and re.search(r"\(\d+ evicted by random, budget 60\)", err)
    assert re.search(r"random: 65 of \d+ rows stay, with a budget of 60", err)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "x", "--evict", "snapkv"), "--evict snapkv needs --budget"),
        (("run", "x", "--prefill-sparse-from", "256"), "--prefill-sparse-from needs --prefill-sparse"),
        (("run", "x", "--budget", "25%"), "--budget needs --evict expected or --evict h2o"),
        (("run", "x", "--evict", "tova", "--budget", "many"), "--budget must be a number of tokens"),
        (("run", "x", "--evict", "tova", "--budget", "20"), "--budget is 20, less than the 66 rows"),
        (("perplexity", "--evict", "tova", "--budget", "25%", "-f", __file__), "--evict tova cannot be used here"),
        (("cache", "build", "-o", "x.kv", "--evict", "h2o", "--budget", "1k"), "--evict h2o cannot be used here"),
    ],
)
def test_what_cannot_be_is_one_line(kv_here: KvHere, model: tuple[str, ...], args: tuple[str, ...], message: str):
    code, out, err = kv_here(*args, *model)
    assert (code, out) == (2, "") and message in err, err


def test_an_estimate_counts_what_selection_takes_and_saves(kv_here: KvHere, model: tuple[str, ...]) -> None:
    asked = ("estimate", model[1], "-c", "2k", "-ct", "f16", "--device", "cpu", "--json")
    plain, selecting = (
        {row["name"]: row["bytes"] for row in json.loads(kv_here(*asked, *more)[1])["fixed"]}
        for more in ((), ("--evict", "h2o", "--budget", "256"))
    )
    assert selecting.pop("selection of rows") > 0 and selecting == plain


def test_what_the_last_tokens_look_at(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    file = str(tmp_path / "a.kv")
    built = kv_here("cache", "build", *model, "--page-size", "16", "--raw", "--no-stdin", "-o", file, TEXT * 3)
    assert built[0] == 0, built[2]
    code, out, err = kv_here("cache", "show", file, "--mass")
    assert code == 0, err
    head, *lines = out.splitlines()
    assert re.fullmatch(r"what the last 64 of \d+ tokens look at, in \d+ layers", head)
    shares = [float(re.search(r"([\d.]+) %", line)[1]) for line in lines]
    assert 3 < len(lines) <= 24 and abs(sum(shares) - 100) < 0.06 * len(lines) and lines[0].split()[0] == "0"
    assert kv_here("cache", "show", file, "--mass", "--json")[0] == 2


def test_a_built_cache_has_the_rows_that_stay(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    """`kv run` goes on from them with the same options alone, and leaves the file as it is."""
    file, evict = tmp_path / "a.kv", ("--evict", "kvzip", "--budget", "60", "--page-size", "16", "-c", "1k")
    built = kv_here("cache", "build", *model, *evict, "--raw", "--no-stdin", "-o", str(file), "--json", TEXT * 2)
    assert built[0] == 0 and re.search(r"kvzip: \d+ of \d+ rows stay, with a budget of 60", built[2]), built[2]
    kv = json.loads(built[1])["kv"]
    assert kv["evicted_tokens"] > 50 and not kv["lossless"]
    before = file.read_bytes()
    run = ("run", *RUN, *model, "-n", "4", "--prompt-cache", str(file), "--prompt-cache-strict")
    code, out, err = kv_here(*run, *evict, "--json", f"{TEXT * 2} Next")
    assert code == 0, err
    found = json.loads(out)
    assert found["usage"]["cache_disk_tokens"] == json.loads(built[1])["usage"]["prompt_tokens"]
    assert found["kv"]["evicted_tokens"] == kv["evicted_tokens"]
    code, _, err = kv_here(*run, "--page-size", "16", "-c", "1k", f"{TEXT * 2} Next")
    assert code == 6 and "it was made with --evict kvzip --budget 60, this run has --evict none" in err
    assert file.read_bytes() == before
    code, out, _ = kv_here("cache", "show", str(file))
    assert code == 0 and "f16 page 16 evict kvzip 60" in out
    end = json.loads(built[1])["usage"]["prompt_tokens"]
    assert f"at {end}\n" in out and not re.search(r"prefill s +0\.000\n", out)
    explain = ("cache", "explain", str(file), *model, "--raw", "--no-stdin")
    assert f"reused   {end} tokens" in kv_here(*explain, f"{TEXT * 2} Next")[1]
    for other in (TEXT * 2, f"{TEXT} Next"):
        out = kv_here(*explain, other)[1]
        assert "reused   0 tokens" in out and "selected by score" in out
    head = kv_here("cache", "show", str(file), "--mass")[1].splitlines()[0]
    assert head.endswith("where nothing is evicted; the file has the rows that --evict kvzip --budget 60 left")
    assert "selected" in kv_here("cache", "verify", str(file), "--recompute", "1", *model)[2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("", "--evict snapkv --budget 82"),
        ("", "--evict sink --window 32"),
        ("--evict sink --window 32", ""),
        ("--evict random --budget 60", "--evict kvzip --budget 60"),
        ("--evict kvzip --budget 60", "--evict kvzip --budget 70"),
        ("--evict kvzip --budget 60", ""),
    ],
)
def test_a_file_of_another_policy_is_refused_unless_forced(
    kv_here: KvHere, model: tuple[str, ...], tmp_path: Path, first: str, then: str
) -> None:
    file = tmp_path / "a.kv"
    build = ("cache", "build", *model, "--page-size", "16", "-c", "1k", "--raw", "--no-stdin", "-o", str(file))
    code, _, err = kv_here(*build, *first.split(), TEXT * 2)
    assert code == 0, err
    made = file.read_bytes()
    code, out, err = kv_here(*build, *then.split(), TEXT * 2)
    assert (code, out) == (6, "") and file.read_bytes() == made
    asked, there = then or "--evict none", first or "--evict none"
    assert f"it was made with {there}" in err and f"this run has {asked}" in err and "--force replaces it" in err
    code, _, err = kv_here(*build, *then.split(), "--force", TEXT * 2)
    assert code == 0 and file.read_bytes() != made, err
    eviction = evict_options(cachefiles.describe(file).contents.identity["eviction"])
    assert (f"--evict {eviction.policy}" in then) == bool(then) and eviction.budget in then
    assert kv_here(*build, *then.split(), TEXT * 2)[0] == 0  # again with the same is no other


def test_a_file_of_the_beginning_becomes_one_of_selected_rows(
    kv_here: KvHere, model: tuple[str, ...], tmp_path: Path
) -> None:
    """An interrupted `kv cache build` leaves one."""
    file = tmp_path / "a.kv"
    build = ("cache", "build", *model, "--page-size", "16", "-c", "1k", "--raw", "--no-stdin", "-o", str(file))
    assert kv_here(*build, TEXT.strip())[0] == 0
    code, _, err = kv_here(*build, "--evict", "tova", "--budget", "82", TEXT * 2)
    assert code == 0, err
    assert cachefiles.describe(file).contents.identity["eviction"] == "select tova 82"
    few = ("--evict", "random", "--budget", "900", "--force")  # nothing goes
    for again in (few, few[:-1]):
        code, _, err = kv_here(*build, *again, TEXT)
        assert code == 0, err


def test_rows_of_an_answer_that_are_not_kept_are_told(kv_here: KvHere, model: tuple[str, ...], tmp_path: Path) -> None:
    """Those of the prompt are written as without --prompt-cache-all."""
    file, evict = tmp_path / "a.kv", ("--evict", "snapkv", "--budget", "82")
    run = ("run", *RUN, *model, "-n", "4", "-c", "1k", "--prompt-cache", str(file), "--prompt-cache-all")
    code, _, err = kv_here(*run, *evict, TEXT * 2)
    assert code == 0 and f"rows of the answer are not written into {file}: they stand behind rows" in err
    made = cachefiles.describe(file).contents
    assert made.identity["eviction"] == "none" and len(made.tokens) > 100
    code, out, err = kv_here(*run, *evict[:-1], "900", "--json", f"{TEXT * 2} Next")  # nothing goes
    assert code == 0 and "not written" not in err
    assert json.loads(out)["usage"]["cache_disk_tokens"] > 80
    assert len(cachefiles.describe(file).contents.tokens) > len(made.tokens) + 3


def test_selected_rows_of_a_file_serve_a_chat_with_any_question(
    kv_here: KvHere, model: tuple[str, ...], tmp_path: Path
) -> None:
    """A file that is built without a question has no token of the template behind the text."""
    template, text, file = tmp_path / "t.jinja", tmp_path / "doc.txt", tmp_path / "a.kv"
    template.write_text("User: {{ messages[0].content }} So the answer")
    text.write_text(TEXT * 2)
    asked = (*model, "--no-raw", "--no-stdin", "--chat-template", str(template), "-c", "1k", "--page-size", "16")
    asked = (*asked, "--evict", "kvzip", "--budget", "60", "-f", str(text))
    code, out, err = kv_here("cache", "build", *asked, "-o", str(file), "--json")
    assert code == 0, err
    built = json.loads(out)["usage"]["prompt_tokens"]
    for question in ("Who signed it?", "2 + 2"):
        run = ("run", *asked, "--prompt-cache", str(file), "-n", "2", "--temp", "0", "--no-cache", "--json", question)
        code, out, err = kv_here(*run)
        assert code == 0 and json.loads(out)["usage"]["cache_disk_tokens"] == built > 100, err
