"""Stop strings in streamed text: what may be a stop string is held back and never leaks."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text with `push`; when a stop string appears, `stop` is set and the text before it was the last."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [s for s in stops if s]
        self._held = ""
        self.stop: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown now: all but the longest tail that could begin a stop string."""
        if self.stop is not None:
            return ""
        self._held += text
        found = [(at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            at, self.stop = min(found, key=lambda f: (f[0], -len(f[1])))
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((self._overlap(s) for s in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """The held text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, stop: str) -> int:
        """Length of the longest tail of the held text that is a proper prefix of `stop`."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
