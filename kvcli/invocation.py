"""What was said about the whole call of `kv`: verbosity, colour, progress bars, network, form of errors.

`cli.main` makes one `Invocation`, every command finds it as `ctx.obj` (`ctx: typer.Context`). It is the only
object that flags change: the global options fill it in, wherever on the line they stand.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated

import typer

from kvcli.helptext import OUTPUT


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


def _offline_by_environment() -> bool:
    """KV_OFFLINE with any value that does not say no; HF_HUB_OFFLINE with what the hub's library takes for yes."""
    ours, hub = (os.environ.get(name, "").lower() for name in ("KV_OFFLINE", "HF_HUB_OFFLINE"))
    return ours not in ("", "0", "false", "no", "off") or hub in ("1", "true", "yes", "on")


@dataclass
class Invocation:
    """The global options. `json` is true once the command's own --json or --jsonl was seen.

    `called`: what to call an option in messages, by the name that they would use, where it was given under another one.
    `told`: every warning and notice of this call, whether or not it was to be seen on stderr.
    """

    verbose: int = 0
    quiet: bool = False
    color: When = When.auto
    progress: Bars = Bars.auto
    offline: bool = field(default_factory=_offline_by_environment)
    json: bool = False
    called: dict[str, str] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)


def _note_json(ctx: typer.Context, value: bool) -> bool:
    if value and isinstance(ctx.obj, Invocation):
        ctx.obj.json = True
    return value


def json_option(*names: str, help: str) -> typer.models.OptionInfo:
    """An option like --json: once it is given, `cli.main` prints errors as JSON on stdout."""
    return typer.Option(*names, help=help, callback=_note_json, is_eager=True, rich_help_panel=OUTPUT)


JsonFlag = Annotated[bool, json_option("--json", help="Print one JSON object on stdout; errors too.")]
