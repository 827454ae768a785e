"""`kv models`: what models there are, where they lie, whether they are whole; and removing them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli.cli import render
from kvcli.cli.app import App
from kvcli.cli.confirm import Removable, check_choice, remove
from kvcli.cli.globaloptions import require_command
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import JsonFlag
from kvcli.errors import CheckFailed, ModelError
from kvcli.words import human_bytes, human_count

if TYPE_CHECKING:
    from kvcli.runtime.hub.inventory import Entry

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from kv models ls.")]


EXAMPLES = """
kv models ls
kv models ls --all
kv models path smollm2
kv models verify
kv models rm smollm2
"""


def register(app: typer.Typer) -> None:
    group = App(epilog=EXAMPLES)
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
        bool, typer.Option("--all", "-a", help="Also list models that are known only by their sizes, for planning.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """List the models known by name and those downloaded from the hub. A star marks the default one.

    Instruct models chat; base models continue text, and kv chat refuses them. Whether a model runs: yes; hub = from the
    repository that kv estimate names; file = from a file of yours; no.
    """
    from kvcli.runtime.hub import inventory

    found = inventory.entries(shapes=all)
    if json:
        render.print_json("models ls", {"models": [_as_json(entry) for entry in found]})
        return
    rows = [
        [
            entry.name + ("*" if entry.default else ""),
            entry.kind or "-",
            entry.arch or "-",
            human_count(entry.parameters) if entry.parameters else "-",
            f"{entry.context_length:,}" if entry.context_length else "-",
            human_bytes(entry.size) if entry.size else "-",
            _here(entry),
            entry.runs,
            entry.license or "-",
        ]
        for entry in found
    ]
    headers = ["name", "kind", "arch", "params", "context", "size", "here", "runs", "license"]
    render.print_table(headers, rows, ctx.obj, right={3, 4, 5})


def _here(entry: Entry) -> str:
    """The word for how much of a model is on this disk."""
    if entry.damaged:
        return "damaged"
    if entry.unfinished or (entry.files and not entry.path):
        return f"{'yes, and' if entry.path else 'partial:'} {human_bytes(entry.unfinished)}"
    return "yes" if entry.path else "no"


def _as_json(entry: Entry) -> dict[str, object]:
    return {
        "model": entry.name,
        "model_title": entry.title,
        "kind": entry.kind or None,
        "arch": entry.arch or None,
        "parameters": entry.parameters or None,
        "context_length": entry.context_length or None,
        "file_bytes": entry.size or None,
        "license": entry.license or None,
        "default": entry.default,
        "present": entry.path is not None and not entry.damaged,
        "path": str(entry.path) if entry.path else None,
        "runs": entry.runs == "yes",
        "problem": entry.problem or None,
        "hf": entry.hf or None,
        "unfinished_bytes": entry.unfinished,
    }


def path(name: Name, json: JsonFlag = False) -> None:
    """Print the path of a downloaded model's file."""
    from kvcli.runtime.hub import inventory

    found = inventory.downloaded(name)
    render.print_path("models path", {"model": found.name, "path": str(found.path)}, json)


def verify(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One model; by default all.")] = "",
    json: JsonFlag = False,
) -> None:
    """Check downloaded models against their checksums; exit code 8 if one is damaged."""
    from kvcli.runtime.hub import inventory

    present = [entry for entry in inventory.here() if entry.path]
    rows: list[dict[str, object]] = []
    damaged = False
    for entry in [inventory.downloaded(name)] if name else present:
        row: dict[str, object] = {"model": entry.name, "path": str(entry.path), "ok": True, "problem": None}
        rows.append(row)
        try:
            with render.Progress(ctx.obj) as progress:
                inventory.verify(entry, progress)
        except CheckFailed as error:
            damaged = True
            row |= {"ok": False, "problem": error.message}
            if not json:
                render.print_error(error.message, error.hint, ctx.obj.color)
        except ModelError as error:
            if name:
                raise
            row |= {"ok": None, "problem": error.message}
            if not json:
                render.warn(error.message, ctx.obj)
        else:
            if not json:
                render.write_out(f"{entry.name}: ok\n")
    if json:
        render.print_json("models verify", {"models": rows})
    if damaged:
        raise typer.Exit(CheckFailed.exit_code)


def rm(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A name from kv models ls.")] = "",
    all: Annotated[bool, typer.Option("--all", help="Every model that is on this disk.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> None:
    """Delete the files of a downloaded model, and what an interrupted download left of it."""
    from kvcli.runtime.hub import inventory

    check_choice([name] if name else [], all, "the name of a model", "kv models ls lists what is here")
    found = inventory.here() if all else inventory.removable(name)
    sizes = {entry.name: _bytes(entry) for entry in found}
    names = ", ".join(entry.name + ("" if entry.path else " (unfinished)") for entry in found)
    things = [Removable(entry.name, partial(inventory.remove, entry)) for entry in found]
    remove(things, f"{names} ({human_bytes(sum(sizes.values()))})", yes, json, ctx.obj)
    if json:
        rows = [{"model": name, "size_bytes": size} for name, size in sizes.items()]
        render.print_json("models rm", {"removed": rows, "removed_bytes": sum(sizes.values())})


def _bytes(entry: Entry) -> int:
    """What it takes on this disk, downloads that were interrupted included."""
    return sum(path.stat().st_size for path in entry.files)
