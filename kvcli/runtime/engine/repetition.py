"""`Repetition`: a prompt that is repeated a step at a time, beside what else an engine computes."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.engine import replaying

if TYPE_CHECKING:
    import torch


class Repetition:
    """Of the prompt of a sequence. `total`: tokens that it takes, 0 = there is none; `logits`: of the prompt's last
    row, for what comes behind it."""

    def __init__(self, engine: replaying.Computing, seq: Sequence) -> None:
        self.engine, self.seq, self.total = engine, seq, 0
        self.logits: torch.Tensor | None = None
        self._steps: Generator[int, None, None] | None = None

    @property
    def begun(self) -> bool:
        """Whether it is under way."""
        return self._steps is not None

    def expect(self, prompt: list[int]) -> None:
        """The prompt is coming. Raises ContextOverflow where the context has no room to repeat it."""
        self.total = replaying.replayed(self.engine, self.seq, prompt)

    def begin(self, logits: torch.Tensor | None) -> bool:
        """The prompt is there; whether it is repeated."""
        if self.total:
            self.logits = None if logits is None else logits.clone()
            self._steps = replaying.replay(self.engine, self.seq)
        return self.total > 0

    def step(self) -> int:
        """Compute some more; how many tokens there are now, 0 = it is over. Raises DoesNotFit."""
        assert self._steps is not None
        done = next(self._steps, 0)
        if not done:
            self.close()
        return done

    def close(self) -> None:
        """Compute no more of it."""
        if self._steps is not None:
            self._steps.close()
            self._steps = None
