"""`kv chat import`: a saved chat from a file, of kv's own or with messages alone. Never imports torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcli.cli import render
from kvcli.cli.commands.chat import transcript
from kvcli.cli.flags.checks import checked
from kvcli.cli.invocation import JsonFlag
from kvcli.errors import InputBytesError, UsageError
from kvcli.runtime.formats.boundedjson import MAX_DOCUMENT_BYTES
from kvcli.runtime.promptcache import sessions
from kvcli.words import counted

FORMS = "kv chat export writes such files; messages are a list of objects with role and content"


def _check_name(name: str) -> str:
    """Raises UsageError for a name that is none; "" = as in the file."""
    return name and sessions.check_name(name)


def import_(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON or Markdown, as kv chat export writes it.")],
    name: Annotated[
        str,
        typer.Option(
            "--name",
            "--session",
            metavar="NAME",
            help="What to call the chat.",
            show_default="as in the file",
            callback=checked(_check_name),
        ),
    ] = "",
    json: JsonFlag = False,
) -> None:
    """Make a saved chat of a file that kv chat export wrote: of JSON the same one, of Markdown its text.

    JSON of other programs is taken, too: a list of messages, or an object that has one in "messages".
    """
    text = _read(file)
    as_json = text.lstrip()[:1] in ("{", "[")
    value, called = _of_json(file, text) if as_json else _of_markdown(file, text)
    name = name or sessions.check_name(_name(called or Path(file).stem, file))
    sessions.create(name, value)
    found = sessions.read(name)
    turns = transcript.turns(found.messages())
    if json:
        render.print_json("chat import", {"session": name, "path": str(sessions.path_of(name)), "turns": turns})
        return
    render.announce(f"saved as {name}, {counted(turns, 'turn')}; kv chat --resume {name} goes on with it", ctx.obj)


def _read(name: str) -> str:
    """Raises UsageError, InputBytesError."""
    try:
        with open(name, "rb") as file:
            data = file.read(MAX_DOCUMENT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from None
    if len(data) > MAX_DOCUMENT_BYTES:
        raise UsageError(f"{name} is too large for a chat", FORMS)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputBytesError(f"{name} is no text: byte {error.start:,} is not UTF-8", FORMS) from None


def _name(text: str, file: str) -> str:
    """A name for a chat, from what its file calls it."""
    found = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:64]
    if not found:
        raise UsageError(f"{file} says no name for the chat", "--name gives one")
    return found


def _of_json(file: str, text: str) -> tuple[dict[str, Any], str]:
    """What a session's file is to have, and what the chat is called there. Raises UsageError."""
    import json

    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is no JSON: {error}", FORMS) from None
    if isinstance(value, list):
        value = {"messages": value}
    whole, called = value.get("whole"), value.get("session")
    called = called if isinstance(called, str) else ""
    if whole is None:
        model = value.get("model")
        return _fresh(file, value.get("messages"), model if isinstance(model, str) else ""), called
    try:
        if whole["kv_session"] != sessions.VERSION:
            raise UsageError(f"{file} was written by another version of kv", "export the chat again")
        found = sessions.parsed("imported", whole, 0.0)
        for state in found.states.values():
            _check(file, state["messages"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{file} is damaged: its chat makes no sense ({type(error).__name__})", FORMS) from None
    return whole, called


def _of_markdown(file: str, text: str) -> tuple[dict[str, Any], str]:
    """As above, from headings and what stands below each."""
    found = [each for each in transcript.HEADING.finditer(text) if not each[1]]
    if not found:
        raise UsageError(f"{file} is no chat: it has no heading like '## User', and is no JSON", FORMS)
    messages = []
    for this, following in zip(found, [*found[1:], None], strict=True):
        content = text[this.end() : following.start() if following else len(text)].strip()
        content = transcript.HEADING.sub(lambda heading: heading[0][1:], content)
        messages.append({"role": this[2].lower(), "content": content})
    title = re.match(r"\s*# (.+)", text)
    return _fresh(file, messages, ""), title[1].strip() if title else ""


def _fresh(file: str, messages: Any, model: str) -> dict[str, Any]:
    """A session's file with messages alone, whose tokens are made when the chat goes on. `model`: "" = not known.
    Raises UsageError."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{file} is no chat: it has no messages", FORMS)
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UsageError(f"{file}: message {number} has no role and content that are text", FORMS)
    kept = [
        {key: text for key, text in m.items() if key in transcript.KEYS and isinstance(text, str)} for m in messages
    ]
    system = kept.pop(0)["content"] if kept[0]["role"] == "system" else None
    _check(file, kept)
    state = {"system": system, "messages": kept, "chunks": []}
    return {
        "kv_session": sessions.VERSION,
        "model": model,
        "hashes": {},
        "branch": sessions.MAIN,
        "branches": {sessions.MAIN: state},
        "files": {},
    }


def _check(file: str, messages: list[dict[str, str]]) -> None:
    """Raises UsageError unless questions and answers take turns."""
    for number, message in enumerate(messages):
        expected = ("user", "assistant")[number % 2]
        if message["role"] != expected:
            raise UsageError(
                f"{file}: behind {counted(number, 'message')} there is one of '{message['role']}', not of '{expected}'",
                "questions and answers take turns; a system message comes first",
            )
