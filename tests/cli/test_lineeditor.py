"""The prompt of `kv chat`: keys, triple quotes, history."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import stat
import sys
import tempfile
import threading
import time

import pytest
from conftest import PACKAGE_ROOT
from prompt_toolkit.application import create_app_session
from prompt_toolkit.history import InMemoryHistory
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from kvcli.cli.commands.chat import lineeditor
from kvcli.cli.commands.chat.lineeditor import (
    CommandCompleter,
    FileHistory,
    LineEditor,
    continuation,
    open_history,
)


def typed(*keys: str, history=None, early: str = "") -> list[str]:
    """The messages that these keys send before Ctrl-D; a pause between the arguments. `early`: see `LineEditor`."""
    messages = []
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        words = {"/set": ["temperature", "top_k"], "/file": None}
        completer = CommandCompleter(["/help", "/set", "/file"], lambda command: words.get(command, ()))
        editor = LineEditor(history or InMemoryHistory(), completer, early=early)

        def type_all() -> None:
            for part in (*keys, "\x04"):
                pipe.send_text(part)
                time.sleep(0.15 if keys[1:] else 0)

        thread = threading.Thread(target=type_all)
        thread.start()
        try:
            while True:
                try:
                    messages.append(editor.read())
                except KeyboardInterrupt:
                    messages.append(f"interrupted {editor.interrupted_text!r}")
        except EOFError:
            return messages
        finally:
            thread.join()


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        ("one\rtwo\r", ["one", "two"]),
        ("one\x1b\rtwo\r", ["one\ntwo"]),
        ("one\ntwo\r", ["one\ntwo"]),
        ("one\\\rtwo\r", ["one\ntwo"]),
        ('"""one\rtwo\r\rthree"""\r', ["one\ntwo\n\nthree"]),
        ("\x1b[200~one\ntwo\x1b[201~\r", ["one\ntwo"]),
        ("half\x03one\r", ["interrupted 'half'", "one"]),
        ("\x03", ["interrupted ''"]),
        ("\r", [""]),
        ("é🙂\r", ["é🙂"]),
    ],
)
def test_keys(keys, messages):
    assert typed(keys) == messages


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("\r", "go on"),
        ("/ctx 600\r", "/ctx 600"),
        ("\x1b[200~other\rtext\x1b[201~\r", "other\ntext"),
        ("\x7fx\r", "x"),
        ("\x1b[3~x\r", "x"),
        ("\x05!\r", "go on!"),
        ("\x1b[C!\r", "go on!"),
        ("\x01I \r", "I go on"),
        ("\x1b[D\x1b[Dd\r", "go don"),
        ("\n!\r", "go on\n!"),
        ("\x1b[D\x1b[C?\r", "go on?"),
    ],
    ids=ascii,
)
def test_text_that_was_put_back_is_sent_replaced_or_changed(keys, message):
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        assert LineEditor(InMemoryHistory()).read("go on") == message


def test_tab_completes_commands_and_what_comes_behind_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "my letter.txt").write_text("")
    for begun, whole in (
        ("/he", "/help"),
        ("/set te", "/set temperature"),
        ("/set x", "/set x"),
        ("/file do", "/file docs"),
        ("/file docs/my", "/file docs/my letter.txt"),
        ("/help te", "/help te"),
        ("say /set te", "say /set te"),
    ):
        assert typed(begun + "\t", "\r") == [whole]


def test_what_was_typed_before_the_prompt_is_lines_of_their_own():
    assert typed("three\r", early="one\r/help\rtw") == ["one", "/help", "twthree"]
    assert typed("\r", early="\x1b[200~a\rb\x1b[201~é") == ["a\nbé"]


def test_up_brings_the_last_message_back():
    assert typed("one\r", "\x1b[A", "!\r") == ["one", "one!"]


def test_history_is_private_and_keeps_lines_whole(tmp_path):
    path = tmp_path / "history"
    assert typed("one\x1b\rtwo\r secret\rlast\r", history=FileHistory(path)) == [
        "one\ntwo",
        " secret",
        "last",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(FileHistory(path).load_history_strings()) == ["last", "one\ntwo"]
    assert typed("", "\x1b[A", "\r", history=FileHistory(path)) == ["last"]


def test_history_survives_edits_and_is_cut(tmp_path, monkeypatch):
    path = tmp_path / "history"
    path.write_text('"a"\nnot json\n5\n"b"\n"c"\n')
    assert list(FileHistory(path).load_history_strings()) == ["c", "b", "a"]
    monkeypatch.setattr(lineeditor, "MAX_ENTRIES", 2)
    assert list(FileHistory(path).load_history_strings()) == ["c", "b"]
    assert path.read_text() == '"b"\n"c"\n'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_history_can_be_forbidden_or_impossible(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert isinstance(open_history(pytest.fail), FileHistory)
    assert (tmp_path / "kv" / "history").exists()
    assert isinstance(open_history(pytest.fail, forbidden=True), InMemoryHistory)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    warnings: list[str] = []
    assert isinstance(open_history(warnings.append), InMemoryHistory)
    assert len(warnings) == 1


def test_the_editor_begins_with_a_text():
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        editor = LineEditor(InMemoryHistory())
        pipe.send_text("\x05!\rtwo\r")
        assert [editor.read("one"), editor.read()] == ["one!", "two"]


def test_only_lines_that_were_begun_have_a_mark():
    assert continuation(2, 1, 0) == ". " and continuation(2, 1, 1) == "  "


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_prompt_and_the_handlers_are_as_before(number):
    def of_others(*_: object) -> None:
        pytest.fail("the handler of others")

    before = signal.signal(number, of_others)

    def send_signal() -> None:
        while signal.getsignal(number) is of_others:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    try:
        with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
            editor = LineEditor(InMemoryHistory())
            sender = threading.Thread(target=send_signal)
            sender.start()
            with pytest.raises(SystemExit) as ended:
                editor.read()
            sender.join()
            assert ended.value.code == 128 + number
            assert signal.getsignal(number) is of_others
    finally:
        signal.signal(number, before)


def test_a_signal_that_came_before_the_prompt_ends_it():
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        with pytest.raises(SystemExit) as ended:
            LineEditor(InMemoryHistory(), ended=lambda: 143).read()
        assert ended.value.code == 143
        pipe.send_text("one\r")
        assert LineEditor(InMemoryHistory(), ended=lambda: 130).read() == "one", "a Ctrl-C ends an answer only"


@pytest.mark.slow
@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("how", ["signal", "hangup"])
def test_a_terminal_that_goes_away_ends_the_process_silently(how, term):
    """By SIGHUP, which a closed terminal sends, too."""
    code = (
        "import sys; from prompt_toolkit.history import InMemoryHistory\n"
        "from kvcli.cli.commands.chat.lineeditor import LineEditor\n"
        "editor = LineEditor(InMemoryHistory())\n"
        "try: print(editor.read('draft'))\n"
        "finally: open(sys.argv[1], 'w').write('tidied up')\n"
    )
    with tempfile.NamedTemporaryFile() as file:
        pid, terminal = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored
            os.environ |= {"TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1", "PYTHONPATH": str(PACKAGE_ROOT)}
            os.execv(sys.executable, [sys.executable, "-c", code, file.name])
        screen = b""
        while b"> " not in screen:
            screen += os.read(terminal, 1 << 16)
        time.sleep(0.3)
        if how == "signal":
            os.kill(pid, signal.SIGHUP)
            with contextlib.suppress(OSError):  # EIO: the other side is closed
                while block := os.read(terminal, 1 << 16):
                    screen += block
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) in ((129,) if how == "signal" else (129, -signal.SIGHUP, 1))
        assert b"xception" not in screen and b"Traceback" not in screen
        assert file.read() == b"tidied up"
