"""Where a text repeats itself: how long it has been saying what it said before, for every distance back. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcli.runtime.engine.events import Loop

# An answer is in a loop when it ends in so many tokens or more that are so many rounds or more of the same tokens, of
# so many or fewer. Of 1,526 pieces of up to 4,096 tokens of code, markup, data and prose none does (two do with 256).
LOOP_TOKENS, LOOP_TIMES, LOOP_PERIOD = 512, 4, 512
_EVERY = 8  # tokens: so often a detector looks
_NOTHING = -1  # in place of a token


class Repeats:
    """For every distance d up to `reach`: how many of the last tokens are those d places before them.

    A new token costs two operations on arrays of that many numbers, or of as many as there are tokens.
    """

    def __init__(self, reach: int, text: Sequence[int] = (), counted: int = 0) -> None:
        """`text`: what is there already. Of its tokens the last `counted` are compared with those before, so no
        length is known beyond that."""
        self.n_tokens, self._reach = 0, reach
        self._backwards = self._differs = self._differed = np.empty(0, np.int32)
        first = max(0, len(text) - counted)
        self._make_room(max(256, 2 * len(text)), np.array(text[:first][::-1], np.int32))
        for token in text[first:]:
            self.push(token)

    def _make_room(self, size: int, backwards: np.ndarray) -> None:
        """Room for `size` tokens, of which these are there, the last one first."""
        distances = min(self._reach, size)
        self.n_tokens, self._room = len(backwards), size - len(backwards)
        self._backwards = np.full(size + distances, _NOTHING, np.int32)
        self._backwards[self._room : size] = backwards
        differed = np.full(distances, self.n_tokens)
        differed[: len(self._differed)] = self._differed
        self._differed, self._differs = differed, np.empty(distances, bool)

    def push(self, token: int) -> None:
        """One token more."""
        if not self._room:
            self._make_room(2 * self.n_tokens, self.backwards[: self.n_tokens])
        np.not_equal(self.backwards[: len(self._differs)], token, out=self._differs)
        self._room -= 1
        self._backwards[self._room] = token
        self.n_tokens += 1
        np.copyto(self._differed, self.n_tokens, where=self._differs)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [distances]: at d - 1 that of the distance d."""
        return self.n_tokens - self._differed

    @property
    def backwards(self) -> np.ndarray:
        """int32: the last token, the one before it and so on, then what is no token; [distances] or more."""
        return self._backwards[self._room :]


class LoopDetector:
    """Tells when an answer says nothing any more but what it has just said, word for word.

    That is: its last LOOP_TOKENS tokens or more are LOOP_TIMES or more rounds of the same LOOP_PERIOD tokens or fewer.
    """

    def __init__(self) -> None:
        self._repeats = Repeats(LOOP_PERIOD)
        periods = np.arange(1, LOOP_PERIOD + 1)
        self._needed = np.maximum(LOOP_TOKENS - periods, (LOOP_TIMES - 1) * periods)

    def push(self, token: int) -> Loop | None:
        """One token more. The loop that the answer is in by now, of the shortest period."""
        self._repeats.push(token)
        if self._repeats.n_tokens % _EVERY:
            return None
        lengths = self._repeats.lengths
        enough = lengths >= self._needed[: len(lengths)]
        if not enough.any():
            return None
        period = int(enough.argmax()) + 1
        return Loop(int(lengths[period - 1]) + period, period)
