"""`kv pull`: download a model; its path is the output."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcli.cli import render
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import Invocation, JsonFlag
from kvcli.cli.locate import showing_download

EXAMPLES = """
kv pull smollm2
kv pull org/name-GGUF:Q4_K_M
kv pull org/name:safetensors
kv run -m "$(kv pull smollm2)" "Hello"
"""


def register(app: typer.Typer) -> None:
    app.command("pull", rich_help_panel=STORES, epilog=EXAMPLES)(pull)


def pull(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="A name (kv models ls), org/repo[:quant] of the hub, or an address there."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Download again even if the file is already here.")] = False,
    json: JsonFlag = False,
) -> None:
    """Download a model, verify it and print the path of its file or folder."""
    from kvcli.runtime.formats.safetensors import weight_files
    from kvcli.runtime.formats.splitgguf import part_paths
    from kvcli.runtime.hub import modelfiles

    invocation: Invocation = ctx.obj
    with showing_download(invocation) as (progress, notice):
        path = modelfiles.pull(model, force, invocation.offline, progress, notice)
    if json:
        opened = weight_files(path)[0].values() if path.is_dir() else ()
        size = sum(file.size for file in opened) or sum(part.stat().st_size for part in part_paths(path))
        render.print_json("pull", {"model": model, "path": str(path), "file_bytes": size})
    else:
        render.write_out(f"{path}\n")
