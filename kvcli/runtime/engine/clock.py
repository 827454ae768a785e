"""`Clock`: when a prompt was begun, and its tokens came."""

from __future__ import annotations

import time

from kvcli.runtime.engine.events import Timings


class Clock:
    """Seconds of one answer. `prefill_s`: what its prompt took."""

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.start()

    def start(self) -> None:
        self._start = self._first = self._last = time.perf_counter()

    def prefilled(self) -> None:
        self.prefill_s = time.perf_counter() - self._start

    def token(self, first: bool) -> None:
        """A token has come."""
        self._last = time.perf_counter()
        self._first = self._last if first else self._first

    def timings(self, load_s: float, prefilled: int, generated: int, reading_s: float = 0.0) -> Timings:
        """With counts of tokens. `reading_s`: seconds behind the first token that the prompt took, too."""
        ttft_s, decode_s = self._first - self._start, self._last - self._first - reading_s
        return Timings(load_s, self.prefill_s + reading_s, ttft_s, decode_s, prefilled, max(0, generated - 1))
