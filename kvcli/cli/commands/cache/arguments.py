"""What the commands of `kv cache` share: which files are meant, and where the store is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcli.cli import cachefiles, render
from kvcli.cli.cachefiles import Described
from kvcli.cli.flags.promptcache import store_folder
from kvcli.cli.invocation import Invocation
from kvcli.runtime.promptcache import worth

Name = Annotated[str, typer.Argument(metavar="FILE|ID", help="A path, or an id from kv cache ls.")]


def stored_files(cache_dir: str | None, invocation: Invocation) -> list[Path]:
    """Every file of the store, the one used last first; where there is none, that is said."""
    root = store_folder(cache_dir)
    files = cachefiles.stored(root)
    if not files:
        render.announce(nothing_in(root), invocation)
    return files


def nothing_in(root: Path) -> str:
    """What is said of a store that has no file."""
    return f"no prompts are kept in {root}: {'it is empty' if root.is_dir() else 'there is no such folder'}"


def described(cache_dir: str | None, invocation: Invocation) -> list[Described]:
    """What each of them says, and what is recorded of it."""
    record = worth.read(store_folder(cache_dir))
    return [cachefiles.describe(file, record) for file in stored_files(cache_dir, invocation)]
