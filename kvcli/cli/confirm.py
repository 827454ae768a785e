"""The question before something is removed."""

from __future__ import annotations

import sys

import typer

from kvcli.cli import render
from kvcli.cli.streams import say, write_err
from kvcli.errors import KVError, UsageError


def confirm_removal(what: str, yes: bool, json: bool = False) -> None:
    """Come back if the user says yes, or has said so in advance.

    Raises Typer's Exit for a no, which Ctrl-D is, too, and UsageError where there is nobody to ask.
    """
    if yes:
        return
    if json or not render.is_terminal(sys.stdin):
        why = "--json does not ask" if json else "there is no terminal to ask on"
        raise UsageError(f"removing {what} needs confirmation", f"{why}: add -y")
    try:
        agreed = typer.confirm(f"Remove {what}?", err=True)
    except typer.Abort:
        agreed = False
        write_err("\n")
    if not agreed:
        say("nothing was removed")
        raise typer.Exit(KVError.exit_code)
