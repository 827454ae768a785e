"""What all answers of a chat took."""

from __future__ import annotations

from dataclasses import dataclass

from kvcli.runtime.engine.events import Usage
from kvcli.words import counted


@dataclass
class Totals:
    """Tokens of all answers of a session."""

    answers: int = 0
    prompt: int = 0
    reused: int = 0
    generated: int = 0

    def add(self, usage: Usage) -> None:
        self.answers += 1
        self.prompt += usage.prompt_tokens
        self.reused += usage.cache_read_tokens
        self.generated += usage.completion_tokens

    def __str__(self) -> str:
        share = 100 * self.reused / max(1, self.prompt)
        return (
            f"session: {counted(self.answers, 'answer')}, reused {self.reused:,} of {self.prompt:,} prompt tokens"
            f" ({share:.1f} %), prefilled {self.prompt - self.reused:,}, generated {self.generated:,}"
        )
