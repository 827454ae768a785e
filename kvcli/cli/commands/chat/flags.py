"""The flags of `kv chat` that no other command has."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli.cli import render
from kvcli.cli.flags.checks import checked
from kvcli.cli.helptext import CHAT, OUTPUT
from kvcli.cli.invocation import json_option
from kvcli.errors import UsageError
from kvcli.runtime.promptcache import sessions

_option = functools.partial(typer.Option, rich_help_panel=CHAT)
_output = functools.partial(typer.Option, rich_help_panel=OUTPUT)


@dataclass(frozen=True)
class ChatFlags:
    """How the conversation is held."""

    session: Annotated[
        str | None,
        _option(
            "--session",
            metavar="NAME",
            help="Save the chat under this name; continue it if it exists.",
            callback=checked(sessions.check_name),
        ),
    ] = None
    resume: Annotated[
        str | None,
        _option("--resume", metavar="NAME", help="Continue a saved chat.", callback=checked(sessions.check_name)),
    ] = None
    continue_: Annotated[bool, _option("--continue", help="Continue the chat that was saved last.")] = False
    script: Annotated[
        bool, _option("--script", help="Read messages from stdin, one per line; write answers to stdout.")
    ] = False
    no_history: Annotated[bool, _option("--no-history", help="Do not keep what is typed for later chats.")] = False
    no_raw: Annotated[bool, _option("--no-raw", help="Chat even with a base model, in its architecture's format.")] = (
        False
    )
    null: Annotated[
        bool, _option("-0", "--null", help="With --script: messages end with NUL instead of a newline.")
    ] = False
    json: Annotated[
        bool,
        json_option("--json", help="With --script: print one JSON object for each answer on stdout, also for errors."),
    ] = False
    stats: Annotated[
        bool | None,
        _output(
            "--stats/--no-stats", help="Show a line of statistics after each answer.", show_default="on a terminal"
        ),
    ] = None
    raw_output: Annotated[bool, _output("--raw-output", help="Do not escape control characters on a terminal.")] = False

    def session_name(self) -> str:
        """The chat that is saved; "" = none. Raises UsageError for one that is not there."""
        given = [self.session is not None, self.resume is not None, self.continue_]
        if sum(given) > 1:
            raise UsageError("--session, --resume and --continue cannot be used together")
        if not any(given):
            return ""
        if self.session is not None:
            return self.session
        saved = sessions.names()
        if not saved:
            raise UsageError("there is no saved chat", "kv chat --session NAME saves one")
        if self.continue_:
            return saved[0]
        if self.resume not in saved:
            raise UsageError(f"there is no saved chat '{self.resume}'", f"saved: {', '.join(saved[:10])}")
        return self.resume

    def check(self) -> None:
        """Raises UsageError where there is neither a terminal nor a script."""
        for name, given in (("-0", self.null), ("--json", self.json)):
            if given and not self.script:
                raise UsageError(f"{name} needs --script", "it takes messages from stdin")
        if self.script:
            return
        if not render.is_terminal(sys.stdin):
            raise UsageError(
                "kv chat needs a terminal", "--script takes messages from stdin; kv run answers one prompt"
            )
        if not render.is_terminal(sys.stdout):
            raise UsageError("kv chat needs a terminal to write to", "kv run and kv chat --script write to files")
