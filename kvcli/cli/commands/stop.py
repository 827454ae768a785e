"""`kv stop`: give back the memory of models that stay behind commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcli.cli import keeping, render
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import JsonFlag
from kvcli.errors import ModelError, UsageError

EXAMPLES = """
kv stop
kv stop smollm2
kv stop --all
"""


def register(app: typer.Typer) -> None:
    app.command("stop", rich_help_panel=STORES, epilog=EXAMPLES)(stop)


def stop(
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model from kv ps; it may be left out where there is one.")
    ] = None,
    all: Annotated[bool, typer.Option("--all", help="Every model.")] = False,
    json: JsonFlag = False,
) -> None:
    """Unload a model that stays in memory. What it is answering is answered first."""
    if model is not None and all:
        raise UsageError("MODEL and --all cannot be used together")
    found = keeping.processes()
    names = sorted({about["model"] for _, about in found})
    if model is None and not all and len(found) > 1:
        raise UsageError(f"{len(found)} models are loaded: {', '.join(names)}", "name one, or use --all")
    chosen = [(name, about) for name, about in found if model is None or _is(about, model)]
    if model is not None and not chosen:
        raise ModelError(f"{model} is not loaded", f"loaded: {', '.join(names)}" if names else "no model is")
    stopped = [about for name, about in chosen if keeping.stop(name)]
    if json:
        render.print_json("stop", {"processes": stopped})
        return
    for about in stopped:
        ends = "will exit after its answer" if about["commands"] else "exits"
        render.announce(f"{about['model']} (process {about['pid']}) {ends}", ctx.obj)
    if not stopped:
        render.announce("no model is loaded", ctx.obj)


def _is(about: dict[str, Any], model: str) -> bool:
    """Whether a process keeps what the user calls so: a name, a file, or the end of its name."""
    path = Path(about["path"])
    return model in (about["model"], about["path"], path.name, path.stem) or path == Path(model).absolute()
