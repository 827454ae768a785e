"""`kv run --tools`: calls as lines of JSON, in JSON, in files, cut ones, and what is refused. On a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from calling import Outcome, Runner
from chattemplates import TEMPLATES
from jsonchecks import check
from speaking import make_speaking

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Bern", "Genève"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}, {"name": "now"}]


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Callable[..., Outcome]:
    for name in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    run = Runner(monkeypatch, capfdbinary)
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    (tmp_path / "hermes.jinja").write_text(TEMPLATES["qwen3"])
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }}")
    monkeypatch.chdir(tmp_path)
    given = ("-m", str(make_speaking()), "--temp", "0.8", "--seed", "2", "--no-cache", "--tools", "tools.json")
    return lambda *args: run("run", *given, *(args or ("x",)))


HERMES = ("--chat-template", "hermes.jinja", "Hi")


def test_a_call_is_a_line_of_json(ask: Callable[..., Outcome]) -> None:
    found = ask(*HERMES, "--tool-choice", "get_weather", "-o", "copy.txt", "-n", "400")
    lines = [json.loads(line) for line in found.out.splitlines()]
    assert found.code == 0 and lines, found
    for call in lines:
        assert call["name"] == "get_weather" and call["arguments"]["city"] in ("Bern", "Genève")
    assert Path("copy.txt").read_text() == found.out
    value = json.loads(ask(*HERMES, "--tool-choice", "get_weather", "--json", "-n", "400").out)
    check("run", value)
    assert value["tool_calls"] == lines and value["text"] == ""


def test_a_text_comes_before_the_calls(ask: Callable[..., Outcome]) -> None:
    found = ask(*HERMES, "--assistant", "I look.\n<tool_call>", "-n", "400")
    text, *calls = found.out.splitlines()
    assert text == "I look." and all(json.loads(call)["name"] in ("get_weather", "now") for call in calls) and calls


def test_a_call_that_is_cut_is_left_out(ask: Callable[..., Outcome]) -> None:
    """Before its arguments have begun it is a text like any other."""
    for tokens in range(10, 60, 7):
        found = ask(*HERMES, "--tool-choice", "get_weather", "-n", str(tokens))
        told = "call of get_weather was cut" in found.err
        assert told == (found.out.strip() == "") and (told or found.out.startswith("<tool_call>"))
    assert told


def test_several_answers_have_calls_of_their_own(ask: Callable[..., Outcome]) -> None:
    value = json.loads(ask(*HERMES, "--tool-choice", "required", "--n-samples", "2", "-n", "400", "--json").out)
    assert all(each["tool_calls"] for each in value["samples"])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--chat-template", "plain.jinja", "x"), "takes no tools\n  give another template (--chat-template)"),
        (("--tools", "-", "-f", "-"), "--tools - and -f - cannot be used together"),
        (("--tools", "[5]", "x"), "must be a function"),
        (("--tools", "{}", "x"), "--tools must be a list of tools"),
        (("--tools", "{", "x"), "--tools is not JSON"),
        (("--raw", "x"), "--tools needs a chat template"),
        ((*HERMES, "--tool-choice", "nobody"), "no tool 'nobody'"),
        (("--batch", "tools.json"), "--batch and --tools cannot be used together"),
    ],
)
def test_what_makes_no_sense(ask: Callable[..., Outcome], args: tuple[str, ...], told: str) -> None:
    found = ask(*args)
    assert found.code == 2 and told in found.err, found


def test_tools_from_stdin_and_in_the_command(
    ask: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    how = (*HERMES, "--tool-choice", "get_weather", "-n", "400")
    wanted = ask(*how).out
    assert wanted and ask(*how, "--tools", json.dumps(TOOLS)).out == wanted
    run, given = Runner(monkeypatch, capfdbinary), ("-m", str(make_speaking()), "--temp", "0.8", "--seed", "2")
    found = run("run", *given, "--no-cache", "--tools", "-", *how, stdin=json.dumps(TOOLS).encode())
    assert found.out == wanted, found
