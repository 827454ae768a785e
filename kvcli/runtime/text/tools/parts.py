"""`CallPart`: what came of a call while it is written. No torch, and no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class CallPart:
    """A piece of a call. `number`: of the call, from 0; `name`: of the tool, in the first piece, "" in others;
    `arguments`: their JSON, as far as it is new."""

    number: int
    name: str
    arguments: str


def joined(parts: Iterable[CallPart]) -> list[tuple[str, str]]:
    """The name and the arguments of each call."""
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.number == len(found):
            found.append((part.name, ""))
        name, text = found[part.number]
        found[part.number] = name, text + part.arguments
    return found
