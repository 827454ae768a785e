"""What signals do at each stage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from conftest import PACKAGE_ROOT

from kvcli.cli.interrupt import AT_ONCE, FINISH, LEAVE, UNWIND, Interrupts


class Left(Exception):
    pass


def leaving(code: int) -> None:
    raise Left(code)


@pytest.mark.parametrize(
    ("stage", "signals", "outcome"),
    [
        (LEAVE, [signal.SIGINT], Left(130)),
        (LEAVE, [signal.SIGTERM], Left(143)),
        (UNWIND, [signal.SIGTERM], SystemExit(143)),
        (UNWIND, [signal.SIGINT], SystemExit(130)),
        (UNWIND, [signal.SIGHUP], SystemExit(129)),
        (FINISH, [signal.SIGINT], 130),
        (FINISH, [signal.SIGHUP], 129),
        (FINISH, [signal.SIGINT, signal.SIGINT], Left(130)),
        (FINISH, [signal.SIGINT, signal.SIGTERM], Left(143)),
    ],
)
def test_stages_of_interrupts(stage, signals, outcome, monkeypatch):
    told = []
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", leaving)
    monkeypatch.setattr("kvcli.cli.interrupt.SAME_S", 0.0)
    with Interrupts(told.append) as interrupts:
        interrupts.stage = stage
        if isinstance(outcome, int):
            for number in signals:
                os.kill(os.getpid(), number)
            assert interrupts.code == outcome and interrupts.cancelled() and told == []
            return
        with pytest.raises(type(outcome)) as raised:
            for number in signals:
                os.kill(os.getpid(), number)
        assert raised.value.args == outcome.args
        assert told == ([] if stage == UNWIND else [outcome.args[0]])


def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", leaving)
    monkeypatch.setattr("kvcli.cli.interrupt.SAME_S", 60.0)
    with Interrupts() as interrupts:
        interrupts.stage = FINISH
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.code == 143
        with pytest.raises(Left):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("stage", (LEAVE, UNWIND, FINISH))
@pytest.mark.parametrize("number", AT_ONCE)
def test_signals_that_end_at_once(stage, number, monkeypatch):
    """In the handlers of a command inside those of the process, too; one with another handler is left alone."""
    told = []
    monkeypatch.setattr("kvcli.cli.interrupt.end_by_signal", leaving)
    with Interrupts(), Interrupts(told.append) as interrupts:
        interrupts.stage = stage
        with pytest.raises(Left) as raised:
            os.kill(os.getpid(), number)
    assert raised.value.args == (128 + number,) and told == [128 + number]
    assert signal.getsignal(number) is signal.SIG_DFL
    seen = []
    signal.signal(number, lambda *_: seen.append(number))
    try:
        with Interrupts(told.append):
            os.kill(os.getpid(), number)
    finally:
        signal.signal(number, signal.SIG_DFL)
    assert seen == [number] and len(told) == 1


def test_a_second_signal_does_not_disturb_what_the_first_one_began(monkeypatch):
    with Interrupts() as interrupts:
        interrupts.stage = UNWIND
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.setattr("kvcli.cli.interrupt.INSIST_S", 0)  # after a while it is one of its own
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)
        monkeypatch.undo()
        interrupts.stage, interrupts.insist = FINISH, False
        os.kill(os.getpid(), signal.SIGINT)
        interrupts.stage = UNWIND  # the answer at a terminal ended meanwhile
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("begun", ("_meant", "_command"))  # before the command is imported, and in the middle of that
@pytest.mark.parametrize("words", (["run", "--json", "hi"], ["run", "hi", "--", "--json"]))
def test_a_signal_at_the_start_is_told_where_json_is_asked_for(begun, words):
    code = (
        "import os, signal, sys; from kvcli.cli import main\n"
        f"main.{begun} = lambda args: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.argv = {['kv', *words]!r}; main.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE_ROOT, capture_output=True, text=True)
    assert ended.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM) and ended.stderr == ""
    if "--" in words:
        assert ended.stdout == ""
    else:
        assert json.loads(ended.stdout)["error"]["message"] == "terminated"


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupts.cancelled()
    finally:
        signal.signal(signal.SIGINT, previous)
