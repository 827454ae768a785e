"""What all `rm` commands do: ask, remove, and say so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import typer

from kvcli.cli import render
from kvcli.cli.invocation import Invocation
from kvcli.cli.streams import say, write_err
from kvcli.errors import KVError, UsageError


@dataclass(frozen=True)
class Removable:
    """One thing. `named`: what it is called where it is removed; `remove` raises a KVError."""

    named: str
    remove: Callable[[], object]


def check_choice(names: Sequence[str], all: bool, what: str, hint: str) -> None:
    """Raises UsageError unless there are either names or --all."""
    if bool(names) == all:
        raise UsageError(f"give {what}, or --all", hint)


def remove(
    found: Sequence[Removable],
    question: str,
    yes: bool,
    json: bool,
    invocation: Invocation,
    told: str = "",
    nothing: str = "there is nothing to remove",
) -> None:
    """Remove all of these once the user has said yes, or has in advance. `question`: what they are, in one; `told`: the
    same for the word at the end, where each by itself would be too many; `nothing`: what is said where there is none.

    Raises Typer's Exit for a no, which Ctrl-D is, too, and UsageError where there is nobody to ask.
    """
    if not found:
        render.announce(nothing, invocation)
        return
    if not yes and (json or not render.is_terminal(sys.stdin)):
        why = "--json does not ask" if json else "there is no terminal to ask on"
        raise UsageError(f"removing {question} needs confirmation", f"{why}: add -y")
    if not yes and not _agrees(f"Remove {question}? [y/N]: "):
        say("nothing was removed")
        raise typer.Exit(KVError.exit_code)
    for each in found:
        each.remove()
        if not told:
            render.announce(f"removed {each.named}", invocation)
    if told:
        render.announce(f"removed {told}", invocation)


def _agrees(question: str) -> bool:
    """Ask until the answer is one."""
    while True:
        write_err(question)
        line = sys.stdin.readline()
        if not line:  # Ctrl-D
            write_err("\n")
        word = line.strip().lower()
        if word in ("", "n", "no"):
            return False
        if word in ("y", "yes"):
            return True
        say("answer y or n")
