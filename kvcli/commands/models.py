"""`kv models`: what models there are, where they lie, whether they are whole; and removing them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli import render
from kvcli.app import App
from kvcli.errors import CheckFailed, UsageError
from kvcli.globaloptions import require_command
from kvcli.helptext import STORES
from kvcli.invocation import Invocation, JsonFlag

if TYPE_CHECKING:
    from kvcli.runtime.download.inventory import Entry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from kv models ls.")]


def register(app: typer.Typer) -> None:
    group = App()
    group.callback(invoke_without_command=True)(models)
    group.command("ls")(ls)
    group.command("path")(path)
    group.command("verify")(verify)
    group.command("rm")(rm)
    app.add_typer(group, name="models", rich_help_panel=STORES)


def models(ctx: typer.Context) -> None:
    """List, find, check and remove models."""
    require_command(ctx)


def ls(
    ctx: typer.Context,
    all: Annotated[
        bool, typer.Option("--all", "-a", help="Also the models known only by their sizes, for planning.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """The models known by name and those downloaded from the hub. The default one has a star.

    Whether a model runs: yes; hub, from the repository that kv estimate names; file, from a file of your own; no.
    """
    from kvcli.runtime.download import inventory

    found = inventory.entries(shapes=all)
    if json:
        render.print_json([_as_json(entry) for entry in found])
        return
    rows = [
        [
            entry.name + ("*" if entry.default else ""),
            entry.arch or "-",
            render.human_count(entry.parameters) if entry.parameters else "-",
            f"{entry.context_length:,}" if entry.context_length else "-",
            render.human_bytes(entry.size) if entry.size else "-",
            "damaged" if entry.damaged else "yes" if entry.path else "no",
            _runs(entry),
            entry.license or "-",
        ]
        for entry in found
    ]
    headers = ["name", "arch", "params", "context", "size", "here", "runs", "license"]
    render.print_table(headers, rows, ctx.obj, right={2, 3, 4})


def _runs(entry: Entry) -> str:
    if entry.unsupported:
        return "no"
    return "yes" if not entry.problem else "hub" if entry.hf else "file"


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "title": entry.title,
        "kind": entry.kind or None,
        "arch": entry.arch or None,
        "parameters": entry.parameters or None,
        "context_length": entry.context_length or None,
        "bytes": entry.size or None,
        "license": entry.license or None,
        "default": entry.default,
        "present": entry.path is not None and not entry.damaged,
        "path": str(entry.path) if entry.path else None,
        "runs": not entry.problem,
        "problem": entry.problem or None,
        "hf": entry.hf or None,
    }


def path(name: Name) -> None:
    """Print the path of a downloaded model's file."""
    from kvcli.runtime.download import inventory

    render.write_out(f"{inventory.downloaded(name).path}\n")


def verify(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One model; without it all.")] = "",
) -> None:
    """Check downloaded models against their checksums; exit code 8 if one is damaged."""
    from kvcli.runtime.download import inventory

    present = [entry for entry in inventory.entries() if entry.path]
    damaged: list[CheckFailed] = []
    for entry in [inventory.downloaded(name)] if name else present:
        try:
            with render.Progress(ctx.obj) as progress:
                inventory.verify(entry, progress)
        except CheckFailed as error:
            damaged.append(error)
            render.print_error(error.message, error.hint, ctx.obj.color)
        else:
            render.write_out(f"{entry.name}: ok\n")
    if damaged:
        raise typer.Exit(CheckFailed.exit_code)


def rm(
    ctx: typer.Context,
    name: Name,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete the file of a downloaded model."""
    from kvcli.runtime.download import inventory

    invocation: Invocation = ctx.obj
    entry = inventory.downloaded(name)
    if not yes:
        if not render.is_terminal(sys.stdin):
            raise UsageError(f"not removing {entry.path} unasked", "there is no terminal to ask on: add -y")
        typer.confirm(f"Remove {entry.path} ({render.human_bytes(entry.size)})?", abort=True, err=True)
    inventory.remove(entry)
    render.notice(f"removed {entry.path}", invocation)
