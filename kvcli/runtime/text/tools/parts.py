"""`CallPart`: what came of a call while it is written. No torch, and no numpy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class CallPart:
    """A piece of a call. `number`: of the call, from 0; `name`: of the tool, in the first piece, "" in others;
    `arguments`: their JSON, as far as it is new; `whole`: the call has come to its end, in its last piece,
    which has no more of them."""

    number: int
    name: str
    arguments: str
    whole: bool = False


def joined(parts: Iterable[CallPart]) -> list[CallPart]:
    """Each call in one piece."""
    found: list[CallPart] = []
    for part in parts:
        if part.number == len(found):
            found.append(part)
            continue
        before = found[part.number]
        found[part.number] = replace(before, arguments=before.arguments + part.arguments, whole=part.whole)
    return found
