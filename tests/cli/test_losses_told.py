"""What was lossy is said in one line on stderr, and is in JSON, whichever option it was: on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
from conftest import KvHere
from jsonchecks import check

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 3
ATTEND = ("--attend", "pages:1")
READ_IN_PART = "read in part from token"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    model = ("-m", str(tiny.make("llama").path), "-c", "512", "--page-size", "16", "-t", "1", "--no-cache")
    return ("run", *model, "--raw", "--no-stdin", "--ignore-eos", "-n", "4", "-s", "5")


@pytest.mark.parametrize("more", [(), ("-q",), ("--n-samples", "2"), ("--json",)], ids=" ".join)
def test_an_answer_that_reads_some_pages(kv_here: KvHere, run: tuple[str, ...], more: tuple[str, ...]) -> None:
    code, out, err = kv_here(*run, *ATTEND, *more, TEXT)
    assert code == 0 and err.startswith(f"kv: warning: lossy: {READ_IN_PART} ") and len(err.splitlines()) == 1
    assert "read 1 page beside" in err
    if "--json" in more:
        assert json.loads(out)["warnings"][-1] in err
    assert kv_here(*run, *ATTEND, *more, "short")[2] == "", "nothing was left out"


def test_why_a_file_is_not_written_comes_behind_the_answer(kv_here: KvHere, run: tuple[str, ...], tmp_path: Path):
    file = str(tmp_path / "a.kv")
    code, out, err = kv_here(*run, *ATTEND, "--prompt-cache", file, "--prompt-cache-all", "--json", TEXT)
    assert code == 0 and err.count("is not written") == 1
    assert [text.partition(":")[0] for text in json.loads(out)["warnings"][-2:]] == [f"{file} is not written", "lossy"]


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        (ATTEND, f"lossy: {READ_IN_PART}"),
        (("--evict", "sink", "--window", "32"), "evicted before the answer began: tokens"),
        (("--evict", "random", "--budget", "60"), "random: "),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_lines_of_a_batch(
    kv_here: KvHere, run: tuple[str, ...], tmp_path: Path, options: tuple[str, ...], loss: str
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in ("short", TEXT)))
    code, out, err = kv_here(*run, *options, "--batch", str(file))
    assert code == 0, err
    short, long = (json.loads(line) for line in out.splitlines())
    check("run --batch", long)
    assert short["kv"]["lossless"] and short["warnings"] == []
    assert not long["kv"]["lossless"] and long["kv"]["losses"] and long["warnings"][0].startswith(loss)
    assert long["evict"]["policy"] == (options[1] if "--evict" in options else "none")
    assert ("attend" in long) == (options is ATTEND)
    which = f"the first one line 2 ({long['warnings'][0]})"
    assert err == f"kv: warning: 1 of 2 lines lossy, {which}: see warnings in stdout\n"


def test_a_chat_says_it_once(
    kv_here: KvHere, run: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script").write_text(f"{TEXT}\n{TEXT}\n")
    template = tmp_path / "template"
    template.write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    chat = ("chat", *run[1 : run.index("--raw")], "--chat-template", str(template), "-n", "2", "--script", *ATTEND)
    with (tmp_path / "script").open() as script:
        monkeypatch.setattr("sys.stdin", script)
        code, _, err = kv_here(*chat)
    assert code == 0 and err.count(f"lossy: {READ_IN_PART}") == 1, err


def test_steps_that_are_too_short_to_leave_pages_out_are_told(kv_here: KvHere, run: tuple[str, ...]) -> None:
    sparse = ("--prefill-sparse", "25%", "--prefill-sparse-from", "0")
    told = "--prefill-sparse changes nothing: prompts are read in steps of 128 rows (--ubatch-size)"
    assert told in kv_here(*run, *sparse, "-ub", "128", TEXT)[2]
    assert "changes nothing" not in kv_here(*run, *sparse, "-ub", "256", TEXT)[2]


def test_an_error_of_a_line_names_options(kv_here: KvHere, run: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(json.dumps({"prompt": TEXT * 9}) + "\n")
    error = json.loads(kv_here(*run, "--batch", str(file))[1])["error"]
    assert "--ctx-size " in error["hint"] and "ctx=" not in error["hint"]
