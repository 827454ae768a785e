"""Run `kv` inside the test process: arguments and stdin in; exit code, stdout and stderr out."""

from __future__ import annotations

import io
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from kvcli.cli import engines, interrupt, main


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


class Runner:
    """`runner("run", "hi", stdin=b"...")`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        self.monkeypatch, self.capture = monkeypatch, capture

    def __call__(self, *args: str, stdin: bytes | int | None = b"") -> Outcome:
        """`stdin`: its bytes, a file descriptor, or None for one that is a terminal."""
        self.monkeypatch.setattr(sys, "argv", ["kv", *args])
        self.monkeypatch.setattr(sys, "stdin", _text_stream(stdin))
        handlers = {number: signal.getsignal(number) for number in (*interrupt.SIGNALS, *interrupt.AT_ONCE)}
        self.capture.readouterr()
        try:
            with pytest.raises(SystemExit) as exit_info:
                main.main()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        out, err = self.capture.readouterr()
        code = exit_info.value.code
        assert isinstance(code, int)
        return Outcome(code, out.decode(), err.decode())


class Caller(Runner):
    """The engine that commands get is `caller.engine`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        super().__init__(monkeypatch, capture)
        self.engine: Any = None
        self.opened: list[tuple[Any, Any]] = []  # load and cache options of every engine that was asked for
        monkeypatch.setattr(main, "COMMANDS", ("run", "chat"))
        monkeypatch.setattr(engines, "load_model", self._load)
        monkeypatch.setattr(engines, "engine_of", lambda loaded, *_: loaded)

    def _load(self, load: Any, cache: Any, invocation: Any, interrupts: Any) -> Any:
        self.opened.append((load, cache))
        if load.chat_anyway:
            self.engine.take_spare_template()
        return self.engine


class _Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def _text_stream(stdin: bytes | int | None) -> io.TextIOWrapper:
    if isinstance(stdin, int):
        return os.fdopen(stdin, "r")
    file = io.FileIO(os.memfd_create("stdin"), "w+")
    file.write(stdin or b"")
    file.seek(0)
    buffered = io.BufferedReader(file)
    return _Terminal(buffered) if stdin is None else io.TextIOWrapper(buffered)
