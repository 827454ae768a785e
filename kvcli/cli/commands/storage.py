"""`kv storage`: what all folders of `kv` hold, and clearing them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from kvcli import paths
from kvcli.cli import render
from kvcli.cli.app import App
from kvcli.cli.confirm import Removable, check_choice, remove
from kvcli.cli.flags.promptcache import CacheDir, store_folder
from kvcli.cli.globaloptions import require_command
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import JsonFlag
from kvcli.errors import UsageError
from kvcli.words import counted, human_bytes

if TYPE_CHECKING:
    from kvcli.cli.storage import Kind


EXAMPLES = """
kv storage ls
kv storage rm prompts
kv storage rm --all
"""


def register(app: typer.Typer) -> None:
    group = App(epilog=EXAMPLES)
    group.callback(invoke_without_command=True)(storage)
    group.command("ls")(ls)
    group.command("rm")(rm)
    app.add_typer(group, name="storage", rich_help_panel=STORES)


def storage(ctx: typer.Context) -> None:
    """Show what kv keeps on this disk, and clear it."""
    require_command(ctx)


def ls(ctx: typer.Context, cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """List everything that kv keeps on this disk: models, prompt caches, chats and the rest."""
    from kvcli.cli.storage import kinds

    found = kinds(store_folder(cache_dir))
    total = sum(kind.size_bytes for kind in found)
    if json:
        rows = [kind.as_object() for kind in found]
        render.print_json("storage ls", {"storage": rows, "total_bytes": total})
        return
    table = [[k.name, str(len(k.files)), human_bytes(k.size_bytes), k.title, paths.shown(k.place)] for k in found]
    table.append(["total", str(sum(len(k.files) for k in found)), human_bytes(total), "", ""])
    render.print_table(["kind", "files", "size", "what", "where"], table, ctx.obj, right={1, 2})


def rm(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="[KIND]...", help="Kinds from kv storage ls.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every kind, including saved chats.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
    json: JsonFlag = False,
) -> None:
    """Remove everything of one or more kinds.

    Of the hub's cache, which other programs share, only GGUF models go.
    """
    from kvcli.cli.storage import clear, kinds

    known = kinds(store_folder(cache_dir))
    check_choice(names or [], all, "kinds", "kv storage ls lists them")
    for name in names or []:
        if name not in (kind.name for kind in known):
            raise UsageError(f"there is no kind '{name}'", f"the kinds are {', '.join(kind.name for kind in known)}")
    found = [kind for kind in known if kind.files and (all or kind.name in (names or []))]
    rows, size = [kind.as_object() for kind in found], sum(kind.size_bytes for kind in found)
    things = [Removable(_amount(kind), partial(clear, kind)) for kind in found]
    remove(things, ", ".join(map(_amount, found)), yes, json, ctx.obj)
    if json:
        render.print_json("storage rm", {"removed": rows, "removed_bytes": size})


def _amount(kind: Kind) -> str:
    return f"{kind.name} ({counted(len(kind.files), 'file')}, {human_bytes(kind.size_bytes)})"
