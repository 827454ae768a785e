"""`kv run --batch` and `--n-samples` on a tiny model: order, errors of lines, what is gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import KvHere
from jsonchecks import check

from kvcli.cli import batch
from kvcli.cli.batchlines import KEYS, Form, Line
from kvcli.cli.samples import InTurn
from kvcli.errors import UsageError
from kvcli.options import SampleOptions


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    model = str(tiny.make("llama").path)
    return (
        "run",
        "-m",
        model,
        "--raw",
        "-t",
        "1",
        "-c",
        "256",
        "--page-size",
        "16",
        "--ignore-eos",
        "-s",
        "5",
        "--no-stdin",
    )


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def objects(text: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in text.splitlines()]
    for each in found:
        check("run --batch", each)
    return found


PROMPTS = [{"prompt": f"The {n} pages of the cache", "max_tokens": 12 - n, "id": f"p{n}"} for n in range(9)]


def test_answers_come_in_the_order_of_the_file_and_are_those_of_single_runs(
    kv_here: KvHere, words: tuple[str, ...], tmp_path: Path
) -> None:
    file = write(tmp_path / "in.jsonl", *PROMPTS)
    code, out, err = kv_here(*words, "--batch", str(file), "--parallel", "4")
    found = objects(out)
    assert (code, err) == (0, "")
    assert [(each["line"], each["id"]) for each in found] == [(n + 1, f"p{n}") for n in range(9)]
    assert [each["usage"]["completion_tokens"] for each in found] == [12 - n for n in range(9)]
    for asked, each in zip(PROMPTS[::4], found[::4], strict=True):
        single = json.loads(kv_here(*words, "--json", "-n", str(asked["max_tokens"]), str(asked["prompt"]))[1])
        assert each["text"] == single["text"] and each["sampling"]["seed"] == 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 2 is not valid JSON"),
        ("[1]", "line 2 is JSON, but not an object"),
        ({"prompt": "x", "max_token": 3}, "unknown key 'max_token'"),
        ({"id": 4}, "either prompt or messages"),
        ({"prompt": "x", "messages": []}, "either prompt or messages"),
        ({"prompt": ""}, "prompt must be a text, and not empty"),
        ({"prompt": "x", "id": [1]}, "id must be a text or a whole number"),
        ({"prompt": "x", "temperature": "hot"}, "temperature must be a number, not"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens must be a whole number, not True"),
        ({"prompt": "x", "stop": [""]}, "stop must be a text or a list of texts"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias must be an object of token ids"),
        ({"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias names token 99999"),
        ({"prompt": "x", "ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"prompt": "x", "reasoning": "yes"}, "reasoning must be on, off or auto, not 'yes'"),
        ({"prompt": "x", "reasoning_budget": -2}, "reasoning_budget must be -1 (no limit), 0 or more, not -2"),
        ({"prompt": "x", "reasoning_budget": 3}, "reasoning_budget needs a chat template"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages need a chat template"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "the role of a message is one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "a role and a content each, and nothing else"),
        ({"prompt": "words " * 300}, "more than the context of 256"),
    ],
)
def test_a_wrong_line_is_an_error_of_its_own(
    kv_here: KvHere, words: tuple[str, ...], tmp_path: Path, line: object, message: str
) -> None:
    file = write(tmp_path / "in.jsonl", PROMPTS[0], line, PROMPTS[1])
    code, out, err = kv_here(*words, "--batch", str(file))
    found = objects(out)
    assert code == 1 and "1 line of 3 could not be answered" in err
    assert [each["line"] for each in found] == [1, 2, 3] and message in found[1]["error"]["message"]
    assert "text" in found[0] and "text" in found[2]


def test_a_file_of_answers_is_gone_on_with(kv_here: KvHere, words: tuple[str, ...], tmp_path: Path) -> None:
    file, out = write(tmp_path / "in.jsonl", *PROMPTS[:3], "", *PROMPTS[3:]), tmp_path / "out.jsonl"
    assert kv_here(*words, "--batch", str(file), "-o", str(out))[:2] == (0, "")
    whole = out.read_bytes()
    assert [each["line"] for each in objects(out.read_text())] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    lines = whole.splitlines(keepends=True)
    for torn in (b"", lines[4][:30], b'{"kv_schema": 2, "li\n'):
        out.write_bytes(b"".join(lines[:4]) + torn)
        code, _, err = kv_here(*words, "--batch", str(file), "-o", str(out))
        assert code == 0 and "has the answers to 4 of 9 lines: going on with line 6" in err
        texts = [each["text"] for each in objects(out.read_text())]
        assert texts == [json.loads(line)["text"] for line in lines]
        assert out.read_bytes().startswith(b"".join(lines[:4]))
    code, _, err = kv_here(*words, "--batch", str(file), "-o", str(out))
    assert code == 0 and "has the answers to 9 of 9 lines" in err
    write(tmp_path / "other.jsonl", PROMPTS[0])
    for strange in ("hello\nyou\n", '{"line": 2}\n{"line": 3}\n', whole.decode() + "{}\n"):
        out.write_text(strange)
        code, _, err = kv_here(*words, "--batch", str(file), "-o", str(out))
        assert code == 2 and "answers no line that" in err and out.read_text() == strange


def test_answers_to_lines_that_have_changed_are_refused(
    kv_here: KvHere, words: tuple[str, ...], tmp_path: Path
) -> None:
    file, out = write(tmp_path / "in.jsonl", *PROMPTS[:2]), tmp_path / "out.jsonl"
    assert kv_here(*words, "--batch", str(file), "-o", str(out))[0] == 0
    before = out.read_bytes()
    write(file, PROMPTS[0], PROMPTS[3], PROMPTS[1])
    code, _, err = kv_here(*words, "--batch", str(file), "-o", str(out))
    assert code == 2 and f"its line 2 answers no line that {file} has there now" in err and out.read_bytes() == before


def test_failed_lines_of_an_earlier_run_are_tried_again(
    kv_here: KvHere, words: tuple[str, ...], tmp_path: Path
) -> None:
    """Their errors are replaced: by answers, in the order of the file, or by errors that count once more."""
    long = {"prompt": "words " * 30, "max_tokens": 3, "id": "long"}
    file, out = write(tmp_path / "in.jsonl", PROMPTS[0], "x", long, *PROMPTS[1:3]), tmp_path / "out.jsonl"
    asked = (*words, "--batch", str(file), "-o", str(out))
    code, _, err = kv_here(*asked, "-c", "64")
    assert code == 1 and "2 lines of 5 could not be answered" in err
    first = out.read_bytes().splitlines(keepends=True)
    assert "context of 64" in json.loads(first[2])["error"]["message"]
    out.write_bytes(b"".join(first[:4]))  # it was stopped before the last line
    out.chmod(0o640)
    code, _, err = kv_here(*asked, "-c", "512")
    assert code == 1 and "has the answers to 2 of 5 lines: trying 2 lines with an error again, going on with" in err
    assert "1 line of 5 could not be answered" in err
    second = out.read_bytes().splitlines(keepends=True)
    found = objects(out.read_text())
    assert [each["line"] for each in found] == [1, 2, 3, 4, 5] and found[2]["id"] == "long"
    assert [number for number, each in enumerate(found) if "error" in each] == [1]
    assert found[2]["usage"]["completion_tokens"] == 3 and [second[at] for at in (0, 1, 3)] == [
        first[at] for at in (0, 1, 3)
    ]
    assert out.stat().st_mode & 0o777 == 0o640 and sorted(path.name for path in tmp_path.glob("*out*")) == ["out.jsonl"]
    code, _, err = kv_here(*asked, "-c", "512")
    assert code == 1 and "has the answers to 4 of 5 lines: trying 1 line with an error again" in err
    assert out.read_bytes().splitlines()[2:] == [line.strip() for line in second[2:]]


def test_what_comes_of_lines_that_are_tried_again_is_there_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the run is killed, it is not lost."""
    lines, out = {n: b"%d" % n for n in range(1, 5)}, str(tmp_path / "out.jsonl")
    first = batch.Answers(out, "in.jsonl", lines)
    for number, value in ((1, {"error": {"message": "a"}}), (2, {"text": "b"}), (3, {"error": {"message": "c"}})):
        first.put(number, value)
    monkeypatch.setattr(batch, "MEND_S", -1.0)
    second = batch.Answers(out, "in.jsonl", lines)
    assert second.missing == [1, 3, 4]
    second.put(3, {"text": "C"})
    second.put(4, {"text": "d"})
    second.put(1, {"text": "A"})
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["line"] for each in found] == [1, 2, 3, 4] and [each["text"] for each in found] == ["A", "b", "C", "d"]
    assert batch.Answers(out, "in.jsonl", lines).missing == []


def test_a_file_is_not_its_own_answers(kv_here: KvHere, words: tuple[str, ...], tmp_path: Path) -> None:
    file, link = write(tmp_path / "in.jsonl", *PROMPTS[:2]), tmp_path / "link.jsonl"
    link.symlink_to(file)
    before = file.read_bytes()
    for out in (file, link):
        code, _, err = kv_here(*words, "--batch", str(file), "-o", str(out))
        assert code == 2 and f"-o {out} is the file of --batch itself" in err and file.read_bytes() == before


def test_a_file_of_an_editor_that_marks_its_beginning(kv_here: KvHere, words: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + json.dumps(PROMPTS[8]).encode() + b"\r\nno JSON\r\n")
    code, out, _ = kv_here(*words, "--batch", str(file))
    answer, wrong = objects(out)
    assert code == 1 and answer["text"] and wrong["error"]["hint"].startswith('each line is {"prompt": ')


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hello",), "--batch and a prompt cannot be used together"),
        (("-f", "x"), "--batch and --file"),
        (("--json",), "--batch and --json"),
        (("--n-samples", "2"), "--batch and --n-samples"),
        (("--verify-estimate",), "--batch and --verify-estimate"),
        (("--prompt-cache", "x", "--prompt-cache-all"), "--batch and --prompt-cache-all"),
        (("--evict", "sink", "--keep", "-1"), "--keep -1 cannot be used with --batch"),
        (("--on-overflow", "truncate-start"), "--batch and --on-overflow"),
        (("--parallel", "0"), "--parallel must be 1 to 256"),
    ],
)
def test_flags_that_a_batch_does_not_take(
    kv_here: KvHere, words: tuple[str, ...], tmp_path: Path, args: tuple[str, ...], message: str
) -> None:
    file = write(tmp_path / "in.jsonl", PROMPTS[0])
    code, out, err = kv_here(*words, "--batch", str(file), *args)
    assert code == 2 and message in err + out


def test_parallel_is_of_a_batch(kv_here: KvHere, words: tuple[str, ...], tmp_path: Path) -> None:
    code, _, err = kv_here(*words, "--parallel", "2", "hello")
    assert code == 2 and "--parallel needs --batch FILE" in err
    write(tmp_path / "in.jsonl")
    code, _, err = kv_here(*words, "--batch", str(tmp_path / "in.jsonl"))
    assert code == 2 and "has no lines" in err


def test_every_key_is_obeyed() -> None:
    form = Form(None, True, False, SampleOptions())
    values: dict[str, Any] = {
        "max_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.2,
        "repeat_last_n": 9, "presence_penalty": 0.3, "frequency_penalty": 0.4, "dry_multiplier": 0.8, "dry_base": 2.0,
        "dry_allowed_length": 3, "dry_penalty_last_n": 5, "seed": 4, "stop": ["a"], "logit_bias": {"5": -1.0},
        "ignore_eos": True, "loop_stop": False, "spec": "ngram",
    }  # fmt: skip
    assert {"prompt", "messages", "id", "reasoning", "reasoning_budget", *values} == set(KEYS)
    for key, value in values.items():
        line = Line.parse(json.dumps({"prompt": "x", key: value}).encode(), 1, form)
        expected = {"stop": ("a",), "logit_bias": {5: -1.0}}.get(key, value)
        assert getattr(line.sampling, key) == expected != getattr(SampleOptions(), key)
    assert Line.parse(b'{"prompt": "x", "seed": null}', 1, form).sampling == SampleOptions()
    with pytest.raises(UsageError, match="repeats a key"):
        Line.parse(b'{"prompt": "x", "prompt": "y"}', 1, form)


# --- several answers to one prompt


def test_samples_as_text_and_as_json(kv_here: KvHere, words: tuple[str, ...], tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    args = (*words, "-n", "9", "--temp", "3", "--n-samples", "3", "hello there")
    samples = json.loads(kv_here(*args, "--json")[1])["samples"]
    texts = [each["text"] for each in samples]
    assert len(set(texts)) == 3 and [each["sampling"]["sequence"] for each in samples] == [0, 1, 2]
    code, out, err = kv_here(*args, "-o", str(copy))
    shown = "".join(
        ("\n" if n > 1 else "") + f"== sample {n} of 3 ==\n{text}" + ("" if text.endswith("\n") else "\n")
        for n, text in enumerate(texts, 1)
    )
    assert (code, err, out) == (0, "", shown) and copy.read_bytes().decode() == out
    assert kv_here(*args[:-3], "hello there", "--json")[1].count(json.dumps(texts[0], ensure_ascii=False)) == 1


def test_a_later_answer_waits_for_those_before_it() -> None:
    told: list[str] = []

    class Sink:
        def sample(self, number: int, count: int) -> None:
            told.append(f"{number}/{count}")

    turns = InTurn(Sink(), 3)  # type: ignore[arg-type]
    for number, what, last in ((1, "b", False), (0, "a", False), (2, "c", True), (1, "B", True), (0, "A", True)):
        turns.write(number, lambda what=what: told.append(what), last)  # type: ignore[misc]
    assert told == ["1/3", "a", "A", "2/3", "b", "B", "3/3", "c"]
