"""Thinking on the command line, apart from the answer in text, JSON, files, batches and chats; options of templates,
answers that are begun, and log probabilities. On a tiny model that chats."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from calling import Outcome, Runner
from jsonchecks import check
from speaking import make_speaking

BUDGET = ("--reasoning-budget", "6")
ON = ("-n", "40", "--temp", "0", "--ignore-eos", "--no-loop-stop", "--no-cache")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Runner:
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return Runner(monkeypatch, capfdbinary)


@pytest.fixture
def ask(run: Runner) -> Callable[..., Outcome]:
    return lambda *args: run("run", "-m", str(make_speaking()), *ON, "the pages", *args)


@pytest.fixture
def thinker(tmp_path: Path) -> tuple[str, str]:
    """A template that begins to think, keeps what it is told of it, and has a switch."""
    source = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ ('{' ~ m.reasoning_content ~ '} ' if m.reasoning_content else '')"
        " ~ m.content ~ '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' ~ (greeting or '') }}"
        "{{ '<think></think>' if enable_thinking is false else '<think>' }}{% endif %}"
    )
    (tmp_path / "thinker.jinja").write_text(source)
    return "--chat-template", str(tmp_path / "thinker.jinja")


def test_thinking_goes_to_stderr_and_the_answer_alone_to_stdout(ask, thinker):
    found = ask(*thinker, *BUDGET)
    value = json.loads(ask(*thinker, *BUDGET, "--json").out)
    check("run", value)
    assert found.code == 0 and value["reasoning"] and value["text"]
    assert found.out == value["text"] + "\n"
    assert found.err.startswith(value["reasoning"] + "\n")
    assert value["usage"]["reasoning_tokens"] > 6 and value["usage"]["completion_tokens"] == 40
    assert "think>" not in value["text"] + value["reasoning"]
    assert value["reasoning"] not in ask(*thinker, *BUDGET, "-q").err


def test_thinking_that_never_ends_leaves_no_answer(ask, thinker):
    found = ask(*thinker, "-q", "--no-newline")
    assert (found.code, found.out) == (0, "")


def test_events_have_it_apart_too(ask, thinker):
    events = [json.loads(line) for line in ask(*thinker, *BUDGET, "--jsonl").out.splitlines()]
    for event in events:
        check("run --jsonl", event)
    tokens, end = [event for event in events if event["event"] == "token"], events[-1]
    assert "".join(event["text"] for event in tokens) == end["text"]
    assert "".join(event.get("reasoning", "") for event in tokens) == end["reasoning"]


def test_a_file_gets_the_answer(ask, thinker, tmp_path):
    assert ask(*thinker, *BUDGET, "-o", str(tmp_path / "out.txt")).out == (tmp_path / "out.txt").read_text()


def test_samples_and_batches_have_it_apart(ask, run, thinker, tmp_path):
    samples = json.loads(ask(*thinker, *BUDGET, "--json", "--n-samples", "2").out)["samples"]
    assert len(samples) == 2 and all(sample["reasoning"] and sample["text"] for sample in samples)
    (tmp_path / "lines.jsonl").write_text('{"prompt": "the pages"}\n')
    done = run("run", "-m", str(make_speaking()), *ON, *thinker, *BUDGET, "--batch", str(tmp_path / "lines.jsonl"))
    value = json.loads(done.out)
    check("run --batch", value)
    assert (value["text"], value["reasoning"]) == (samples[0]["text"], samples[0]["reasoning"])


def test_reasoning_off_is_the_templates_switch_or_ends_it_at_once(ask, thinker):
    value = json.loads(ask(*thinker, "--reasoning", "off", "--json").out)
    assert value["reasoning"] is None and value["usage"]["reasoning_tokens"] == 0
    begun = json.loads(ask("--assistant", "<think>", "--reasoning", "off", "--json").out)
    assert begun["reasoning"] is None and 0 < begun["usage"]["reasoning_tokens"] < 12
    shown = ask(*thinker, "--reasoning", "off", "--template-var", "enable_thinking=true", "--json")
    assert json.loads(shown.out)["reasoning"]


def test_lines_of_a_batch_say_how_they_think(run, thinker, tmp_path):
    lines = [{}, {"reasoning": "off"}, {"reasoning_budget": 3}]
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"prompt": "the pages", **line}) + "\n" for line in lines))
    found = run("run", "-m", str(make_speaking()), *ON, *thinker, "--batch", str(file))
    whole, off, short = (json.loads(line) for line in found.out.splitlines())
    assert whole["reasoning"] and off["reasoning"] is None and off["usage"]["reasoning_tokens"] == 0
    assert whole["usage"]["reasoning_tokens"] > short["usage"]["reasoning_tokens"] > 0


def test_an_answer_that_is_begun(ask):
    plain = json.loads(ask("--assistant", "It is", "--json").out)
    assert plain["text"].startswith("It is") and plain["usage"]["completion_tokens"] == 40
    assert ask("--assistant", "It is").out == plain["text"] + "\n"
    thought = json.loads(ask("--assistant", "<think>Hm.</think>\nIt is", "--json").out)
    assert (thought["reasoning"], thought["text"][:5]) == ("Hm.", "It is")


def test_variables_reach_the_template(ask, thinker):
    plain, greeted = (ask(*thinker, *more, "--json") for more in ((), ("--template-var", 'greeting="Oh, "')))
    counts = [json.loads(found.out)["usage"]["prompt_tokens"] for found in (plain, greeted)]
    assert counts[0] < counts[1] and "greeting" not in greeted.err
    told = ask(*thinker, "--template-var", "absent=1").err
    assert "kv: warning: --template-var absent changes nothing: the chat template never reads it" in told


def test_the_line_of_statistics_counts_it(ask, thinker):
    assert re.search(r"gen 40 tok \(\d+ thinking\)", ask(*thinker, *BUDGET, "--stats").err)
    assert "thinking" not in ask("--stats").err


def test_what_changes_nothing_is_said(ask):
    assert "has no switch for thinking" in ask("--reasoning", "on").err
    for nothing_to_end in (("--reasoning-budget", "5"), ("--reasoning", "off")):
        assert "marks no thinking" in ask(*nothing_to_end, "-v").err
        assert "thinking" not in ask(*nothing_to_end).err


def test_log_probabilities(ask):
    value = json.loads(ask("--json", "--logprobs", "3").out)
    check("run", value)
    assert len(value["logprobs"]) == 40 and value["sampling"]["top_logprobs"] == 3
    for each in value["logprobs"]:
        assert each["logprob"] <= 0 and len(each["top"]) == 3
        assert math.isclose(each["top"][0]["logprob"], max(one["logprob"] for one in each["top"]))
    events = [json.loads(line) for line in ask("--jsonl", "--logprobs", "3").out.splitlines()]
    for event in events:
        check("run --jsonl", event)
    assert [event["logprobs"] for event in events if event.get("token_id") is not None] == value["logprobs"]


@pytest.mark.parametrize(
    "args, what",
    [
        (("--logprobs", "3"), "--logprobs needs --json or --jsonl"),
        (("--logprobs", "101", "--json"), "--logprobs must be 0 to 100"),
        (("--raw", "--assistant", "x"), "--raw and --assistant cannot be used together"),
        (("--raw", "--reasoning", "off"), "--raw and --reasoning cannot be used together"),
        (("--raw", "--reasoning-budget", "5"), "--raw and --reasoning-budget cannot be used together"),
        (("--raw", "--template-var", "a=1"), "--raw and --template-var cannot be used together"),
        (("--template-var", "a"), "--template-var must be KEY=JSON"),
        (("--template-var", "a=b"), "the value of --template-var a is not JSON: b"),
        (("--reasoning", "maybe"), "--reasoning must be one of on, off, auto"),
        (("--reasoning-budget", "-2"), "--reasoning-budget must be -1 or more"),
        (("--chat-template", "no-such-file"), "cannot read no-such-file"),
        (("--batch", "x", "--assistant", "y"), "--batch and"),
    ],
)
def test_what_makes_no_sense_is_refused(ask, args, what):
    found = ask(*args)
    assert found.code == 2 and what in found.err + found.out


# --- chats


def chat(run: Runner, thinker: tuple[str, str], *args: str, stdin: bytes = b"the pages\nand then\n") -> Outcome:
    common = ("chat", "-m", str(make_speaking()), *ON, *thinker, *BUDGET, "--script", "-q")
    return run(*common, *args, stdin=stdin)


def test_a_saved_chat_keeps_the_thinking_and_the_template_decides(run, thinker):
    first = chat(run, thinker, "--session", "ann", "--json")
    values = [json.loads(line) for line in first.out.splitlines()]
    assert len(values) == 2 and all(value["reasoning"] and value["text"] for value in values)
    shown = json.loads(run("chat", "show", "ann", "--json").out)
    check("chat show", shown)
    assert [m.get("reasoning_content") for m in shown["messages"]] == [
        None, values[0]["reasoning"], None, values[1]["reasoning"],
    ]  # fmt: skip
    # This template puts it in front of the answers: the prompt of the next message is longer by it.
    more = json.loads(chat(run, thinker, "--resume", "ann", "--json", stdin=b"go on\n").out)
    bare = json.loads(chat(run, thinker, "--json", stdin=b"go on\n").out)
    assert more["usage"]["prompt_tokens"] > bare["usage"]["prompt_tokens"] + 80


def test_a_chat_says_the_answers_alone(run, thinker):
    said = chat(run, thinker)
    values = [json.loads(line) for line in chat(run, thinker, "--json").out.splitlines()]
    assert said.out == "".join(value["text"] + "\n" for value in values)


def test_a_chat_turns_thinking_on_and_off(run, thinker):
    lines = b"/reasoning\nthe pages\n/reasoning off\nthe pages\n/reasoning auto\nthe pages\n"
    found = chat(run, thinker, "--json", stdin=lines)
    assert [bool(json.loads(line)["reasoning"]) for line in found.out.splitlines()] == [True, False, True]
    assert [line for line in found.err.splitlines() if "reasoning" in line] == [
        *("kv: reasoning: auto", "kv: reasoning: off", "kv: reasoning: auto"),
    ]
    wrong = chat(run, thinker, stdin=b"/reasoning maybe\n")
    assert wrong.code == 2 and "/reasoning is on, off, auto, not 'maybe'" in wrong.err
    plain = chat(run, ("--temp", "0"), stdin=b"/reasoning on\n")
    assert "reasoning: on, which changes nothing for this model" in plain.err


def test_thinking_is_dim_on_a_terminal(run, thinker, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    found = run("run", "-m", str(make_speaking()), *ON, *thinker, *BUDGET, "the pages")
    assert found.err.startswith("\x1b[2m") and "\x1b" not in found.out
