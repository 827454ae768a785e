"""The entry point: help, exit codes, errors as lines and as JSON, signals and broken streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PACKAGE_ROOT, Kv, KvHere

from kvcli import errors
from kvcli.cli import main

# A command that fails as its argument says. It takes the place of the real ones.
FAULTY = """
import errno, sys, time
import json as jsonlib
import typer
from kvcli import errors
from kvcli.cli import render
from kvcli.cli.invocation import Invocation, JsonFlag

def register(app):
    app.command("fail")(fail)

def fail(ctx: typer.Context, how: str, json: JsonFlag = False) -> None:
    "Fail."
    if how == "show":
        inv = ctx.obj
        told = [inv.verbose, inv.quiet, inv.color.value, inv.progress.value]
        render.write_out(jsonlib.dumps([*told, inv.offline, inv.json]))
    elif how == "wait":
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("tidying up", flush=True)
            sys.stdin.readline()
            print("cleaned", flush=True)
    elif how == "flood":
        try:
            while True:
                print("x" * 1000)
        finally:
            sys.stderr.write("cleaned\\n")
    elif how == "print":
        print("text")
    elif how == "warn":
        render.warn("lost", ctx.obj)
        print("text")
    elif how == "exit":
        raise typer.Exit(9)
    else:
        raise {
            "usage": errors.UsageError("wrong", "right"),
            "model": errors.ModelError("two\\nlines \\x1b[31mred", "and\\na hint"),
            "bug": ValueError("first\\nsecond"),
            "memory": MemoryError(),
            "abort": typer.Abort(),
            "disk": OSError(errno.ENOSPC, "No space left on device"),
            "file": FileNotFoundError(errno.ENOENT, "No such file", "name"),
        }[how]
"""


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Words that start `kv` with the command `fail` alone; the same holds for `kv_here`."""
    folder = tmp_path / "faulty"
    folder.mkdir()
    (folder / "faulty.py").write_text(FAULTY)
    code = (
        f"import sys; sys.path[:0] = [{str(PACKAGE_ROOT)!r}, {str(folder)!r}]\n"
        "import faulty; sys.modules['kvcli.cli.commands.faulty'] = faulty\n"
        "from kvcli import __main__; from kvcli.cli import main; main.COMMANDS = ('faulty', 'pull'); __main__.main()"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "faulty", raising=False)
    import faulty

    monkeypatch.setitem(sys.modules, "kvcli.cli.commands.faulty", faulty)
    monkeypatch.setattr(main, "COMMANDS", ("faulty", "pull"))
    return [sys.executable, "-c", code]


def test_version_imports_next_to_nothing() -> None:
    """What makes it quick; without `site`, whose hooks import as they like."""
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); sys.argv = ['kv', '--version']\n"
        "from kvcli.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: print(*sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"__main__", "kvcli"}
    slow = {"asyncio", "urllib.request", "email", "http", "ssl", "importlib.metadata", "multiprocessing"}
    assert not imported & slow, imported & slow


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), ("-h",)])
def test_help_is_plain_text_in_a_pipe(kv: Kv, arguments: tuple[str, ...]) -> None:
    result = kv(*arguments, env={"FORCE_COLOR": "1"})
    assert result.returncode == 0 and result.stderr == "" and result.stdout.isascii()
    for name in ("run", "chat", "pull", "models", "inspect", "tokenize"):
        assert f"\n  {name} " in result.stdout, name


@pytest.mark.slow
def test_kv_alone_is_help_on_stderr(kv: Kv) -> None:
    result = kv()
    assert result.returncode == 2 and result.stdout == "" and "Generate text\n  run " in result.stderr
    result = kv("models")
    assert result.returncode == 2 and result.stdout == "" and "verify" in result.stderr


@pytest.mark.parametrize(
    "how, code, message, hint",
    [
        ("usage", 2, "wrong", "right"),
        ("model", 3, "two lines \\x1b[31mred", "and a hint"),
        ("memory", 4, "out of memory", "use a smaller context (-c) or a smaller model"),
        ("abort", 1, "aborted", ""),
        ("bug", 1, "ValueError: first", "this is a bug; run with -vv for the traceback"),
    ],
)
def test_errors_as_a_line_and_as_json(
    how: str, code: int, message: str, hint: str, faulty: list[str], kv_here: KvHere
) -> None:
    told = f"kv: error: {message}\n" + (f"  {hint}\n" if hint else "")
    assert kv_here("fail", how) == (code, "", told)
    raw_message = "two\nlines \x1b[31mred" if how == "model" else message
    raw_hint = "and\na hint" if how == "model" else hint
    got, out, err = kv_here("fail", how, "--json")
    assert (got, err) == (code, "")
    assert json.loads(out) == {
        "kv_schema": 2,
        "error": {"code": code, "message": raw_message, "hint": raw_hint or None},
    }


def test_traceback_with_vv(faulty: list[str], kv_here: KvHere) -> None:
    for arguments in (
        ("-vv", "fail", "bug"),
        ("fail", "bug", "-v", "--verbose"),
        ("-v", "fail", "-v", "bug"),
    ):
        code, out, err = kv_here(*arguments)
        assert code == 1 and out == "" and "Traceback" in err and err.count("kv: error: ValueError: first") == 1
    assert "Traceback" not in kv_here("-v", "fail", "bug")[2]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("nonsense",), "no such command: kv nonsense"),
        (("fail", "--nonsense"), "no such option: --nonsense"),
        (("fail",), "HOW is missing"),
        (("--nonsense",), "no such option: --nonsense"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str, faulty: list[str], kv_here: KvHere) -> None:
    code, out, err = kv_here(*arguments)
    assert code == 2 and out == "" and err.startswith("kv: error: ") and message in err
    assert "--help" in err.splitlines()[1] and len(err.splitlines()) == 2
    code, out, err = kv_here(*arguments, "--json")
    assert code == 2 and err == "" and message in json.loads(out)["error"]["message"]


def test_the_exit_code_of_a_command(faulty: list[str], kv_here: KvHere) -> None:
    assert kv_here("fail", "exit") == (9, "", "")


def test_global_options_on_both_sides(faulty: list[str], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("KV_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    plain = [0, False, "auto", "auto", False, False]
    assert json.loads(kv_here("fail", "show")[1]) == plain
    options = ("-v", "-q", "--color", "never", "--progress", "off", "--offline")
    told = [1, True, "never", "off", True, False]
    assert json.loads(kv_here(*options, "fail", "show")[1]) == told
    assert json.loads(kv_here("fail", *options, "show")[1]) == told
    assert json.loads(kv_here("fail", "show", *options, "--json")[1]) == [*told[:5], True]
    assert json.loads(kv_here("-v", "--color", "always", "fail", "show", "-v")[1])[:3] == [2, False, "always"]


@pytest.mark.parametrize("name", ["KV_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_by_environment(name: str, faulty: list[str], kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(value: str) -> bool:
        monkeypatch.setenv(name, value)
        return bool(json.loads(kv_here("fail", "show")[1])[4])

    assert offline("1") and offline("yes") and not offline("0") and not offline("")
    if name == "KV_OFFLINE":
        monkeypatch.setenv(name, "please")
        assert kv_here("fail", "show")[2] == "kv: error: KV_OFFLINE must be 1 or 0, not 'please'\n"
    else:  # the hub's library has a rule of its own
        assert not offline("please")


def test_every_error_has_its_exit_code() -> None:
    kinds = [kind for kind in errors.KVError.__subclasses__() if kind.__module__ == errors.__name__]
    codes = {kind.__name__: kind.exit_code for kind in kinds}
    assert codes == {
        "UsageError": 2,
        "ModelError": 3,
        "DeviceError": 3,
        "DoesNotFit": 4,
        "ContextOverflow": 5,
        "CacheFileError": 6,
        "DownloadError": 7,
        "CheckFailed": 8,
        "InputBytesError": 65,
        "OutputError": 74,
    }


# --- signals and streams ---


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals_clean_up_and_say_nothing(number: signal.Signals, code: int, faulty: list[str]) -> None:
    """A second one at once does not disturb what the first one began."""
    ignored = signal.getsignal(number) is signal.SIG_IGN  # as under nohup; kv would leave it so
    if ignored:
        signal.signal(number, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen([*faulty, "fail", "wait"], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        if ignored:
            signal.signal(number, signal.SIG_IGN)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        assert process.stdout.readline() == b"tidying up\n"
        process.send_signal(number)
        process.stdin.close()
        assert process.wait(20) == 128 - code, "by the signal itself: a shell's loop ends, too, and shows the code"
        assert process.stdout.read() == b"cleaned\n" and process.stderr.read() == b""


@pytest.mark.parametrize("module", ["kvcli.cli.main", "kvcli.cli.interrupt", "typer", "kvcli.cli.commands.models"])
def test_interrupt_while_importing(module: str) -> None:
    """Ctrl-C while `kv` imports its parts: no traceback, an end by the signal."""
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(PACKAGE_ROOT)!r})
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from kvcli.__main__ import main
sys.argv = ["kv", "models", "ls"]
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


def test_interrupts_while_python_shuts_down() -> None:
    """After a signal Python does not shut down at all; after anything else an interrupt is silent."""
    code = f"""
import atexit, os, signal, sys
sys.path.insert(0, {str(PACKAGE_ROOT)!r})
from kvcli.__main__ import main
from kvcli.cli import main as cli
def call(args, invocation, interrupts):
    atexit.register(lambda: (print("shutting down", flush=True), os.kill(os.getpid(), signal.SIGINT)))
    interrupts.stage = "unwind"
    sys.stdout.write("done ")
    if args == ["interrupted"]:
        os.kill(os.getpid(), signal.SIGINT)
    return 0
cli._call = call
main()
"""
    for word, told in (("interrupted", "done "), ("whole", "done shutting down\n")):
        result = subprocess.run([sys.executable, "-c", code, word], capture_output=True, text=True)
        assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, told, "")


def test_reader_that_goes_away(faulty: list[str]) -> None:
    with subprocess.Popen([*faulty, "fail", "flood"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith(b"xxx")
        process.stdout.close()
        assert process.wait(20) == -signal.SIGPIPE
        assert process.stderr.read() == b"cleaned\n"


def test_broken_pipe_is_141_in_a_shell(faulty: list[str]) -> None:
    for arguments in (["fail", "flood"], ["--help"]):
        script = 'sleep 1 | "$@" 2>/dev/null | true; echo "${PIPESTATUS[1]}"'
        if arguments == ["--help"]:  # short enough to be written before the reader is gone, so wait for that
            script = 'exec 3> >(exec <&-); sleep 0.5; "$@" >&3; echo $?'
        result = subprocess.run(
            ["bash", "-c", script, "bash", *faulty, *arguments], capture_output=True, text=True, timeout=60
        )
        assert result.stdout == "141\n", result
        assert "Traceback" not in result.stderr and "Exception" not in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("fail", "print"), ("--version",), ("--help",), ("fail", "show")])
def test_full_disk(arguments: tuple[str, ...], faulty: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*faulty, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 74
    assert result.stderr == "kv: error: could not write the output: No space left on device\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("fail", "model", "--json"), ("fail", "--nonsense", "--json")])
def test_full_disk_under_an_error_as_json(arguments: tuple[str, ...], faulty: list[str]) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*faulty, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 74
    assert result.stderr == "kv: error: could not write the output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments, code, out",
    [
        (("fail", "warn"), 0, "text\n"),
        (("fail", "model"), 3, ""),
        (("-vv", "fail", "model"), 3, ""),
        (("fail", "model", "--json"), 3, '{"kv_schema": 2, "error": '),
        ((), 2, ""),
    ],
)
def test_full_disk_under_stderr_costs_nothing_else(
    arguments: tuple[str, ...], code: int, out: str, faulty: list[str]
) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run([*faulty, *arguments], stdout=subprocess.PIPE, stderr=full, text=True)
    assert result.returncode == code
    assert result.stdout.startswith(out) and bool(result.stdout) is bool(out)


def test_a_full_disk_elsewhere_is_not_the_outputs_fault(faulty: list[str], kv_here: KvHere) -> None:
    assert kv_here("fail", "file")[0] == 1
    assert kv_here("fail", "file")[2].startswith("kv: error: FileNotFoundError: [Errno 2] No such file: 'name'")


@pytest.mark.slow
def test_closed_streams(faulty: list[str]) -> None:
    command = '"$@" >&-'
    result = subprocess.run(
        ["bash", "-c", command, "bash", *faulty, "fail", "print"], stderr=subprocess.PIPE, text=True
    )
    assert result.returncode == 74 and result.stderr.startswith("kv: error: standard output is closed\n")
    for closing in ("<&-", "2>&-"):
        result = subprocess.run(
            ["bash", "-c", f'"$@" {closing}', "bash", *faulty, "fail", "print"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert (result.returncode, result.stdout) == (0, "text\n")
    result = subprocess.run(["bash", "-c", '"$@" 2>&-', "bash", *faulty, "fail", "usage"], text=True)
    assert result.returncode == 2
