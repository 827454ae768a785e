"""`kv cache`: prompt caches on disk. What is there, whether it is whole, why it fits a prompt; making and removing."""

from __future__ import annotations

import typer

from kvcli.cli.app import App
from kvcli.cli.commands.cache.building import build
from kvcli.cli.commands.cache.checking import explain, verify
from kvcli.cli.commands.cache.counting import stats
from kvcli.cli.commands.cache.listing import ls, path, show
from kvcli.cli.commands.cache.pinning import pin, unpin
from kvcli.cli.commands.cache.removing import prune, rm
from kvcli.cli.globaloptions import require_command
from kvcli.cli.helptext import STORES

EXAMPLES = """
kv cache ls
kv cache ls --tree
kv cache show 3f2a
kv cache stats
kv cache pin 3f2a
kv cache unpin 3f2a
kv cache build -f book.txt -o book.kv
kv run --prompt-cache book.kv -f book.txt "Who is the narrator?"
kv cache explain book.kv -f book.txt
kv cache verify --recompute 8
kv cache rm 3f2a
kv cache prune --max-size 1GiB --older-than 3d
kv cache path
"""


def register(app: typer.Typer) -> None:
    group = App(epilog=EXAMPLES)
    group.callback(invoke_without_command=True)(cache)
    for command in (ls, show, stats, build, explain, verify, pin, unpin, rm, prune, path):
        group.command(command.__name__)(command)
    app.add_typer(group, name="cache", rich_help_panel=STORES)


def cache(ctx: typer.Context) -> None:
    """List, count, explain, check, create, pin and remove prompt caches."""
    require_command(ctx)
