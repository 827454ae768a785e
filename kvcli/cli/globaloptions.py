"""The options that every command takes, before or after its name; they fill in the `Invocation`."""

from __future__ import annotations

import copy
import sys
from typing import Annotated, Any

import typer

from kvcli import versions
from kvcli.cli import helptext, render
from kvcli.cli.invocation import Bars, When
from kvcli.cli.streams import write_err


def register(app: typer.Typer) -> None:
    """Make the global options the app's own, and a bare `kv` print its help on stderr with exit code 2."""
    app.callback(invoke_without_command=True)(_root)


def require_command(ctx: typer.Context) -> None:
    """For a group called without a command: its help on stderr, exit code 2."""
    if ctx.invoked_subcommand is None:
        write_err(helptext.page(ctx, render.use_color(sys.stderr, ctx.obj.color)))
        raise typer.Exit(2)


def add_to_commands(command: Any) -> None:
    """Let each command below this click group accept the group's own global options after its name."""
    shared = [option for option in command.params if option.name in _NAMES]
    for leaf in _leaves(command):
        taken = {flag for param in leaf.params for flag in param.opts}
        for option in shared:
            if taken.isdisjoint(option.opts):
                after = copy.copy(option)
                after.expose_value = False
                leaf.params.append(after)


def _leaves(group: Any) -> list[Any]:
    """The commands below a group, and the groups that are one by themselves."""
    found = []
    for command in group.commands.values():
        if not hasattr(command, "commands"):
            found.append(command)
            continue
        found += [command] * command.alone + _leaves(command)
    return found


def _print_version(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print("\n".join(versions.lines() if ctx.obj.verbose else [versions.short()]))
        raise typer.Exit


def _note_verbose(ctx: typer.Context, value: int) -> int:
    ctx.obj.verbose += value
    return value


def _note(ctx: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Keep a given value; an option that was not given leaves what the other place may have said."""
    if value:
        setattr(ctx.obj, str(param.name), value)
    return value


_NAMES = ("verbose", "quiet", "color", "progress", "offline")


def _root(
    ctx: typer.Context,
    verbose: Annotated[
        int,
        typer.Option(
            "-v",
            "--verbose",
            count=True,
            callback=_note_verbose,
            is_eager=True,  # --version asks for it
            rich_help_panel=helptext.GLOBAL,
            show_default=False,
            help="Show more on stderr; -vv shows tracebacks.",
        ),
    ] = 0,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q",
            "--quiet",
            callback=_note,
            rich_help_panel=helptext.GLOBAL,
            help="Show only errors and warnings on stderr.",
        ),
    ] = False,
    color: Annotated[
        When | None,
        typer.Option(
            "--color",
            metavar="auto|always|never",
            callback=_note,
            is_eager=True,  # a help page asks for it
            rich_help_panel=helptext.GLOBAL,
            help="Use colors.",
            show_default="auto",
        ),
    ] = None,
    progress: Annotated[
        Bars | None,
        typer.Option(
            "--progress",
            metavar="auto|on|off",
            callback=_note,
            rich_help_panel=helptext.GLOBAL,
            help="Show progress on stderr.",
            show_default="on a terminal",
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", callback=_note, rich_help_panel=helptext.GLOBAL, help="Do not use the network."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            *("-V", "--version"),
            callback=_print_version,
            is_eager=True,
            rich_help_panel=helptext.GLOBAL,
            help="Print the version and exit; with -v also those of Python and libraries.",
        ),
    ] = False,
) -> None:
    # The values were noted by the callbacks above, which also serve the same options behind a command's name.
    require_command(ctx)
