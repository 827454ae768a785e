"""What is drawn where: colours, bars, tables, amounts."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from kvcli.cli import render
from kvcli.cli.invocation import Bars, Invocation, When
from kvcli.words import human_bytes, human_count


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_wishes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize(
    "when, environment, terminal, expected",
    [
        (When.auto, {}, True, True),
        (When.auto, {}, False, False),
        (When.auto, {"TERM": "dumb"}, True, False),
        (When.auto, {"NO_COLOR": "1"}, True, False),
        (When.auto, {"NO_COLOR": ""}, True, True),
        (When.auto, {"FORCE_COLOR": "1"}, False, True),
        (When.auto, {"FORCE_COLOR": "0"}, False, False),
        (When.auto, {"CLICOLOR_FORCE": "1"}, False, True),
        (When.auto, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        (When.always, {"NO_COLOR": "1"}, False, True),
        (When.never, {"FORCE_COLOR": "1"}, True, False),
    ],
)
def test_color(
    when: When, environment: dict[str, str], terminal: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert render.use_color(Terminal() if terminal else io.StringIO(), when) is expected


@pytest.mark.parametrize(
    "options, terminal, draws",
    [
        ({}, True, True),
        ({}, False, False),
        ({"progress": Bars.on}, True, True),
        ({"progress": Bars.off}, True, False),
        ({"quiet": True}, True, False),
    ],
)
def test_bars_need_a_terminal(
    options: dict[str, object], terminal: bool, draws: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FORCE_COLOR must not put cursor movements into a file."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.Progress(Invocation(**options)) as progress:  # type: ignore[arg-type]
        progress("download", 1 << 20, 2 << 20)
    assert ("\x1b[" in stream.getvalue()) is draws
    assert draws or stream.getvalue() == ""


def test_bars_without_color(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.Progress(Invocation(color=When.never)) as progress:
        progress("download", 1 << 20, 2 << 20)
    assert "1.0/2.0 MiB" in stream.getvalue()
    assert not any(f"\x1b[{code}" in stream.getvalue() for code in ("3", "9", "1;3")), "no colours"


def test_bars_have_one_system_of_units(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "200")
    with render.Progress(Invocation(color=When.never)) as progress:
        for step in range(1, 4):
            progress("download", step << 20, 4 << 20)
            time.sleep(0.01)
    rates = set(re.findall(r"[\d.]+ (\w+)/s", stream.getvalue()))
    assert rates and rates <= {"KiB", "MiB", "GiB"}


def test_plain_progress_is_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.Progress(Invocation(progress=Bars.on)) as progress:
        for done in range(0, 1 << 20, 1 << 16):
            progress("download", done, 1 << 20)
    assert stream.getvalue() == "kv: download: 0 B of 1.0 MiB\n"


@pytest.mark.parametrize(
    "options, terminal, notice, announcement, warning",
    [
        ({}, False, False, True, True),
        ({}, True, True, True, True),
        ({"verbose": 1}, False, True, True, True),
        ({"quiet": True}, True, False, False, True),
    ],
)
def test_who_is_told_what(
    options: dict[str, object],
    terminal: bool,
    notice: bool,
    announcement: bool,
    warning: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    invocation = Invocation(**options)  # type: ignore[arg-type]
    for write, expected in (
        (render.notice, notice),
        (render.announce, announcement),
        (render.warn, warning),
    ):
        stream = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        write("some\ntext", invocation)
        assert ("some text" in stream.getvalue()) is expected


def test_amounts() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, 98_362_432, 5 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "93.8 MiB", "5.0 TiB")
    ]
    assert [human_count(n) for n in (0, 999, 1500, 134_515_008, 8_030_261_248, 2e12)] == [
        *("0", "999", "1.5 K", "134.5 M", "8.0 B", "2000.0 B")
    ]


def test_one_line() -> None:
    assert render.one_line("a\n b\t\x1b[31mc\x9b\u202e\udcff é") == "a b \\x1b[31mc\\x9b\\u202e\\udcff é"


def test_table(capfd: pytest.CaptureFixture[str]) -> None:
    render.print_table(["a", "size"], [["é\x1b[1m", "1"], ["漢字", "100"]], Invocation(), right={1})
    assert capfd.readouterr().out == "a         size\né\\x1b[1m     1\n漢字       100\n"


def test_json_is_utf8_whatever_the_text(capfd: pytest.CaptureFixture[str]) -> None:
    render.print_json("tokenize", {"text": "é\udcff"})
    assert capfd.readouterr().out == '{"kv_schema": 2, "text": "é?"}\n'
