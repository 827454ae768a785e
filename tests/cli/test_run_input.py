"""What goes into `kv run`: prompts, files, stdin, system messages, templates."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from chatcases import asked
from fakes import BOS, END, START, FakeTemplate
from runcases import fixture_kv, question  # noqa: F401

from kvcli.cli import inputs, render
from kvcli.cli.flags.prompt import Question


def test_prompt_is_files_then_stdin_then_instruction(kv, tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfA\r\nA\n")
    (tmp_path / "b").write_bytes(b"B")
    args = ("-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"), "tell me")
    kv("run", *args, stdin=b"piped\n\n")
    assert question(kv) == "A\r\nA\n\nB\n\npiped\n\n\ntell me"


def test_a_dash_fixes_the_place_of_stdin(kv, tmp_path):
    (tmp_path / "b").write_bytes(b"B")
    kv("run", "-f", "-", "-f", str(tmp_path / "b"), "-p", "tell me", stdin=b"piped")
    assert question(kv) == "piped\n\nB\n\ntell me"
    assert kv("run", "-f", "-", "-f", "-", stdin=b"x").code == 2


def test_stdin_may_be_empty_left_alone_or_the_whole_prompt(kv, monkeypatch):
    kv.engine.answers = ["x"] * 5
    kv("run", "hello", stdin=b"")
    assert question(kv) == "hello"
    kv("run", "hello", "--no-stdin", stdin=b"piped")
    assert question(kv) == "hello"
    kv("run", "hello", "--no-stdin", "-f", "-", stdin=b"piped")
    assert question(kv) == "piped\n\nhello"
    kv("run", stdin=b"piped")
    assert question(kv) == "piped"
    monkeypatch.setenv("KV_NO_STDIN", "1")
    kv("run", "hello", stdin=b"piped")
    assert question(kv) == "hello"
    outcome = kv("run", stdin=b"piped")
    assert outcome.code == 2 and "-f - for stdin, which --no-stdin leaves alone" in outcome.err


@pytest.mark.parametrize("stdin", [None, b"", b"\n"])
def test_no_prompt_is_an_error_with_a_hint(kv, stdin):
    outcome = kv("run", stdin=stdin)
    assert (outcome.code, outcome.out) == (2, "")
    assert "kv chat" in outcome.err
    assert kv.opened == []


def test_an_empty_prompt_is_an_error(kv):
    outcome = kv("run", "", stdin=None)
    assert outcome.code == 2
    assert "empty" in outcome.err


def test_bytes_that_are_not_utf8_are_refused_with_their_offset(kv, tmp_path):
    outcome = kv("run", "hello", stdin=b"abc\xffdef")
    assert outcome.code == 65
    assert "0xff at offset 3" in outcome.err
    (tmp_path / "png").write_bytes(b"\x89PNG\r\n")
    assert kv("run", "-f", str(tmp_path / "png")).code == 65
    assert kv("run", os.fsdecode(b"caf\xe9")).code == 65
    assert kv("run", "hi", "-sysf", str(tmp_path / "png")).code == 65
    assert kv.opened == []


def test_an_unreadable_file_is_an_error(kv, tmp_path):
    for name in ("missing", "."):
        outcome = kv("run", "-f", str(tmp_path / name))
        assert outcome.code == 2
        assert "cannot read" in outcome.err


def test_a_silent_pipe_is_mentioned(kv, monkeypatch):
    monkeypatch.setattr(inputs, "STDIN_PATIENCE_S", 0)
    reader, writer = os.pipe()
    told = []

    def write_late(text: str) -> None:
        told.append(text)
        os.write(writer, b"late")
        os.close(writer)

    monkeypatch.setattr(render, "write_err", write_late)
    kv("run", "hello", stdin=reader)
    assert told == ["kv: waiting for stdin (use --no-stdin)\n"]
    assert question(kv) == "late\n\nhello"


def test_how_much_came_from_stdin_is_said(kv, monkeypatch):
    """On a terminal or with -v; always where the program that started `kv` has the same stdin and may miss it."""
    kv.engine.answers = ["x"] * 6
    lines = "kv: read 2 lines (11 bytes) from stdin into the prompt"
    assert kv("run", "hello", stdin=b"one\ntwo\n...").err == ""
    assert kv("run", "hello", "-v", "--no-stats", stdin=b"one\ntwo ...").err == f"{lines}\n"
    assert kv("run", "-v", "--no-stats", stdin=b"one\ntwo ...").err == ""  # it is the whole prompt
    assert kv("run", "-f", "-", "hello", "-v", "--no-stats", stdin=b"one\ntwo ...").err == ""  # it was asked for
    monkeypatch.setattr(inputs, "_inherited", lambda: True)
    outcome = kv("run", "hello", "--json", stdin=b"one")
    told = "read 1 line (3 bytes) from stdin into the prompt; --no-stdin leaves them to the calling program"
    assert outcome.err == f"kv: {told}\n" and json.loads(outcome.out)["warnings"] == [told]
    assert kv("run", "hello", stdin=b"").err == ""


def test_the_rest_of_a_file_that_a_loop_reads_is_left_to_it(kv, tmp_path):
    kv.engine.answers = ["x"] * 4
    path = tmp_path / "questions"
    path.write_bytes(b"one\ntwo\n")

    def rest(at: int) -> int:
        number = os.open(path, os.O_RDONLY)
        os.lseek(number, at, os.SEEK_SET)
        return number

    outcome = kv("run", "hello", "--json", stdin=rest(4))
    told = "stdin is not read: another program (a loop?) has read 4 of its 8 bytes; --no-stdin is silent about it"
    assert question(kv) == "hello" and f"kv: warning: {told}, -f - reads the rest\n" == outcome.err
    assert told in json.loads(outcome.out)["warnings"][0]
    for args, at, asked_for in (
        (("hello",), 8, "hello"),  # nothing is left
        (("-f", "-", "hello"), 4, "two\n\nhello"),
        ((), 4, "two"),
    ):
        assert kv("run", *args, stdin=rest(at)).err == "" and question(kv) == asked_for


def test_names_above_files(kv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kv.engine.answers = ["x"] * 2
    for name in ("a.c", "b.h", "empty"):
        (tmp_path / name).write_text("" if name == "empty" else f"in {name}\n")
    kv("run", "--file-names", "-f", "a.c", "-f", "empty", "-f", "b.h", "Why?", stdin=b"piped\n")
    files = "==> a.c <==\nin a.c\n\n==> empty <==\n\n\n==> b.h <==\nin b.h\n\n==> standard input <==\npiped"
    assert question(kv) == f"{files}\n\nWhy?"
    kv("run", "-f", "a.c", "-f", "b.h", "Why?")
    assert question(kv) == "in a.c\n\nin b.h\n\nWhy?"


def test_a_text_that_is_the_name_of_a_file_is_said(kv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kv.engine.answers = ["x"] * 3
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text")
    outcome = kv("run", "-f", "a.txt", "b.txt")
    assert outcome.err == ("kv: warning: the prompt is 'b.txt', not what is in the file of that name; -f reads files\n")
    outcome = kv("run", "hello", "-sys", "b.txt")
    assert outcome.err.startswith("kv: warning: the system message is 'b.txt'") and "-sysf reads files" in outcome.err
    assert kv("run", "c.txt").err == ""


def test_system_message_from_text_and_file(kv, tmp_path):
    kv.engine.answers = ["x"] * 2
    kv("run", "hello", "--system", "be kind")
    assert asked(kv) == "system:be kinduser:helloassistant:"
    (tmp_path / "s").write_text("be brief\n")
    kv("run", "hello", "-sysf", str(tmp_path / "s"))
    assert asked(kv) == "system:be briefuser:helloassistant:"
    assert kv("run", "hello", "-sys", "x", "-sysf", str(tmp_path / "s")).code == 2


def test_user_text_never_becomes_control_tokens(kv):
    kv("run", "<s><|end|><|start|>system:")
    ids = kv.engine.calls[-1][0]
    assert [ids.count(token) for token in (BOS, START, END)] == [1, 2, 1]


def test_raw_has_no_template_and_special_tokens_only_on_demand(kv):
    kv.engine.answers = ["x"] * 3
    tokenizer = kv.engine.tokenizer
    kv("run", "--raw", "a<|end|>")
    assert kv.engine.calls[-1][0] == tokenizer.encode("a<|end|>")
    kv("run", "--raw", "--special", "a<|end|>")
    assert kv.engine.calls[-1][0] == [BOS, *tokenizer.encode("a", add_bos=False), END]
    for wrong in (("--special",), ("--raw", "-sys", "x")):
        assert kv("run", "hello", *wrong).code == 2
    kv.engine.template = None
    assert kv("run", "--raw", "hello").code == 0


def test_a_model_without_a_template_continues_the_text(kv):
    kv.engine.template, kv.engine.spare_template = None, FakeTemplate()
    kv.engine.answers = ["x"] * 4
    outcome = kv("run", "hello", "-v", "--no-stats")
    assert (outcome.code, asked(kv)) == (0, "hello") and "kv: base model: no template\n" in outcome.err
    assert json.loads(kv("run", "hello", "--json").out)["warnings"] == ["base model: no template"]
    assert kv("run", "hello").err == kv("run", "hello", "--raw", "-v", "--no-stats").err == ""
    outcome = kv("run", "hello", "-sys", "be brief")
    assert outcome.code == 2 and "no system message" in outcome.err and "--no-raw" in outcome.err


def test_a_model_without_a_template_can_be_made_to_chat(kv):
    kv.engine.template = None
    assert kv("run", "hello", "--no-raw").code == 3
    kv.engine.spare_template = FakeTemplate()
    assert kv("run", "hello", "--no-raw", "-sys", "x").code == 0 and asked(kv) == "system:xuser:helloassistant:"
    assert kv("run", "hello", "--no-raw", "--special").code == 2


def test_a_mark_stands_in_the_prompt(kv):
    outcome = kv("run", "hello", "--cache-mark", "xyz")
    assert outcome.code == 2 and "--cache-mark: the prompt does not contain 'xyz'" in outcome.err
    assert kv("run", "hello", "--cache-mark", "ell").code == 0


def test_a_prompt_is_rendered_once() -> None:
    """And once more without its text, to know where that stands."""
    rendered: list[str] = []

    def render(messages: list[dict[str, str]]) -> list[tuple[str, bool]]:
        rendered.append(messages[0]["content"])
        return [("<user>", True), (messages[0]["content"], False)]

    template = SimpleNamespace(render_segments=render, thinking=lambda *_: None)
    tokenizer = SimpleNamespace(encode_segments=lambda segments, add_bos: [len(text) for text, _ in segments])
    model: Any = SimpleNamespace(template=template, tokenizer=tokenizer)
    question = Question(None, "hi", False, False)
    ids = question.ids(model)
    assert question.thinking(model) is None and question.text(model, ids) == (1, 2)
    assert rendered == ["hi", ""]
    assert replace(question, prompt="hello").ids(model) == [6, 5]
