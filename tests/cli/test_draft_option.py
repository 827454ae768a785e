"""`--draft-model`, on tiny models: what is told of guesses, that answers are the same, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
from conftest import KvHere

from kvcli.runtime.engine.spec.pace import Drafted

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. "
MODEL = "--temp", "3", "--seed", "3", "--ignore-eos", "--page-size", "16", "-t", "1", "--no-cache", "-c", "256"


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    """A model that drafts for itself, always."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Drafted, "worth", lambda self, most: max(0, min(most, 4)))
    path = str(tiny.make("llama").path)
    return "-m", path, "--draft-model", path, *MODEL


def test_an_answer_and_what_is_told_of_it(kv_here: KvHere, models: tuple[str, ...]) -> None:
    asked = "run", "--raw", "--no-stdin", "-n", "40", *models, TEXT
    code, out, err = kv_here(*asked, "--json")
    assert code == 0, err
    value = json.loads(out)
    usage = value["usage"]
    assert value["sampling"]["spec"] == "draft" and usage["drafted_tokens"] == usage["accepted_tokens"] > 20
    assert usage["tokens_per_step"] > 2.5
    alone = [word for word in asked if word != "--draft-model"]
    alone.remove(models[1])
    code, out, err = kv_here(*alone, "--json", "--spec", "off")
    plain = json.loads(out)
    assert plain["text"] == value["text"] and plain["usage"]["drafted_tokens"] == 0
    assert value["memory"]["full_context_bytes"] > plain["memory"]["full_context_bytes"]
    code, out, err = kv_here(*asked, "--stats")
    assert re.search(r"(\d+) of \1 drafted tokens right, \d\.\d\d tok a step", err)


def test_lines_of_a_batch(kv_here: KvHere, models: tuple[str, ...], tmp_path: Path) -> None:
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": TEXT[i:], "max_tokens": 20}) + "\n" for i in range(3)))
    many = "run", "--raw", "--batch", str(asked), *models
    results = [[json.loads(line) for line in kv_here(*many, *more)[1].splitlines()] for more in ((), ("--spec", "off"))]
    assert [one["text"] for one in results[0]] == [one["text"] for one in results[1]]
    assert all(one["usage"]["drafted_tokens"] > 5 for one in results[0])


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--draft-model", "nowhere.gguf"), 3, "nowhere.gguf"),
        (("--draft-model", ""), 2, "--draft-model is empty"),
        (("--spec", "draft"), 2, "--spec draft needs a model that drafts"),
        (("--draft-model", "LLAMA", "--evict", "h2o", "--budget", "128"), 2, "nothing can be guessed with --evict h2o"),
        (("--draft-model", "LLAMA", "--attend", "pages:4"), 2, "nothing can be guessed with --attend pages:4"),
        (("--draft-model", "LLAMA", "--spec", "off"), 2, "--draft-model and --spec off cannot be used together"),
        (("--draft-model", "LLAMA", "--spec", "suffix"), 2, "--draft-model and --spec suffix cannot"),
        (("-md", "x"), 2, "is --draft-model here"),
    ],
)
def test_what_cannot_be_is_one_line(kv_here: KvHere, args: tuple[str, ...], code: int, message: str) -> None:
    args = tuple(str(tiny.make(each.lower()).path) if each == "LLAMA" else each for each in args)
    found, out, err = kv_here("run", "--raw", "--no-stdin", "-m", str(tiny.make("llama").path), "x", *args)
    assert (found, out) == (code, "") and message in err, err


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--spec", "ngram", "--evict", "h2o", "--budget", "128"), "--evict h2o"),
        (("--spec", "suffix", "--attend", "pages:4"), "--attend pages:4"),
        (("--spec", "off", "--attend", "pages:4"), ""),
        (("--attend", "pages:4"), ""),
    ],
)
def test_guesses_that_are_asked_for_in_vain(kv_here: KvHere, args: tuple[str, ...], told: str) -> None:
    code, _, err = kv_here(
        "run", "--raw", "--no-stdin", "-n", "1", "x", "-m", str(tiny.make("llama").path), *args, "-c", "256"
    )
    assert code == 0, err
    assert ("changes nothing: nothing can be guessed with" in err) == bool(told)
    assert f"{' '.join(args[:2])} changes nothing: nothing can be guessed with {told}\n" in err or not told


@pytest.mark.parametrize("command", [("chat", "--script"), ("serve", "--port", "0")])
def test_a_draft_model_that_would_do_nothing(kv_here: KvHere, command: tuple[str, ...]) -> None:
    model = str(tiny.make("llama").path)
    code, _, err = kv_here(*command, "-m", model, "--draft-model", model, "--spec", "off")
    assert code == 2 and "--draft-model and --spec off cannot be used together" in err


def test_a_model_of_another_vocabulary_is_not_downloaded(
    kv_here: KvHere, models: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As the recipe says, which has the number of its tokens."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    code, _, err = kv_here("run", "-m", models[1], "--draft-model", "gemma-3-270m", *MODEL, "--no-stdin", "hi")
    assert code == 3 and "the draft model has another vocabulary: 262,144 tokens, and " in err
    assert "downloading" not in err and not (tmp_path / "data").exists()
