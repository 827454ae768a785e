"""What a terminal is told about variables: of other programs that count here, and once of those that nothing reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from kvcli import paths
from kvcli.cli import render, settings
from kvcli.cli.invocation import Invocation
from kvcli.cli.settings import OTHER, Setting


def tell(options: Iterable[Any], found: dict[str, Setting], invocation: Invocation) -> None:
    """For a command with these options, of which some are set."""
    for option in options:
        setting = found.get(option.name)
        if setting is not None and setting.origin == OTHER:
            name = settings.name(option)
            above = f"--{name} and {settings.variable(name)} stand above it"
            render.notice(f"{setting.called} is taken for --{name}; {above}", invocation)


def tell_unread(options: Iterable[Any], invocation: Invocation) -> None:
    """Of variables that are not read: on a terminal once each, as what was told is kept in the state folder; elsewhere,
    where nobody may remember it, each time, but only of mistakes."""
    if invocation.settings is None:
        return
    known = [name for option in options for name, _ in settings.names(option)]
    if not render.is_terminal(sys.stderr):
        for line in invocation.settings.mistaken(known):
            render.warn(line, invocation)
    elif not invocation.quiet:
        _tell_once(list(invocation.settings.unread(known)), invocation)


def _tell_once(lines: list[str], invocation: Invocation) -> None:
    file = paths.state_dir() / "told"
    try:
        told = file.read_text("utf-8").splitlines() if lines else []
    except OSError:
        told = []
    new = [line for line in lines if line not in told]
    for line in new:
        render.notice(line, invocation)
    if new:
        try:
            paths.make_private(file.parent)
            paths.replace_file(file, "".join(f"{line}\n" for line in (*told, *new)).encode())
        except OSError:
            return  # told again next time
