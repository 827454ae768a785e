"""A command that is done by a process that keeps the model is what it would be without."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import KvHere
from staying import Staying, children, is_alive, until

pytestmark = pytest.mark.slow
MODEL = tiny.path_of("gemma3")  # of which kv has a chat template
RUN = ("run", "-m", str(MODEL), "--raw", "--no-cache", "-s", "7")
LONG = (*RUN, "--jsonl", "--ignore-eos", "-n", "300", "Pack my box")


@pytest.fixture(autouse=True, scope="module")
def model() -> None:
    assert tiny.make("gemma3").path == MODEL


@pytest.fixture(scope="module")
def staying(kv_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staying]:
    made = Staying(kv_command, _plain(dict(os.environ)), tmp_path_factory.mktemp("staying"))
    made.keep(MODEL)
    yield made
    made.end()


def _plain(environment: dict[str, str]) -> dict[str, str]:
    return {n: v for n, v in environment.items() if n == "KV_CPU_ISA" or not n.startswith(("KV_", "NO_COLOR"))}


@pytest.fixture
def warm(staying: Staying) -> Iterator[Staying]:
    """Whose commands are all done by the process that keeps the model."""
    before, began = staying.about["answered"], _Count(staying)
    yield began  # type: ignore[misc]
    assert began.count > 0
    until(lambda: staying.about["answered"] == before + began.count)


class _Count:
    """Counts the commands that are started."""

    def __init__(self, staying: Staying) -> None:
        self._staying, self.count = staying, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._staying, name)

    def start(self, *args: str, **options: Any) -> subprocess.Popen[bytes]:
        self.count += 1
        return self._staying.start(*args, **options)

    def run(self, *args: str, **options: Any) -> tuple[int, bytes, bytes]:
        self.count += 1
        return self._staying.run(*args, **options)


@pytest.fixture
def cold(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvHere]:
    """Runs `kv` without such a process, in this one."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield kv_here


CALLS = {
    "text": (*RUN, "-n", "20", "the pages of the cache"),
    "sampled": (*RUN, "-n", "20", "--temp", "1.5", "the pages"),
    "json": (*RUN, "-n", "5", "--json", "--logprobs", "2", "hello"),
    "other context": (*RUN, "-n", "5", "-c", "96", "-ct", "int8", "--evict", "sink", "hello"),
    "samples": (*RUN, "-n", "5", "--n-samples", "2", "--json", "hello"),
    "threads": (*RUN, "-n", "5", "-t", "1", "hello"),
    "no such option": (*RUN, "--tempo", "1", "hello"),
    "no such value": (*RUN, "-c", "x", "hello"),
    "no prompt": (*RUN,),
    "context full": (*RUN, "-c", "64", "-n", "100", "--ignore-eos", "hello"),
    "too long": (*RUN, "-c", "64", "hello " * 200),
    "no such file": (*RUN, "-f", "nowhere.txt", "hello"),
    "error as json": (*RUN, "-f", "nowhere.txt", "--json", "hello"),
    "verbose": (*RUN, "-n", "2", "-v", "hello"),
}
MEASURED = re.compile(rb'"\w+_(s|tps|bytes)": [\d.e+-]+|[\d.,]+ (s|ms|tok/s|MiB|GiB|KiB|B)\b')


@pytest.mark.parametrize("name", CALLS)
def test_bytes_and_exit_codes_are_the_same(name: str, warm: Staying, cold: KvHere) -> None:
    code, out, err = cold(*CALLS[name])
    found = warm.run(*CALLS[name])
    told = MEASURED.sub(b"#", found[2]), MEASURED.sub(b"#", err.encode())
    assert found[0] == code and told[0] == told[1], err
    assert MEASURED.sub(b"#", found[1]) == MEASURED.sub(b"#", out.encode())


def test_standard_input(warm: Staying) -> None:
    typed = warm.run(*RUN, "-n", "8", "hello\n\nworld")
    assert typed[0] == 0 and typed[1]
    assert warm.run(*RUN, "-n", "8", "world", stdin=b"hello\n")[1] == typed[1]
    assert warm.run(*RUN, "-n", "8", stdin=b"\xff\xfe")[0] == 65
    script = ("chat", "--script", "-m", str(MODEL), "--no-raw", "-n", "3", "-s", "7")
    code, out, err = warm.run(*script, stdin=b"hello\nworld\n")
    assert (code, len(out.splitlines()) >= 2) == (0, True), err


def test_files_folder_and_environment(warm: Staying, tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("hello")
    plain = warm.run(*RUN, "-n", "4", "hello")[1]
    umask = {"cwd": tmp_path, "umask": 0o027}
    assert warm.run(*RUN, "-n", "4", "-f", "here.txt", "-o", "out.txt", **umask)[1] == plain
    assert (tmp_path / "out.txt").read_bytes() == plain
    assert (tmp_path / "out.txt").stat().st_mode & 0o777 == 0o640
    with open(tmp_path / "here.txt", "rb") as file:
        number = file.fileno()
        assert warm.run(*RUN, "-n", "4", "-f", f"/dev/fd/{number}", pass_fds=[number])[1] == plain
    told = json.loads(warm.run(*RUN, "--json", "hello", env={"KV_PREDICT": "2"})[1])
    assert told["usage"]["completion_tokens"] == 2
    code, _, err = warm.run(*RUN, "-n", "4", "hello", env={"KV_PREDICT": "x"})
    assert code == 0, err  # what was typed stands above it


def _narrow(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """One whose answer does not fit into the pipe: it is not at its end before that is read."""
    assert process.stdout
    fcntl.fcntl(process.stdout, 1031, 4096)  # F_SETPIPE_SZ
    return process


def _child_of(staying: Staying) -> int:
    """The process that does the command which is on."""
    return children(staying.about["pid"])[0]


def test_ctrl_c_ends_the_command_alone(warm: Staying) -> None:
    process = _narrow(warm.start(*LONG))
    assert process.stdout
    while b'"token"' not in process.stdout.readline():
        pass  # from the first token on an answer is ended, not the process
    process.send_signal(signal.SIGINT)
    lines = process.stdout.read().splitlines()
    assert process.wait(60) == -signal.SIGINT
    end = json.loads(lines[-1])
    assert end["finish_reason"] == "interrupted" and 0 < end["usage"]["completion_tokens"] < 300
    waiting = warm.start(*RUN, stdin=subprocess.PIPE)
    until(lambda: warm.about["commands"] == 1)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(60) == -signal.SIGTERM


def test_a_reader_that_goes_away(warm: Staying) -> None:
    process = _narrow(warm.start(*LONG))
    assert process.stdout and process.stdout.read(1) == b"{"
    process.stdout.close()
    assert process.wait(60) == -signal.SIGPIPE


def test_a_caller_that_is_killed_takes_its_command_along(warm: Staying) -> None:
    process = _narrow(warm.start(*LONG))
    assert process.stdout and process.stdout.readline()
    child = _child_of(warm)
    process.kill()
    until(lambda: not is_alive(child))


def test_a_command_that_is_killed(warm: Staying) -> None:
    process = _narrow(warm.start(*LONG))
    assert process.stdout and process.stdout.readline()
    os.kill(_child_of(warm), signal.SIGKILL)
    process.stdout.read()
    assert process.wait(60) == -signal.SIGKILL


def test_several_at_once(warm: Staying) -> None:
    prompts = ["the pages", "of the cache", "hello world", "Pack my box"] * 2
    alone = {each: warm.run(*RUN, "-n", "30", each)[1] for each in prompts[:4]}
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: warm.run(*RUN, "-n", "30", each), prompts))
    assert [out for _, out, _ in found] == [alone[each] for each in prompts]


def test_a_caller_is_small(warm: Staying) -> None:
    process = _narrow(warm.start(*LONG))
    assert process.stdout and process.stdout.readline()
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) < 60 << 10
    assert process.stdout.read() and process.wait(60) == 0


def test_a_terminal(warm: Staying) -> None:
    """The command sees that it writes to one; Ctrl-C typed there reaches it."""
    ours, theirs = pty.openpty()

    def lead() -> None:
        os.setsid()
        fcntl.ioctl(0, 0x540E, 0)  # TIOCSCTTY: the terminal of the new session

    words = (*RUN, "-n", "400", "--ignore-eos", "hello")
    process = warm.start(*words, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lead)
    os.close(theirs)
    assert os.read(ours, 1)
    os.write(ours, b"\x03")
    written = b""
    with pytest.raises(OSError):  # how a terminal ends that nobody has
        while True:
            written += os.read(ours, 4096)
    assert process.wait(60) == -signal.SIGINT and b"tok/s" in written, written
    os.close(ours)


def test_nothing_of_the_caller_is_held(staying: Staying) -> None:
    """The process has no terminal, no pipe and no folder of whoever started it. It has a pipe of the one that it forked
    ahead."""
    pid = staying.about["pid"]
    spare = until(lambda: children(pid))[0]
    held, theirs = (
        {os.readlink(f"/proc/{each}/fd/{n}") for n in os.listdir(f"/proc/{each}/fd")} for each in (pid, spare)
    )
    assert len([each for each in theirs if each.startswith("pipe:")]) == 1
    held -= {each for each in theirs if each.startswith("pipe:")}
    log = str(staying.folder / "state/kv/keep-alive.log")
    assert not [each for each in held if each.startswith(("pipe:", "/dev/pts"))] and {log, "/dev/null"} <= held
    assert os.readlink(f"/proc/{pid}/cwd") == "/" and os.getsid(pid) == pid
    assert re.search(r"^Threads:\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)


def test_another_model_is_not_taken_for_this_one(staying: Staying, cold: KvHere, tmp_path: Path) -> None:
    other = ("run", "-m", str(tiny.make("qwen2").path), "--raw", "--no-cache", "-n", "8", "-s", "7", "hello")
    assert staying.run(*other)[1] == cold(*other)[1].encode()


@pytest.mark.parametrize(
    "how", [("--keep-alive", "0"), pytest.param(("--verify-estimate",), marks=pytest.mark.thorough)]
)
def test_what_a_command_can_only_do_alone(how: tuple[str, ...], staying: Staying, cold: KvHere) -> None:
    before = staying.about["answered"]
    assert staying.run(*RUN, "-n", "2", *how, "hello")[1] == cold(*RUN, "-n", "2", "hello")[1].encode()
    assert staying.about["answered"] == before


def _few_descriptors() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_caller_that_may_have_few_descriptors(warm: Staying) -> None:
    code, out, err = warm.run(*RUN, "-n", "4", "hello", preexec_fn=_few_descriptors)
    assert (code, err) == (0, b"") and out


def test_descriptors_with_high_numbers(staying: Staying, cold: KvHere) -> None:
    before, null = staying.about["answered"], os.open(os.devnull, os.O_RDONLY)
    high = [fcntl.fcntl(null, fcntl.F_DUPFD, number) for number in (512, 517)]
    code, out, _ = staying.run(*RUN, "-n", "4", "hello", pass_fds=high)
    for each in (null, *high):
        os.close(each)
    assert (code, out) == (0, cold(*RUN, "-n", "4", "hello")[1].encode())
    assert staying.about["answered"] == before


# The last ones: they end the process.


def test_a_command_outlives_the_process_that_keeps_the_model(staying: Staying, cold: KvHere) -> None:
    process = _narrow(staying.start(*LONG))
    assert process.stdout
    first = process.stdout.readline()
    os.kill(staying.about["pid"], signal.SIGKILL)
    lines = [first, *process.stdout]
    assert process.wait(60) == 0
    assert len(lines) == len(cold(*LONG)[1].splitlines())
    assert staying.processes() == []
    code, out, _ = staying.run(*RUN, "-n", "4", "hello")  # the socket is there still
    assert code == 0 and out


def test_it_leaves_when_it_is_idle_or_told_to(staying: Staying) -> None:
    pid = staying.keep(MODEL, "10m")
    assert staying.run("stop", "no-such-model")[0] == 3
    assert staying.run(*RUN, "-n", "1", "--keep-alive", "1s", "hello")[0] == 0
    until(lambda: not is_alive(pid))
    assert list(staying.places.iterdir()) == []


@pytest.mark.thorough
def test_a_process_is_known_while_it_starts_and_when_it_is_stopped(
    kv_command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The door is there before the model is; who has stopped the process sees it, and can end it."""
    made = Staying(kv_command, _plain(dict(os.environ)), tmp_path)
    run = ("run", "-m", str(MODEL), "--raw", "-n", "1", "--no-cache", "a")
    assert made.run(*run, "--keep-alive", "10m")[0] == 0
    first = until(made.processes)[0]
    assert first["state"] in ("starting", "ready") and made.run(*run)[0] == 0  # by itself, or kept
    assert until(lambda: [each for each in made.processes() if each["state"] == "ready"])[0]["pid"] == first["pid"]
    os.kill(first["pid"], signal.SIGSTOP)
    assert made.about["state"] == "not answering" and "not answering" in made.run("ps")[1].decode()
    assert made.run("stop")[0] == 0 and not is_alive(first["pid"]) and made.processes() == []
    assert made.run(*run, "--keep-alive", "1d")[0] == 0
    second = until(made.processes)[0]
    assert made.run("stop", "--all")[0] == 0
    until(lambda: not is_alive(second["pid"]) and not made.processes())
    assert made.run(*run, "--keep-alive", "1d")[0] == 0
    third = until(made.processes)[0]
    os.kill(third["pid"], signal.SIGTERM)  # it obeys at any time
    until(lambda: not is_alive(third["pid"]) and not made.processes())
