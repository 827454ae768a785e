"""`kv ps`: the models that stay in memory behind commands."""

from __future__ import annotations

from typing import Any

import typer

from kvcli.cli import keeping, render
from kvcli.cli.helptext import STORES
from kvcli.cli.invocation import JsonFlag
from kvcli.keepalive import socketfolder
from kvcli.words import human_bytes

EXAMPLES = """
kv run --keep-alive 5m "Why is the sky blue?"
kv ps
"""


def register(app: typer.Typer) -> None:
    app.command("ps", rich_help_panel=STORES, epilog=EXAMPLES)(ps)


def ps(ctx: typer.Context, json: JsonFlag = False) -> None:
    """List the models that stay in memory behind a command with --keep-alive, and for how long."""
    found = [about for _, about in keeping.processes()]
    if json:
        render.print_json("ps", {"processes": found})
        return
    if not found:
        render.announce("no model is loaded", ctx.obj)
        return
    rows = [
        [
            about["model"],
            str(about["pid"]),
            about["device"],
            human_bytes(about["memory_bytes"]),
            _of_gpu(about),
            _left(about),
        ]
        for about in found
    ]
    render.print_table(["model", "pid", "device", "memory", "GPU memory", "exits"], rows, ctx.obj, right={1, 3, 4})


def _of_gpu(about: dict[str, Any]) -> str:
    """What a process holds of a GPU; one of an older version tells nothing of that."""
    size = about.get("gpu_bytes", 0)
    return human_bytes(size) if size else "-"


def _left(about: dict[str, Any]) -> str:
    """When a process will exit, if nothing is asked of it."""
    if about.get("state", socketfolder.READY) != socketfolder.READY:
        return f"it is {about['state']}"
    if about["commands"]:
        return "it is answering"
    if about["left_s"] is None:
        return "after kv stop"
    seconds = round(about["left_s"])
    return f"in {seconds // 60} min {seconds % 60} s" if seconds >= 60 else f"in {seconds} s"
