"""Values of single options are checked as they are read: wherever they are from, and by `kv config set`, too. What
several options may not be together is for the group that has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer

from kvcli.cli import foreign
from kvcli.errors import UsageError
from kvcli.words import meant


def checked(check: Callable[[Any], object]) -> Callable[[Any], Any]:
    """What an option has as its `callback`: it refuses what `check` raises a UsageError for, of several values each.
    None, which nobody gave, is not looked at."""

    def callback(value: Any) -> Any:
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is not None:
                check(each)
        return value

    return callback


def in_range(flag: str, least: float, most: float | None = None, hint: str = "") -> Callable[[Any], Any]:
    """The callback of a number that is at least and at most so much."""

    def check(value: float) -> None:
        if most is None and not value >= least:
            raise UsageError(f"{flag} must be {least:,} or more, not {value}", hint)
        if most is not None and not least <= value <= most:
            raise UsageError(f"{flag} must be {least:,} to {most:,}, not {value}", hint)

    return checked(check)


def _nothing(value: str) -> str:
    return ""


def one_of(flag: str, words: Sequence[str], hint: Callable[[str], str] = _nothing) -> Callable[[Any], Any]:
    """The callback of a text that is one of these words. `hint`: what to do instead of another one; "" = the word that
    looks like it."""

    def check(value: str) -> None:
        if value not in words:
            near = dict.fromkeys(word for word in (value.lower(), foreign.program(value)) if word in words)
            raise UsageError(f"{flag} must be one of {', '.join(words)}, not '{value}'", hint(value) or meant(near))

    return checked(check)


def not_empty(flag: str, hint: str) -> Callable[[Any], Any]:
    """The callback of a text that must say something."""

    def check(value: str) -> None:
        if not value.strip():
            raise UsageError(f"{flag} is empty", hint)

    return checked(check)


def number(
    panel: str,
    *names: str,
    help: str,
    least: float,
    most: float | None = None,
    hint: str = "",
    show_default: bool | str = True,
) -> Any:
    """An option whose value is a number that is at least and at most so much; `panel`: where the help page has it."""
    flag = next(name for name in names if name.startswith("--"))
    callback = in_range(flag, least, most, hint)
    return typer.Option(
        *names, metavar="N", help=help, rich_help_panel=panel, callback=callback, show_default=show_default
    )


def file_name(panel: str, flag: str, *, help: str) -> Any:
    """An option whose value is the name of a file."""
    callback = not_empty(flag, "give the name of a file")
    return typer.Option(flag, metavar="FILE", help=help, rich_help_panel=panel, callback=callback)


def _check_bandwidth(value: float) -> None:
    if not 0 < value < 1e6:
        raise UsageError(f"--bandwidth must be above 0 (in GB/s), not {value}")


check_bandwidth = checked(_check_bandwidth)
