"""`kv cache rm` and `prune`: removing what the store keeps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvcli.cli import cachefiles, render
from kvcli.cli.commands.cache.arguments import nothing_in
from kvcli.cli.confirm import Removable, check_choice, remove
from kvcli.cli.flags.promptcache import (
    CACHE_SIZE,
    CACHE_TTL,
    CacheDir,
    parse_time,
    size_option,
    store_folder,
    time_option,
)
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import OutputError
from kvcli.runtime.host.memory import parse_size
from kvcli.runtime.promptcache import store
from kvcli.words import counted, human_bytes

Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]
NAMED = 3  # files that a question names


def rm(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="ID...", help="Ids from kv cache ls.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Everything that is stored.")] = False,
    yes: Yes = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    json: JsonFlag = False,
) -> None:
    """Remove stored prompts. What goes on from them stays: it is of use again when they are computed again."""
    root = store_folder(cache_dir)
    check_choice(names or [], all, "ids", "kv cache ls lists them")
    files = cachefiles.stored(root) if all else cachefiles.of_store(names or [], root, "removes")
    _remove(files, root, yes, dry_run, json, ctx.obj)


def prune(
    ctx: typer.Context,
    max_size: Annotated[str, size_option("--max-size", "Maximum size of what stays.")] = CACHE_SIZE,
    older_than: Annotated[str, time_option("--older-than", "Also remove what was unused for this long.")] = CACHE_TTL,
    yes: Yes = False,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    json: JsonFlag = False,
) -> None:
    """Remove what was unused for long and, where the rest is too large, what is worth least; never what is pinned.

    Also what interrupted processes left.
    """
    root = store_folder(cache_dir)
    limits = store.Limits(parse_size(max_size, "--max-size"), parse_time(older_than, "--older-than"))
    gone = [entry.path for entry in store.prune(root, limits, dry_run=True)]
    _remove(gone, root, yes, dry_run, json, ctx.obj)
    if not dry_run:
        try:
            store.prune(root, limits)
        except OSError as error:
            raise OutputError(f"cannot clear {root}: {error.strerror or error}") from None


def _remove(files: list[Path], root: Path, yes: bool, dry_run: bool, json: bool, invocation: Invocation) -> None:
    found = [cachefiles.describe(file) for file in files]
    size = sum(file.size for file in found)
    pinned = sum(file.pinned for file in found)
    what = f"{counted(len(found), 'file')}, {human_bytes(size)}" + (f", {pinned:,} pinned" if pinned else "")
    if found and dry_run:
        render.announce(f"would remove {what}", invocation)
    else:
        named = [f"{cachefiles.id_of(file.path)} ({file.prompt[:40].rstrip()})" for file in found[:NAMED]]
        more = [f"{len(found) - NAMED:,} more"] if len(found) > NAMED else []
        nothing = "there is nothing to remove" if cachefiles.stored(root) else nothing_in(root)
        things = [Removable(cachefiles.id_of(file), partial(_unlink, file)) for file in files]
        remove(things, f"{', '.join([*named, *more])}: {what}", yes, json, invocation, what, nothing)
    if json:
        removed = [{"id": cachefiles.id_of(f.path), "path": str(f.path), "size_bytes": f.size} for f in found]
        render.print_json("cache rm", {"dry_run": dry_run, "removed_bytes": size, "removed": removed})
        return
    for file in files:
        render.write_out(f"{cachefiles.id_of(file)}\n")


def _unlink(file: Path) -> None:
    """Raises OutputError."""
    try:
        store.remove(file)
    except OSError as error:
        raise OutputError(f"cannot remove {file}: {error.strerror or error}") from None
