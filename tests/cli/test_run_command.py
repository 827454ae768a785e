"""`kv run` with an engine that has no weights; with the real model: test_run_real.py."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys

import pytest
from calling import Caller
from fakes import BOS, END, START, FakeEngine, FakeTemplate

from kvcli.cli import inputs, render
from kvcli.cli.interrupt import AT_ONCE
from kvcli.errors import ModelError


@pytest.fixture
def kv(monkeypatch, capfdbinary):
    caller = Caller(monkeypatch, capfdbinary)
    caller.engine = FakeEngine(["an answer"])
    return caller


def asked(kv: Caller) -> str:
    """The text of the prompt that the engine got."""
    return kv.engine.tokenizer.decode(kv.engine.calls[-1][0])


def question(kv: Caller) -> str:
    """The user's message in it."""
    return asked(kv).removeprefix("user:").removesuffix("assistant:")


# --- what comes out


def test_the_answer_alone_is_on_stdout_and_nothing_on_stderr(kv):
    outcome = kv("run", "hello")
    assert (outcome.code, outcome.out, outcome.err) == (0, "an answer\n", "")


@pytest.mark.parametrize(
    ("answer", "args", "out"),
    [
        ("text\n", (), "text\n"),
        ("text", ("--no-newline",), "text"),
        ("", (), "\n"),
        ("[bold]x[/bold] :smile: é 🙂", (), "[bold]x[/bold] :smile: é 🙂\n"),
        ("\x1b[2Jx\r\n", (), "\x1b[2Jx\r\n"),
    ],
)
def test_text_passes_unchanged_and_ends_with_one_newline(kv, answer, args, out):
    kv.engine.answers = [answer]
    assert kv("run", "hello", *args).out == out


def test_json_is_one_object(kv):
    kv.engine.answers = ["é\x1b"]
    outcome = kv("run", "hello", "--json", "--seed", "7", "--logit-bias", "40-inf")
    assert (outcome.code, outcome.err) == (0, "")
    value = json.loads(outcome.out)
    assert outcome.out.endswith("}\n") and outcome.out.count("\n") == 1
    assert "é" in outcome.out
    assert value["text"] == "é\x1b"
    assert value["finish_reason"] == "stop"
    prompt = len(kv.engine.calls[0][0])
    assert value["usage"] == {
        "prompt_tokens": prompt,
        "cache_read_tokens": 0,
        "cache_disk_tokens": 0,
        "cache_write_tokens": 0,
        "cache_miss": None,
        "completion_tokens": 2,
        "reasoning_tokens": 0,
    }
    assert value["kv"]["type_k"] == "f32" and value["kv"]["page_size"] == 64
    assert value["kv"]["tokens"] == prompt + 2
    assert value["kv"]["page_utilization"] == round((prompt + 2) / 64, 6)
    assert value["kv"]["contiguous_bytes"] == 4096 << 14
    assert value["sampling"]["seed"] == 7
    assert value["sampling"]["temperature"] == 0.8
    assert value["sampling"]["logit_bias"] == {"40": "-inf"}
    assert value["memory"]["peak_bytes"] > 1 << 20
    assert set(value) == {
        *("kv_schema", "model", "text", "reasoning", "finish_reason", "stop", "repetition", "usage"),
        *("timings", "kv", "evict", "memory", "sampling", "params", "warnings", "prompt_cut", "prompt_evicted_tokens"),
    }


def test_jsonl_is_one_event_a_line(kv):
    outcome = kv("run", "hello", "--jsonl")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    assert [event["event"] for event in events][:3] == ["start", "progress", "token"]
    assert events[-1]["event"] == "end"
    texts = [event["text"] for event in events if event["event"] == "token"]
    assert "".join(texts) == "an answer" == events[-1]["text"]
    assert len(texts) == 9 and {event["sample"] for event in events} == {0}


def test_errors_are_json_where_json_was_asked_for(kv):
    outcome = kv("run", "hello", "--json", "-c", "abc")
    assert outcome.code == 2
    error = json.loads(outcome.out)["error"]
    assert error["code"] == 2
    assert "abc" in error["message"]


def test_stats_are_one_line_on_stderr(kv):
    outcome = kv("run", "hello", "--stats", "-s", "5")
    assert outcome.out == "an answer\n"
    line = outcome.err
    assert line.startswith("kv: reused 0 of ") and line.count("\n") == 1
    for part in (
        "prefilled 24 · 0.50 s · 48 tok/s",
        "gen 9 tok",
        "TTFT 0.60 s",
        "load 0.25 s",
        "KV f32 33/4,096",
        "peak ",
        "seed 5",
    ):
        assert part in line


def test_output_file_holds_the_same_bytes(kv, tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o640)
    assert kv("run", "hello", "-o", str(path)).out == path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_output_file_is_refused_before_the_model_is_loaded(kv, tmp_path):
    for name in (tmp_path, tmp_path / "missing" / "file"):
        assert kv("run", "hello", "-o", str(name)).code == 74
    assert kv.opened == []


# --- what goes in


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


# --- how it ends


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
    kv.engine.before_token = twice
    outcome = kv("run", "hello", "-o", str(path))
    assert (outcome.code, path.read_text()) == (130, "an ")
    assert outcome.err == f"kv: {path} holds the answer so far\n"


def test_a_second_signal_in_json_has_the_text_so_far(kv, monkeypatch):
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", sys.exit)
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
