"""`kv cache pin` and `unpin`: what stays in the store whatever else comes."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcli.cli import cachefiles, render
from kvcli.cli.flags.promptcache import CACHE_SIZE, CacheDir, store_folder
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.errors import OutputError
from kvcli.runtime.host.memory import parse_size
from kvcli.runtime.promptcache import store
from kvcli.runtime.promptcache.store import entries, folders
from kvcli.words import human_bytes

Names = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids from kv cache ls.")]


def pin(ctx: typer.Context, names: Names, cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """Keep stored prompts, and what they go on from, until they are removed by name: they do not expire, and no others
    take their room."""
    _pin(names, True, cache_dir, json, ctx.obj)


def unpin(ctx: typer.Context, names: Names, cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """Let pinned prompts expire again."""
    _pin(names, False, cache_dir, json, ctx.obj)


def _pin(names: list[str], wanted: bool, cache_dir: str | None, json: bool, invocation: Invocation) -> None:
    root = store_folder(cache_dir)
    files = cachefiles.of_store(names, root, "pins")
    changed = []
    for file in files:
        try:
            changed.append(store.pin(file, wanted))
        except OSError as error:
            raise OutputError(f"cannot pin {file}: {error.strerror or error}") from None
    size = sum(entry.size for folder in folders(root) for entry in entries(folder) if entry.pinned)
    most = parse_size(CACHE_SIZE, "--cache-size")
    if wanted and size > most:
        told = f"what is pinned takes {human_bytes(size)}, more than --cache-size ({human_bytes(most)} if not given)"
        render.warn(f"{told}: no other prompts stay", invocation)
    if json:
        listed = [
            {"id": cachefiles.id_of(file), "path": str(file), "pinned": wanted, "changed": each}
            for file, each in zip(files, changed, strict=True)
        ]
        render.print_json("cache pin", {"entries": listed})
        return
    word = "pinned" if wanted else "no longer pinned"
    for file, each in zip(files, changed, strict=True):
        already = "" if each else " already" if wanted else ", and was not before"
        render.announce(f"{cachefiles.id_of(file)} is {word}{already}", invocation)
