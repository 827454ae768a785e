"""What signals do at each stage."""

from __future__ import annotations

import os
import signal

import pytest

from kvcli.cli.interrupt import FINISH, LEAVE, UNWIND, Interrupts


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


def test_an_ignored_signal_stays_ignored():
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert not interrupts.cancelled()
    finally:
        signal.signal(signal.SIGINT, previous)
