"""Text on a terminal, in a pipe and in a file."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import sys
import termios

import pytest

from kvcli.cli import streams
from kvcli.cli.streams import OutputFile, TextOut, neutralise
from kvcli.errors import OutputError


def test_neutralise_spells_control_characters_out():
    assert neutralise("\x1b]52;c\x07\tx\n\r\x7f\x9b é") == "^[]52;c^G\tx\n^M^?M-^[ é"


def test_a_terminal_gets_neutral_text_at_once_and_a_pipe_gets_it_raw():
    class Recorder(io.BytesIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    terminal, pipe, raw = Recorder(), Recorder(), Recorder()
    outs = [TextOut(terminal, tty=True), TextOut(pipe, tty=False), TextOut(raw, tty=True, raw=True)]
    for out in outs:
        for letter in "\x1babcdefgh":
            out.write(letter)
        if out.tty:
            out.flush()  # the word may go on
    assert (terminal.getvalue(), terminal.flushes) == (b"^[abcdefgh", 11)
    assert (pipe.getvalue(), raw.getvalue()) == (b"\x1babcdefgh",) * 2
    assert 1 <= pipe.flushes < 9


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda number: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OutputError, match="No space"), OutputFile(str(path)) as file:
        file.write("new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_ends_the_copy_and_nothing_else(capfd):
    """The answer goes on where else it goes; the error comes at the end."""
    with pytest.raises(OutputError, match="cannot write /dev/full: No space"), OutputFile("/dev/full") as file:
        for word in ("one", "two"):
            file.write(word)
        file.whole = True
    with pytest.raises(KeyError), OutputFile("/dev/full") as file:  # what came first is what is told
        file.write("one")
        raise KeyError


def test_text_is_beside_the_file_until_it_is_whole(tmp_path, capfd):
    path = tmp_path / "out.txt"
    path.write_text("old")
    with OutputFile(str(path)) as file:
        file.write("né")
        (beside,) = set(tmp_path.iterdir()) - {path}
        assert (path.read_text(), beside.read_text()) == ("old", "né")  # at once: a killed process leaves it
        file.write("w\n")
        file.end_line()
        file.whole = True
    assert (path.read_text(), list(tmp_path.iterdir())) == ("néw\n", [path])
    with OutputFile(str(path)):
        pass  # nothing was generated
    assert path.read_text() == "néw\n" and capfd.readouterr().err == ""
    with OutputFile(str(path)) as file:
        file.write("")
        file.end_line()
    assert path.read_text() == "\n" and capfd.readouterr().err == f"kv: {path} holds the answer so far\n"


def test_a_link_stays_and_a_pipe_is_written_directly(tmp_path):
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with OutputFile(str(tmp_path / "link")) as file:
        file.write("new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"
    reader, writer = os.pipe()
    with OutputFile(f"/dev/fd/{writer}") as file:
        file.write("new")
        assert os.read(reader, 10) == b"new"
    os.close(reader)
    os.close(writer)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_may_not_be_written_is_refused(tmp_path):
    path = tmp_path / "out.txt"
    path.write_text("old")
    path.chmod(0o400)
    with pytest.raises(OutputError, match="no permission"):
        OutputFile(str(path))


def test_what_was_typed_before_keys_wait_has_its_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    controller, terminal = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: os.getpgrp())
        os.write(controller, "é\rtwo\rthr".encode())
        assert select.select([terminal], [], [], 10)[0]
        with streams.keys_wait():
            assert streams.typed_so_far() == "é\rtwo\rthr" and streams.typed_so_far() == ""
            monkeypatch.setattr(os, "tcgetpgrp", lambda descriptor: -1)
            os.write(controller, b"x")
            assert streams.typed_so_far() == "", "another process has the terminal"
    os.close(controller)
    monkeypatch.setattr(sys, "stdin", None)
    assert streams.typed_so_far() == ""


def test_keys_wait_at_a_terminal_and_it_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = pty.openpty()

    def flags() -> tuple[int, int]:
        found = termios.tcgetattr(its)
        return found[0] & termios.ICRNL, found[3] & (termios.ICANON | termios.ECHO)

    before = flags()
    assert all(before)
    with os.fdopen(its, "r", closefd=False) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        with streams.keys_wait() as give_back:
            assert flags() == (0, 0)
            give_back()  # as where Ctrl-C ends the process at once
            assert flags() == before
            os.kill(os.getpid(), signal.SIGCONT)  # after a Ctrl-Z: the shell had the terminal
            assert flags() == (0, 0)
        assert flags() == before and signal.getsignal(signal.SIGCONT) is signal.SIG_DFL
        with pytest.raises(SystemExit), streams.keys_wait():
            raise SystemExit(130)
        assert flags() == before
    os.close(ours)
    os.close(its)
