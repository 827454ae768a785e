"""How `kv run` ends: limits, full contexts, errors, signals, files of -o."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from runcases import fixture_kv  # noqa: F401

from kvcli.cli import render
from kvcli.cli.interrupt import AT_ONCE
from kvcli.errors import ModelError


def test_a_full_context_is_exit_9_and_said(kv):
    kv.engine.ctx_size = 27  # 24 of them the prompt
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out) == (9, "an a\n")
    assert outcome.err == "kv: stop: context full (27/27)\n"


LOOP = "kv: stop: the answer repeats itself (512 tokens, 170 times the same 3); --repeat-penalty 1.1 makes that rarer, "


def test_an_answer_that_repeats_itself_is_stopped_and_said(kv):
    kv.engine.answers, kv.engine.ctx_size = ["no!" * 1000] * 5, 10_000
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out[:7], len(outcome.out)) == (0, "no!no!n", 513)
    assert outcome.err == LOOP + "--no-loop-stop goes on\n"
    value = json.loads(kv("run", "hello", "--json").out)
    assert value["finish_reason"] == "repetition" and value["sampling"]["loop_stop"]
    assert value["repetition"] == {"tokens": 512, "period_tokens": 3, "times": 170, "period": 3}
    assert [f"kv: {warning}\n" for warning in value["warnings"]] == [outcome.err]
    assert "| seed 3 | repetition\n" in kv("run", "hello", "--stats", "-s", "3").err
    for option in ("--no-loop-stop", "--ignore-eos"):
        outcome = kv("run", "hello", option)
        assert (outcome.out, outcome.err) == ("no!" * 1000 + "\n", "")


def test_an_answer_that_nobody_sees_has_a_limit(kv, monkeypatch):
    text = " ".join(map(str, range(2000)))
    kv.engine.answers, kv.engine.ctx_size = [text] * 6, 20_000
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out) == (0, text[:4096] + "\n")
    assert outcome.err == (
        "kv: stop: 4,096 tokens, the limit where stdout is no terminal; -n sets another, -n -1 none\n"
    )
    value = json.loads(kv("run", "hello", "--json").out)
    assert (value["finish_reason"], value["sampling"]["max_tokens"]) == ("length", 4096) and value["sampling"][
        "unattended"
    ]
    assert [f"kv: {warning}\n" for warning in value["warnings"]] == [outcome.err]
    assert kv("run", "hello", "-n", "4096").err == ""  # as asked
    assert "| length (-n 7)\n" in kv("run", "hello", "-n", "7", "--stats").err
    assert kv("run", "hello", "-n", "-1").out == text + "\n"
    monkeypatch.setattr(render, "is_terminal", lambda stream: stream is sys.stdout)
    assert kv("run", "hello").out == text + "\n"


@pytest.mark.parametrize(("answer", "told"), [('{"name": "', True), ('{"name": "Ann"}', False)])
def test_json_that_is_cut_is_said_in_a_pipe_too(kv, answer, told):
    kv.engine.answers = [answer + " " * 9] * 2
    outcome = kv("run", "hello", "--json-schema", '{"properties": {"name": {}}}', "-n", str(len(answer)))
    line = "kv: stop: the limit of -n; the answer is not whole, a larger -n lets it end\n"
    assert (outcome.code, outcome.out, outcome.err) == (0, answer + "\n", line if told else "")


def test_the_default_limit_takes_no_room_from_a_prompt_that_is_cut(kv):
    """A quarter of the context is left to the answer, as without a limit."""
    kv.engine.ctx_size = 400
    outcome = kv("run", "x" * 1000, "--on-overflow", "truncate-start", "--json")
    assert len(kv.engine.calls[-1][0]) == 300 and json.loads(outcome.out)["prompt_cut"]["ctx_size"] == 400


def test_sampling_is_told_with_v(kv):
    kv.engine.answers = ["x"] * 3
    kv.engine.sampling_defaults = {"temp": 0.3, "top_k": 0}
    line = "kv: sampling: --temp 0.3 --top-p 0.95 --min-p 0.05 -n 4096 --loop-stop\n"
    assert kv("run", "hello", "-v").err.endswith(line)
    assert "sampling:" not in kv("run", "hello", "--stats").err
    options = ("--temp", "0", "--min-p", "0", "--top-p", "1", "-n", "3", "--ignore-eos", "--repeat-penalty", "1.2")
    line = "kv: sampling: --temp 0.0 --repeat-penalty 1.2 --repeat-last-n 64 --dry-multiplier 0.8 -n 3 --ignore-eos\n"
    outcome = kv("run", "hello", "-v", *options, "--dry-multiplier", "0.8")
    assert outcome.err.endswith(line)
    assert "kv: each token is chosen on the CPU, which is slower: because\n" in outcome.err  # as this engine has it


def test_a_prompt_longer_than_the_context_is_exit_5(kv):
    kv.engine.ctx_size = 10
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out) == (5, "")


def test_length_is_success(kv):
    outcome = kv("run", "hello", "-n", "2")
    assert (outcome.code, outcome.out) == (0, "an\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_answer_after_the_token(kv, tmp_path, number, code):
    path = tmp_path / "out.txt"
    kv.engine.before_token = lambda n: os.kill(os.getpid(), number) if n == 3 else None
    path.write_text("old")
    outcome = kv("run", "hello", "--stats", "-o", str(path))
    assert (outcome.code, outcome.out) == (code, "an a\n")
    assert "interrupted" in outcome.err
    assert path.read_text() == "an a\n" and f"kv: {path} holds the answer so far\n" in outcome.err


def failing(error: BaseException, before: int):
    def before_token(n: int) -> None:
        if n == before:
            raise error

    return before_token


@pytest.mark.parametrize("form", ["--no-stats", "--json", "--jsonl"])
@pytest.mark.parametrize(("error", "code"), [(MemoryError(), 4), (ModelError("broken"), 3), (SystemExit(129), 129)])
def test_an_error_in_the_middle_leaves_what_was_generated(kv, tmp_path, error, code, form):
    path = tmp_path / "out.txt"
    path.write_text("old")
    kv.engine.answers = ["an answer"] * 2
    kv.engine.before_token = failing(error, 3)
    outcome = kv("run", "hello", form, "-o", str(path))
    assert outcome.code == code and path.read_text() == "an " and list(tmp_path.iterdir()) == [path]
    if form == "--json" and not isinstance(error, SystemExit):
        told = json.loads(outcome.out)
        assert (told["error"]["code"], told["text"]) == (code, "an "), "what is printed has all there is"
    assert f"kv: {path} holds the answer so far\n" in outcome.err
    path.write_text("old")
    kv.engine.before_token = failing(error, 0)
    outcome = kv("run", "hello", form, "-o", str(path))
    assert outcome.code == code and path.read_text() == "old" and "holds" not in outcome.err


def test_what_stdout_did_not_take_is_in_the_file(kv, tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        outcome = kv("run", "hello", "-o", str(path))
        monkeypatch.undo()
    assert outcome.code == 74 and path.read_text() == "a" and "No space left" in outcome.err


@pytest.mark.parametrize("number", AT_ONCE)
def test_a_signal_that_ends_kv_at_once_leaves_what_was_generated(kv, tmp_path, monkeypatch, number):
    """The end itself is played by SystemExit."""
    path = tmp_path / "out.txt"
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", sys.exit)
    monkeypatch.setattr("kvcli.cli.interrupt.SAME_S", 0.0)  # two signals, not one that came twice
    kv.engine.before_token = lambda n: os.kill(os.getpid(), number) if n == 3 else None
    outcome = kv("run", "hello", "--json", "-o", str(path))
    assert (outcome.code, path.read_text()) == (128 + number, "an ")
    assert f"kv: {path} holds the answer so far\n" in outcome.err
    assert list(tmp_path.iterdir()) == [path]


def test_a_second_signal_leaves_what_was_generated(kv, tmp_path, monkeypatch):
    path = tmp_path / "out.txt"

    def twice(n: int) -> None:
        if n == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", sys.exit)
    monkeypatch.setattr("kvcli.cli.interrupt.SAME_S", 0.0)  # two signals, not one that came twice
    kv.engine.before_token = twice
    outcome = kv("run", "hello", "-o", str(path))
    assert (outcome.code, path.read_text()) == (130, "an ")
    assert outcome.err == f"kv: {path} holds the answer so far\n"


def test_a_second_signal_in_json_has_the_text_so_far(kv, monkeypatch):
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", sys.exit)
    monkeypatch.setattr("kvcli.cli.interrupt.SAME_S", 0.0)  # two signals, not one that came twice
    kv.engine.before_token = lambda n: [os.kill(os.getpid(), signal.SIGINT) for _ in "12"] if n == 3 else None
    outcome = kv("run", "hello", "--json")
    told = json.loads(outcome.out.splitlines()[0])  # there the process ends
    assert (outcome.code, told["error"]["message"], told["text"]) == (130, "interrupted", "an ")


def test_a_file_that_takes_nothing_is_an_error_in_json(kv):
    """The answer is whole, and so is the object; what went wrong is in it, and on stderr."""
    outcome = kv("run", "hello", "--json", "-o", "/dev/full")
    told = json.loads(outcome.out)
    assert (outcome.code, told["text"], told["error"]["code"]) == (74, "an answer", 74)
    assert outcome.err == "kv: error: cannot write /dev/full: No space left on device\n"


def test_a_file_is_not_read_and_replaced(kv, tmp_path):
    path = tmp_path / "x"
    path.write_text("text")
    outcome = kv("run", "hello", "-f", str(path), "-o", str(path))
    assert (
        outcome.code == 2
        and outcome.err == f"kv: error: {path} would be read and replaced\n  name another file with -o\n"
    )
    assert path.read_text() == "text"


def test_no_text_is_no_prompt(kv, tmp_path):
    assert "the prompt is empty" in kv("run", " \n\t").err
    (tmp_path / "x").write_text("")
    assert kv("run", "hello", "-f", str(tmp_path / "x")).err == f"kv: warning: {tmp_path}/x is empty\n"


def test_a_dash_is_stdout(kv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = kv("run", "hello", "-o", "-")
    assert (outcome.code, outcome.out, list(tmp_path.iterdir())) == (0, "an answer\n", [])
    for args in (("-o", "-", "--json"), ("-o", "-", "--jsonl"), ("-o", "")):
        assert kv("run", "hello", *args).code == 2


def test_a_signal_in_json(kv):
    kv.engine.before_token = lambda n: os.kill(os.getpid(), signal.SIGINT) if n == 3 else None
    outcome = kv("run", "hello", "--json")
    assert outcome.code == 130
    assert json.loads(outcome.out)["finish_reason"] == "interrupted"
