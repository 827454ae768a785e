"""DRY ("don't repeat yourself"): a token that would continue a repetition loses the more, the longer it is already.

As llama.cpp has it: the penalty is multiplier * base ^ (length - allowed length) for the longest repeated end of the
text that the token would continue, from the allowed length on. Repetitions lie within the last N tokens and do not
reach over a sequence breaker. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcli.runtime.engine.repeats import Repeats

_EVERYTHING = 1 << 40  # tokens
_LARGEST_EXPONENT = math.log(float(np.finfo(np.float32).max))


class Dry:
    """The penalties after a text that grows. `effective`: the sampling values in force, by option name."""

    def __init__(self, effective: Mapping[str, Any], token_bytes: Callable[[int], bytes]) -> None:
        self.multiplier, self.base = effective["dry_multiplier"], effective["dry_base"]
        self.allowed, last_n = effective["dry_allowed_length"], effective["dry_penalty_last_n"]
        self.window = _EVERYTHING if last_n < 0 else last_n
        self.breakers = [text.encode() for text in effective["dry_sequence_breakers"]]
        self.token_bytes = token_bytes
        steps = int(_LARGEST_EXPONENT / math.log(self.base)) if self.base > 1.000001 else 0
        self.longest = self.allowed + steps  # a longer repetition costs no more
        self._text: Sequence[int] = ()
        self._repeats = Repeats(self.window)
        self._tail = b""  # of the text, where a breaker may have begun
        self._unbroken = 0  # tokens since the last breaker

    def penalties(self, text: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids int64 [n], each once, and what their logits lose, float32 [n].

        A `text` that was given before must have changed by appending only.
        """
        self._follow(text)
        lengths = self._repeats.lengths
        inside = self.window - np.arange(1, len(lengths) + 1)  # a repetition begins within the window
        lengths = np.minimum(np.minimum(lengths, inside), min(self._unbroken, self.longest))
        found = np.flatnonzero(lengths >= self.allowed)
        ids, where = np.unique(self._repeats.backwards[found], return_inverse=True)
        most = np.zeros(len(ids), np.int64)
        np.maximum.at(most, where, lengths[found])
        penalised = np.array([not self._breaks(self.token_bytes(int(token))) for token in ids], bool)
        amounts = self.multiplier * np.power(self.base, most[penalised] - self.allowed, dtype=np.float64)
        return ids[penalised].astype(np.int64), amounts.astype(np.float32)

    def _follow(self, text: Sequence[int]) -> None:
        if text is self._text and len(text) >= self._repeats.n_tokens:
            for token in text[self._repeats.n_tokens :]:
                self._repeats.push(token)
                self._note(token)
            return
        self._text, self._tail, self._unbroken = text, b"", 0
        self._repeats = Repeats(self.window, text, self.longest)
        for token in text[-self.longest :]:
            self._note(token)

    def _note(self, token: int) -> None:
        """Count the tokens since the last one in which a breaker ended."""
        piece = self.token_bytes(token)
        ended = self._breaks(self._tail + piece) if piece else False
        self._unbroken = 0 if ended else self._unbroken + 1
        longest = max(map(len, self.breakers), default=1) - 1
        self._tail = b"" if ended else (self._tail + piece)[-longest:] if longest else b""

    def _breaks(self, text: bytes) -> bool:
        return any(breaker in text for breaker in self.breakers)
