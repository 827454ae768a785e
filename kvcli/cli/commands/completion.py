"""`kv completion`: the script with which a shell completes commands, options and values."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvcli.cli import completion, render
from kvcli.cli.helptext import SETUP
from kvcli.errors import OutputError, UsageError

EXAMPLES = """
kv completion bash --install
source <(kv completion bash)
kv completion fish > ~/.config/fish/completions/kv.fish
"""


def register(app: typer.Typer) -> None:
    app.command("completion", rich_help_panel=SETUP, epilog=EXAMPLES)(command)


def command(
    ctx: typer.Context,
    shell: Annotated[
        str | None,
        typer.Argument(metavar="bash|zsh|fish", help="The shell; by default the one in $SHELL."),
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Set it up for your account instead of printing it.")
    ] = False,
) -> None:
    """Print or install the script that completes commands, options, models and cache types in a shell."""
    shell = shell or os.path.basename(os.environ.get("SHELL", ""))
    if shell not in completion.SHELLS:
        told = f"SHELL must be one of {', '.join(completion.SHELLS)}, not '{shell}'"
        raise UsageError(told, "name it: kv completion bash")
    if not install:
        render.write_out(completion.script(shell) + "\n")
        return
    try:
        path = completion.install(shell)
    except OSError as error:
        raise OutputError(f"cannot write {error.filename}: {error.strerror or error}") from None
    render.announce("new shells complete kv", ctx.obj)
    render.write_out(f"{path}\n")
