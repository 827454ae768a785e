"""`ToolCalls`: the calls of one answer, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcli.runtime.text.tools.parts import CallPart, joined


@dataclass(frozen=True)
class ToolCalls:
    """`whole`: names with arguments; `cut`: the tool whose call is not whole, "" = none is."""

    whole: list[dict[str, Any]]
    cut: str

    @classmethod
    def of(cls, parts: Iterable[CallPart], count: int) -> ToolCalls:
        """`count`: how many are whole."""
        found = joined(parts)
        whole = [{"name": name, "arguments": json.loads(text)} for name, text in found[:count]]
        return cls(whole, found[-1][0] if len(found) > count else "")

    @property
    def lines(self) -> str:
        """JSON, a call on each."""
        return "".join(json.dumps(call, ensure_ascii=False) + "\n" for call in self.whole)
