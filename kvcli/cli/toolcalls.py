"""`ToolCalls`: the calls of one answer, for people and for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvcli.runtime.text.tools.parts import CallPart, joined
from kvcli.runtime.text.tools.schemas import loads


@dataclass(frozen=True)
class ToolCalls:
    """`whole`: names with arguments; `cut`: the tool whose call is not whole, "" = none is."""

    whole: list[dict[str, Any]]
    cut: str

    @classmethod
    def of(cls, parts: Iterable[CallPart]) -> ToolCalls:
        found = joined(parts)
        whole = [{"name": call.name, "arguments": loads(call.arguments)} for call in found if call.whole]
        return cls(whole, next((call.name for call in reversed(found) if not call.whole), ""))

    @property
    def lines(self) -> str:
        """JSON, a call on each."""
        return "".join(json.dumps(call, ensure_ascii=False) + "\n" for call in self.whole)
