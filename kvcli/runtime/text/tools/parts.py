"""`CallPart`: what came of a call while it is written. No torch, and no numpy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CallPart:
    """A piece of a call. `number`: of the call, from 0; `name`: of the tool, in the first piece, "" in others;
    `arguments`: their JSON, as far as it is new."""

    number: int
    name: str
    arguments: str
