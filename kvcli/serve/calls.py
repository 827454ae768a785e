"""Tools in calls: which may be called, the calls of earlier answers, and those of an answer while it is written."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvcli.errors import UsageError
from kvcli.runtime.text.tools.parts import CallPart
from kvcli.runtime.text.tools.use import Tool, ToolChoice, tools_of

Json = dict[str, Any]
_LETTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """Nine letters and digits: Mistral's templates take no other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True)
class Asked:
    """The tools of a call, and how they may be called."""

    tools: tuple[Tool, ...]
    choice: ToolChoice


def asked(tools: list[Json] | None, choice: Any, several: bool | None) -> Asked | None:
    """As OpenAI's interfaces have it; None = nothing is to be called, and the model is told of no tools. Raises
    UsageError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise UsageError("`tool_choice` needs `tools` that are functions", "leave it out")
        return None
    found = tools_of(tools)
    if choice == "none":
        return None
    many = several is not False
    if choice in (None, "auto"):
        return Asked(found, ToolChoice(several=many))
    if choice == "required":
        return Asked(found, ToolChoice(True, (), many))
    return Asked(found, _named(choice, many))


def _named(choice: Any, several: bool) -> ToolChoice:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return ToolChoice(True, (_name(choice),), False)
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        mode, listed = (inner.get("mode"), inner.get("tools")) if isinstance(inner, dict) else (None, None)
        if mode in ("auto", "required") and isinstance(listed, list) and listed:
            return ToolChoice(mode == "required", tuple(map(_name, listed)), several)
    raise UsageError(
        "`tool_choice` must be none, auto, required, or name a function",
        'such as {"type": "function", "function": {"name": "..."}}',
    )


def _name(choice: Any) -> str:
    inner = choice.get("function", choice) if isinstance(choice, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise UsageError("`tool_choice` has a function without a `name`")
    return str(inner["name"])


def left_out(kinds: Iterable[str]) -> dict[str, str]:
    """The header of an answer whose model was not told of tools, which a server runs itself, of these types."""
    names = [re.sub(r"[^\w.-]", "?", kind[:40], flags=re.ASCII) for kind in dict.fromkeys(kinds)]
    return {"kv-tools-left-out": ", ".join(names[:20])} if names else {}


def told(calls: list[Json], path: str) -> list[Json]:
    """Calls of an earlier answer, as templates take them. Raises UsageError."""
    found = []
    for number, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"`{path}[{number}].function.name` is missing")
        found.append(
            one_told(call.get("id"), function["name"], function.get("arguments"), f"{path}[{number}].function")
        )
    return found


def one_told(id: Any, name: str, arguments: Any, path: str) -> Json:
    """One of them. Raises UsageError."""
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, (str, dict)) or not isinstance(id, (str, type(None))):
        raise UsageError(f"`{path}` has an `id` or `arguments` that are none", "arguments are an object, or its text")
    return {"id": id or new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class Called:
    """One call of an answer. `text`: its arguments so far, which are JSON when it is `whole`."""

    number: int
    name: str
    id: str = field(default_factory=new_id)
    text: str = ""
    whole: bool = False


class Calls:
    """The calls of one answer, as they come."""

    def __init__(self) -> None:
        self.found: list[Called] = []

    def take(self, parts: Iterable[CallPart]) -> Iterator[tuple[Called, str]]:
        """Each piece: the call, and what is new of its arguments."""
        for part in parts:
            if part.number == len(self.found):
                self.found.append(Called(part.number, part.name))
            call = self.found[part.number]
            call.text += part.arguments
            call.whole |= part.whole
            if part.arguments:
                yield call, part.arguments
