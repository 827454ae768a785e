"""A conversation as text: to be read on a terminal, and as a Markdown or JSON file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvcli.cli import jsonobjects
from kvcli.cli.commands.chat.typedpath import path_of
from kvcli.cli.streams import neutralise
from kvcli.errors import OutputError, UsageError
from kvcli.runtime.promptcache.attachments import Attachments
from kvcli.words import counted

Messages = list[dict[str, str]]  # role and content; a system message, if any, in front

SHOWN_LINES, SHOWN_CHARACTERS = 4, 300  # of a message that is shown in part
KEYS = ("role", "content", "reasoning_content")
HEADING = re.compile(r"^(\\*)## (System|User|Assistant)[ \t]*$", re.MULTILINE)  # of a message, or escaped
_NAMES = {"system": "System", "user": "User", "assistant": "Assistant"}


def model_name(model: str) -> str:
    """What the user calls a model, without folders."""
    return os.path.basename(model).removesuffix(".gguf") or model


def turns(messages: Messages) -> int:
    """How many messages were answered."""
    return sum(message["role"] == "assistant" for message in messages)


def shown(messages: Iterable[dict[str, str]], attachments: Attachments, shorten: bool = False) -> str:
    """Messages for a terminal, of each text all or the beginning: the user's have a > in front of each line, and name
    the files that they begin with."""
    marks = {"user": "> ", "system": "system: "}
    blocks = []
    for message in messages:
        mark = marks.get(message["role"], "")
        files, text = attachments.part(message["content"])
        lines = [f"[{name}, {counted(len(content.splitlines()), 'line')}]" for name, content in files]
        lines += (shortened(text) if shorten else text).split("\n")
        blocks.append("".join(f"{mark}{neutralise(line)}\n" for line in lines))
    return "\n".join(blocks)


def last_turn(messages: Messages, attachments: Attachments) -> str:
    """The last message of the user and its answer, shortened, for a terminal."""
    start = max(i for i, message in enumerate(messages) if message["role"] == "user")
    return shown(messages[start:], attachments, shorten=True)


def shortened(text: str) -> str:
    """The beginning of a text, with dots where there is more."""
    lines = text.strip("\n").split("\n")
    part = "\n".join(lines[:SHOWN_LINES])[:SHOWN_CHARACTERS]
    return part if part == "\n".join(lines) else f"{part.rstrip()} [...]"


def first_words(text: str, most: int = 60) -> str:
    """The beginning of a text on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most].rstrip()}..."


def as_markdown(messages: Messages, title: str) -> str:
    """A document with a heading for each message. A line of a message that looks like such a heading gets a backslash
    in front, which Markdown does not show."""
    parts = [f"# {title}"]
    parts += [f"## {_NAMES[m['role']]}\n\n{HEADING.sub(_escaped, m['content'].strip())}" for m in messages]
    return "\n\n".join(parts) + "\n"


def _escaped(heading: re.Match[str]) -> str:
    return f"\\{heading[0]}"


def as_object(messages: Messages, model: str, session: str = "", branch: str = "") -> dict[str, Any]:
    """For JSON: messages as chat templates and other programs take them."""
    return {
        "session": session or None,
        "branch": branch or None,
        "model": model,
        "messages": [{key: text for key, text in m.items() if key in KEYS} for m in messages],
    }


def export(
    name: str,
    messages: Messages,
    model: str,
    session: str = "",
    branch: str = "",
    whole: dict[str, Any] | None = None,
) -> Path:
    """Write a file, .json or .md, that is not there yet; `name` as it was typed. `whole`: for JSON, all that a saved
    chat is. Raises UsageError, OutputError."""
    name = path_of(name)
    path = Path(name)
    if path.suffix not in (".md", ".json"):
        raise UsageError(f"{name} ends neither in .md nor in .json", "Markdown is to be read, JSON for programs")
    if path.suffix == ".md":
        text = as_markdown(messages, session or f"Chat with {model_name(model)}")
    else:
        described = {**as_object(messages, model, session, branch), "whole": whole}
        value = jsonobjects.finished("chat export", described)
        text = json.dumps(value, ensure_ascii=False, indent=2) + "\n"
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{name} exists and is left as it is", "name another file") from None
    except OSError as error:
        raise OutputError(f"cannot write {name}: {error.strerror or error}") from None
    return path
