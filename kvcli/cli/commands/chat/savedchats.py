"""`kv chat ls`, `show`, `export` and `rm`: chats that are saved. Never imports torch."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcli.cli import cachefiles, chatcost, jsonobjects, render
from kvcli.cli.commands.chat import transcript
from kvcli.cli.confirm import Removable, check_choice, remove
from kvcli.cli.flags.promptcache import CacheDir, store_folder
from kvcli.cli.invocation import JsonFlag
from kvcli.cli.streams import OutputFile
from kvcli.errors import KVError, OutputError, UsageError
from kvcli.runtime.promptcache import sessions, store
from kvcli.runtime.promptcache.chatfiles import OWNER
from kvcli.words import human_bytes

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name from kv chat ls.")]
Branch = Annotated[
    str, typer.Option("--branch", metavar="NAME", help="Another branch of the chat.", show_default="where it was left")
]


def ls(ctx: typer.Context, cache_dir: CacheDir = None, json: JsonFlag = False) -> None:
    """List the saved chats, the last used first, with what they take on disk: text, and rows of the chat alone."""
    rows_of = chatcost.rows_of(store_folder(cache_dir)) if sessions.names() else {}
    found = [_described(name, rows_of.get(name, 0)) for name in sessions.names()]
    if json:
        render.print_json("chat ls", {"sessions": found})
        return
    if not found:
        render.announce("no chat is saved; kv chat --session NAME saves one", ctx.obj)
        return
    rows = [_row(each) for each in found]
    heads = ["name", "turns", "branches", "size", "saved", "model", "begins"]
    render.print_table(heads, rows, ctx.obj, right={1, 2, 3})


def _row(chat: dict[str, Any]) -> list[str]:
    size = human_bytes(chat["text_bytes"] + chat["rows_bytes"])
    if chat["problem"]:
        return [chat["session"], "-", "-", size, "-", "-", chat["problem"]]
    counts = [str(chat["turns"]), str(len(chat["branches"])), size]
    when = datetime.fromisoformat(chat["saved_at"]).astimezone().strftime("%Y-%m-%d %H:%M")
    return [chat["session"], *counts, when, transcript.model_name(chat["model"] or "") or "-", chat["begins"]]


def _described(name: str, rows_bytes: int) -> dict[str, Any]:
    """What is listed of a chat; of a damaged one, why it cannot be used."""
    sizes = {"text_bytes": chatcost.text_bytes(name), "rows_bytes": rows_bytes}
    values: dict[str, Any] = {"session": name, "model": None, "turns": None, "branch": None, "branches": [], **sizes}
    try:
        found = sessions.read(name)
    except KVError as error:
        return {**values, "saved_at": None, "begins": None, "problem": error.message}
    messages = found.messages()
    first = found.attachments.part(next((m["content"] for m in messages if m["role"] == "user"), ""))[1]
    return {
        "session": name,
        "model": found.model or None,
        "turns": transcript.turns(messages),
        "branch": found.branch,
        "branches": sorted(found.states),
        "saved_at": datetime.fromtimestamp(found.saved_at, timezone.utc).isoformat(timespec="seconds"),
        "begins": transcript.first_words(first, 40),
        **sizes,
        "problem": None,
    }


def show(name: Name, branch: Branch = "", json: JsonFlag = False) -> None:
    """Print what was said in a saved chat."""
    found = sessions.read(name)
    messages = found.messages(branch)
    if json:
        render.print_json("chat show", transcript.as_object(messages, found.model, name, branch or found.branch))
    else:
        render.write_out(transcript.shown(messages, found.attachments))


def export(
    name: Name,
    branch: Branch = "",
    md: Annotated[bool, typer.Option("--md", help="Markdown, which is the default.")] = False,
    json: JsonFlag = False,
    output: Annotated[
        str | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this new file; JSON to one in .json.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a saved chat as Markdown or JSON, which kv chat import reads.

    JSON has the messages, and all that the chat is (its branches, tokens and files), unless --branch names one.
    """
    if md and json:
        raise UsageError("--md and --json cannot be used together", "give one of them")
    if output is not None and os.path.isfile(output) and not force:
        raise UsageError(f"{output} exists and is left as it is", "--force replaces it; or name another file")
    found = sessions.read(name)
    messages = found.messages(branch)
    value = transcript.as_object(messages, found.model, name, branch or found.branch)
    value["whole"] = None if branch else sessions.value_of(name)
    as_json = json or (output is not None and output.endswith(".json") and not md)
    text = jsonobjects.line("chat export", value) if as_json else transcript.as_markdown(messages, name)
    if output is None:
        render.write_out(text)
        return
    with OutputFile(output) as file:
        file.write(text)
        file.whole = True
    if json:
        render.print_json("chat export", {**value, "path": output})


def rm(
    ctx: typer.Context,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Names from kv chat ls.")] = None,
    all: Annotated[bool, typer.Option("--all", help="Every saved chat.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
    json: JsonFlag = False,
) -> None:
    """Delete saved chats, and the rows on disk that no other prompt shares with them."""
    check_choice(names or [], all, "names", "kv chat ls lists them")
    wanted = sessions.names() if all else list(dict.fromkeys(names or []))
    there = sessions.names()
    for name in wanted:
        if sessions.check_name(name) not in there:
            raise UsageError(f"there is no saved chat '{name}'", "kv chat ls lists them")
    remove([Removable(name, partial(sessions.remove, name)) for name in wanted], ", ".join(wanted), yes, json, ctx.obj)
    freed = _remove_rows(wanted, store_folder(cache_dir)) if wanted else 0
    if freed:
        render.notice(f"removed {human_bytes(freed)} of rows of theirs", ctx.obj)
    if json:
        render.print_json("chat rm", {"removed": [{"session": name} for name in wanted], "removed_bytes": freed})


def _remove_rows(names: list[str], root: Path) -> int:
    """Delete what these chats alone have in the store; how many bytes. Raises OutputError."""
    freed = 0
    for file in map(cachefiles.describe, cachefiles.stored(root)):
        if file.about.get(OWNER) in names:
            try:
                store.remove(file.path)
            except OSError as error:
                raise OutputError(f"cannot remove {file.path}: {error.strerror or error}") from None
            freed += file.size
    return freed
