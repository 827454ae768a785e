"""`kv cache`: prompt caches on disk. What is there, whether it is whole, why it fits a prompt; making and removing."""

from __future__ import annotations

import typer

from kvcli.app import App
from kvcli.commands.cache.building import build
from kvcli.commands.cache.checking import explain, verify
from kvcli.commands.cache.listing import ls, path, show
from kvcli.commands.cache.removing import prune, rm
from kvcli.globaloptions import require_command
from kvcli.helptext import STORES


def register(app: typer.Typer) -> None:
    group = App()
    group.callback(invoke_without_command=True)(cache)
    for command in (ls, show, build, explain, verify, rm, prune, path):
        group.command(command.__name__)(command)
    app.add_typer(group, name="cache", rich_help_panel=STORES)


def cache(ctx: typer.Context) -> None:
    """List, explain, check, make and remove prompt caches."""
    require_command(ctx)
