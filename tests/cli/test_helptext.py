"""Help pages: one layout everywhere, wrapped and never cut."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import KvHere

from kvcli.cli import helptext, main


def commands(command: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of `kv` with the words that name it."""
    command = command or main._command([])
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands())


def options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


@pytest.fixture
def page(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> Any:
    def read(width: int, *path: str) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        code, out, err = kv_here(*path, "--help")
        assert (code, err) == (0, "")
        return out

    return read


@pytest.mark.slow
@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "kv")
def test_pages_are_wrapped_and_never_cut(path: tuple[str, ...], page: Any) -> None:
    command = COMMANDS[path]
    said = [word for param in command.params for word in (param.help or "").split()]
    said += [name for param in command.params for name in param.opts if name.startswith("-")]
    for width in (40, 80, 120):
        text = page(width, *path)
        assert text.isascii(), [c for c in text if not c.isascii()]
        assert max(map(len, text.splitlines())) <= width
        joined = "".join(text.split())
        assert [word for word in said if word not in joined] == []


def test_the_sections_stand_in_one_order(page: Any) -> None:
    titles = [line for line in page(80, "run").splitlines() if re.match(r"\w.*[^.]$", line)][1:]
    known = ["Prompt", "Model and context", "Generation", "KV cache", "When the context is full", "Prompt cache"]
    assert [title for title in titles if title in known] == known and titles[-2:] == ["Global options", "Examples"]
    for path, command in COMMANDS.items():
        for param in options(command):
            assert helptext.section(param) in helptext.ORDER, (path, param.name)


def test_one_layout_in_a_terminal_and_in_a_pipe(kv_here: KvHere, page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    piped = {path: page(80, *path) for path in ((), ("run",), ("cache",))}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for path, text in piped.items():
        shown = page(80, *path)
        assert shown.count("\x1b[1m") > 1 and re.sub(r"\x1b\[\d*m", "", shown) == text
    code, out, err = kv_here("cache")
    assert (code, out, err) == (2, "", piped[("cache",)])
    assert "\x1b" not in kv_here("--color", "never", "cache", "--help")[1]


def test_every_value_has_a_name() -> None:
    """N, FILE or the choices, and not what Python calls it."""
    nameless = [
        (path, param.name)
        for path, command in COMMANDS.items()
        for param in options(command)
        if not (param.is_flag or param.count or param.metavar)
    ]
    assert nameless == []


def test_every_command_has_examples(page: Any) -> None:
    """At the end of its page; those of a group are written once, and shown for each command that they call."""
    missing = [path for path in COMMANDS if "Examples\n  " not in page(80, *path)]
    assert missing == []
    assert page(80, "config", "unset").endswith("Examples\n  kv config unset ctx-size\n")
