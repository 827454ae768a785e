"""The flags of `kv chat` that no other command has."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from kvcli import render
from kvcli.errors import UsageError
from kvcli.helptext import CHAT, OUTPUT
from kvcli.runtime.promptcaches import sessions

_option = functools.partial(typer.Option, rich_help_panel=CHAT)
_output = functools.partial(typer.Option, rich_help_panel=OUTPUT)


@dataclass(frozen=True)
class ChatFlags:
    """How the conversation is held."""

    session: Annotated[
        str | None, _option("--session", metavar="NAME", help="Save the chat under this name, and go on with it.")
    ] = None
    resume: Annotated[str | None, _option("--resume", metavar="NAME", help="Go on with a saved chat.")] = None
    continue_: Annotated[bool, _option("--continue", help="Go on with the chat that was saved last.")] = False
    script: Annotated[bool, _option("--script", help="Messages from stdin, one a line; answers on stdout.")] = False
    no_raw: Annotated[
        bool, _option("--no-raw", help="Chat even with a base model, in the format of its architecture.")
    ] = False
    null: Annotated[bool, _option("-0", "--null", help="With --script: messages end with NUL.")] = False
    stats: Annotated[
        bool | None,
        _output("--stats/--no-stats", help="A line after each answer.", show_default="on a terminal"),
    ] = None
    raw_output: Annotated[
        bool, _output("--raw-output", help="Let control characters of the text reach the terminal.")
    ] = False

    def session_name(self) -> str:
        """The chat that is saved; "" = none. Raises UsageError for one that is not there."""
        given = [self.session is not None, self.resume is not None, self.continue_]
        if sum(given) > 1:
            raise UsageError("--session, --resume and --continue exclude each other")
        if not any(given):
            return ""
        if self.session is not None:
            return sessions.check_name(self.session)
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
        if self.null and not self.script:
            raise UsageError("-0 needs --script")
        if self.script:
            return
        if not render.is_terminal(sys.stdin):
            raise UsageError(
                "kv chat needs a terminal", "--script takes messages from stdin; kv run answers one prompt"
            )
        if not render.is_terminal(sys.stdout):
            raise UsageError("kv chat needs a terminal to write to", "kv run and kv chat --script write to files")
