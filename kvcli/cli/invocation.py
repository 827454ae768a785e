"""What was said about the whole call of `kv`: verbosity, color, progress bars, network, form of errors.

`cli.main` makes one `Invocation`, every command finds it as `ctx.obj` (`ctx: typer.Context`). It is the only
object that flags change: the global options fill it in, wherever on the line they stand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

import typer

from kvcli.cli.helptext import OUTPUT
from kvcli.cli.settings import TRUE, Settings
from kvcli.errors import UsageError


class When(str, Enum):
    """The values of --color."""

    auto = "auto"
    always = "always"
    never = "never"


class Bars(str, Enum):
    """The values of --progress."""

    auto = "auto"
    on = "on"
    off = "off"


def _hub_is_offline() -> bool:
    """HF_HUB_OFFLINE with what the hub's library takes for yes."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in TRUE


@dataclass
class Invocation:
    """The global options. `json` is true once the command's own --json or --jsonl was seen.

    `called`: what to call an option in messages, by the name that they would use, where it was given under another one.
    `answer`: text that JSON at the end is to have; `answered`: that JSON is printed, so errors go to stderr.
    `told`: every warning and notice of this call, whether or not it was to be seen on stderr.
    `settings`: where values come from that nobody typed; `wrong_settings`: the first thing that is wrong there.
    `tree`: makes all commands, most of which a call does without.
    """

    verbose: int = 0
    quiet: bool = False
    color: When = When.auto
    progress: Bars = Bars.auto
    offline: bool = field(default_factory=_hub_is_offline)
    json: bool = False
    called: dict[str, str] = field(default_factory=dict)
    answer: list[str] = field(default_factory=list)
    answered: bool = False
    told: list[str] = field(default_factory=list)
    settings: Settings | None = None
    wrong_settings: UsageError | None = None
    tree: Callable[[], Any] | None = None


def _note_json(ctx: typer.Context, value: bool) -> bool:
    if value and isinstance(ctx.obj, Invocation):
        ctx.obj.json = True
    return value


def json_option(*names: str, help: str) -> typer.models.OptionInfo:
    """An option like --json: once it is given, `cli.main` prints errors as JSON on stdout."""
    return typer.Option(*names, help=help, callback=_note_json, is_eager=True, rich_help_panel=OUTPUT)


JsonFlag = Annotated[bool, json_option("--json", help="Print JSON on stdout, also for errors.")]
