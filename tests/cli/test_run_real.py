"""`kv run` and `kv chat` on the real model: answers, and as processes with pipes, signals and terminals."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calling import Runner

from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.models

LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 700  # some 7,000 tokens
GREEDY = ("--temp", "0")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|[\r\x08]")


@pytest.fixture
def model(smollm2_path: Path) -> tuple[str, str]:
    return "-m", str(smollm2_path)


@pytest.fixture
def here(monkeypatch, capfdbinary, kv_env) -> Runner:
    """`kv` in this process, where no other one is needed."""
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, kv_env[name])
    return Runner(monkeypatch, capfdbinary)


@pytest.fixture
def start(kv_command, kv_env, model):
    """Start `kv COMMAND -m MODEL ...`; whatever is still running after the test is killed."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(command: str, *args: str, **options: object) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        settings = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "env": kv_env} | options
        process = subprocess.Popen([*kv_command, command, *model, *args], **settings)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr, process.stdin):
            if stream is not None:
                stream.close()


def finish(process: subprocess.Popen[bytes], within_s: float = 60) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out.decode(), err.decode()


def test_text_alone_and_the_same_each_time(kv, here, model):
    first = kv("run", *model, *GREEDY, "-n", "12", input="Why is the sky blue?\n")
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.endswith("\n") and len(first.stdout) > 20
    assert here("run", *model, *GREEDY, "-n", "12", "Why is the sky blue?").out == first.stdout


def test_json_and_stop_string(here, model):
    whole = json.loads(here("run", *model, *GREEDY, "-n", "24", "--json", "Why is the sky blue?").out)
    assert whole["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 24
    usage = whole["usage"]
    assert usage["prompt_tokens"] > 20 and usage["cache_write_tokens"] == 0
    assert whole["kv"]["tokens"] == usage["prompt_tokens"] + 23
    assert whole["kv"]["bytes"] >= whole["kv"]["pages"] * 64
    text = whole["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 9]  # begins and ends inside tokens
    stopped = json.loads(here("run", *model, *GREEDY, "-n", "24", "--json", "-r", stop, "Why is the sky blue?").out)
    assert (stopped["finish_reason"], stopped["stop"]) == ("stop", stop)
    assert stopped["text"] == text[: text.index(stop)]
    plain = here("run", *model, *GREEDY, "-n", "24", "--no-newline", "-r", stop, "Why is the sky blue?")
    assert plain.out == stopped["text"]


def test_incomplete_characters_are_replaced_and_none_ends_an_answer(here, model):
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(Path(model[1])).metadata)
    lead = tokenizer.encode("🙂")[0]
    assert tokenizer.decode_bytes([lead]) == b"\xf0\x9f"
    outcome = here("run", *model, *GREEDY, "-n", "3", "--logit-bias", f"{lead}+1000", "--json", "x")
    text = json.loads(outcome.out)["text"]
    assert text == "\ufffd\ufffd"  # the third could have become a character


def test_a_full_context_is_exit_9(here, model):
    outcome = here("run", *model, *GREEDY, "-c", "48", "--ignore-eos", "Why is the sky blue?")
    assert outcome.code == 9
    assert outcome.err == "kv: stop: context full (48/48)\n"
    assert len(outcome.out) > 5


def test_head_ends_it_with_141_and_no_message(kv_command, kv_env, model):
    words = [
        *kv_command,
        "run",
        *model,
        *GREEDY,
        "--ignore-eos",
        "-n",
        "4000",
        "List ten animals, one a line.",
    ]
    script = '"$@" | head -1; echo "${PIPESTATUS[0]}"'
    outcome = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        env=kv_env,
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
    assert outcome.stderr == ""
    assert outcome.stdout.splitlines()[-1] == "141"
    assert len(outcome.stdout.splitlines()) == 2


def test_a_full_disk_is_exit_74(kv, model):
    with open("/dev/full", "w") as full:
        outcome = kv("run", *model, "-n", "4", "hi", capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert outcome.returncode == 74
    assert outcome.stderr.startswith("kv: error: ") and "No space left" in outcome.stderr


def test_a_table_in_a_pipe_leaves_stderr_empty(kv, here, model, tmp_path):
    (tmp_path / "text").write_text("The quick brown fox jumps over the lazy dog. " * 20)
    words = ("perplexity", *model, "-f", str(tmp_path / "text"), "-c", "64", "--chunks", "1", "-ct", "int8")
    words += ("--page-size", "16")
    outcome = kv(*words)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert outcome.stdout.startswith("type ")
    assert "31 tokens scored" in here(*words, "-v").err


# --- signals


@pytest.mark.parametrize("mapped", [pytest.param("libtorch_cpu", marks=pytest.mark.thorough), "smollm2"])
def test_ctrl_c_while_importing_or_loading(start, tmp_path, mapped):
    (tmp_path / "long").write_text(LONG_PROMPT)
    process = start("run", "-f", str(tmp_path / "long"))
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not tell what a process has mapped")
    while mapped not in maps.read_text():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finish(process) == (-signal.SIGINT, "", "")


def test_ctrl_c_while_waiting_for_stdin(start):
    process = start("run", "hello", stdin=subprocess.PIPE)
    assert process.stderr.readline() == b"kv: waiting for stdin (use --no-stdin)\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert process.stdout.read() == process.stderr.read() == b""


def test_ctrl_c_while_prefilling(start, tmp_path):
    (tmp_path / "long").write_text(LONG_PROMPT)
    process = start("run", "--jsonl", "-f", str(tmp_path / "long"))
    for line in process.stdout:
        if json.loads(line)["event"] == "progress":
            break
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert (code, err) == (-signal.SIGINT, "")
    assert json.loads(out.splitlines()[-1])["error"]["code"] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_signal_while_answering(start, number):
    process = start("run", "--ignore-eos", "--no-loop-stop", "-n", "8000", "Tell me a story.")
    first = os.read(process.stdout.fileno(), 100)
    assert first
    process.send_signal(number)
    result, out, err = finish(process)
    assert (result, err) == (-number, "")
    assert (first.decode() + out).endswith("\n") and len(out) < 8000, "it did not wait for all the tokens"


# --- chat


def test_turns_reuse_the_cache(here, model):
    script = "My name is Ann. Say hello.\nWhat is my name?\n/undo\nWhat is my name?\n"
    outcome = here("chat", *model, "--script", *GREEDY, "-n", "12", "--stats", stdin=script.encode())
    assert outcome.code == 0
    answers = outcome.out.splitlines()
    assert answers[-1] == answers[-2]  # as if never undone
    counts = [
        tuple(map(int, found))
        for found in re.findall(r"reused (\d+) of (\d+) prompt tokens(?: \(memory\))?, prefilled (\d+)", outcome.err)
    ]
    assert len(counts) == 3
    (none, first, all_of_it), (reused, total, prefilled), again = counts
    assert (none, all_of_it) == (0, first)
    assert reused >= first + 11  # the first prompt and its answer
    assert prefilled == total - reused < 25
    assert again[1] == total and again[0] == total - 1  # what was undone stays in memory


def test_no_terminal_and_no_script_is_exit_2(kv, model):
    for options in ({"input": "hi\n"}, {"stdin": subprocess.DEVNULL}):
        outcome = kv("chat", *model, **options)
        assert (outcome.returncode, outcome.stdout) == (2, "")
        assert "--script" in outcome.stderr


@contextmanager
def terminal(start, *args: str) -> Iterator[Terminal]:
    """`kv chat` on a new pseudo-terminal."""
    primary, secondary = pty.openpty()
    own = {
        "start_new_session": True,
        "preexec_fn": lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    }  # for Ctrl-C
    process = start("chat", *args, stdin=secondary, stdout=secondary, stderr=secondary, **own)
    os.close(secondary)
    try:
        yield Terminal(primary, process)
    finally:
        os.close(primary)


class Terminal:
    """What a person at a terminal does: type, wait for something to appear."""

    def __init__(self, primary: int, process: subprocess.Popen[bytes]) -> None:
        self.primary, self.process, self.screen = primary, process, ""

    def type(self, text: str) -> None:
        os.write(self.primary, text.encode())

    def wait_for(self, pattern: str, within_s: float = 30) -> str:
        """Read until the pattern appears behind what was waited for before; the text up to it."""
        deadline = time.monotonic() + within_s
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.screen!r}"
            if select.select([self.primary], [], [], 0.1)[0]:
                try:
                    self.screen += ESCAPES.sub("", os.read(self.primary, 1 << 16).decode("utf-8", "replace"))
                except OSError:  # the other side is closed
                    raise AssertionError(f"ended without {pattern!r}: {self.screen!r}") from None
        seen, self.screen = self.screen[: found.end()], self.screen[found.end() :]
        return seen


def test_a_session_at_a_terminal(start, kv_env):
    kv_env |= {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with terminal(start, *GREEDY, "--ignore-eos", "-n", "2000") as screen:
        screen.wait_for("/help lists commands\n>")
        screen.type("Tell me a long story.\r")
        screen.wait_for(r"story\.[^>]*\w+ \w+ \w+")
        screen.type("\x03")
        screen.wait_for("prompt .* interrupted\n>")
        screen.type("/regen\r")
        screen.wait_for(r"/regen[^>]*\w+ \w+")
        screen.type("\x03")
        screen.wait_for(r"\([1-9]\d* reused\) .* interrupted\n>")
        screen.type("\x03")
        screen.wait_for("Ctrl-D to exit\n>")
        screen.type("\x04")
        assert screen.process.wait(timeout=20) == 0
    history = Path(kv_env["XDG_STATE_HOME"]) / "kv" / "history"
    assert [json.loads(line) for line in history.read_text().splitlines()] == [
        "Tell me a long story.",
        "/regen",
    ]
