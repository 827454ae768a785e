"""`Source`: text that comes in pieces, read by generators that wait for more of it. What they decide does not depend on
where it was cut. No torch."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeVar

Found = TypeVar("Found")
Reading = Generator[None, None, Found]  # yields where more text is needed

_STRUCTURE = frozenset("{}[],:")  # of JSON: white space may stand around them


class Mismatch(Exception):
    """The text is not what a form says."""


class Ended(Exception):
    """There is no more text, and more was needed."""


class Source:
    """`held`: text that has come and was not taken yet; `taken`: since `begin`. `closed`: no more will come."""

    def __init__(self) -> None:
        self.held = self.taken = ""
        self.closed = False

    def more(self) -> Reading[None]:
        """Wait for more text. Raises Ended."""
        if self.closed:
            raise Ended
        yield

    def take(self, count: int) -> str:
        text, self.held = self.held[:count], self.held[count:]
        self.taken += text
        return text

    def begin(self) -> None:
        """Forget what was taken."""
        self.taken = ""

    def space(self) -> Reading[None]:
        """Take white space, up to something else."""
        while True:
            self.take(len(self.held) - len(self.held.lstrip()))
            if self.held:
                return
            yield from self.more()

    def begins(self, text: str) -> Reading[bool]:
        """Take white space, and say whether `text` comes behind it."""
        yield from self.space()
        return (yield from self.has(text))

    def has(self, text: str) -> Reading[bool]:
        """Whether what comes begins with `text`."""
        while len(self.held) < len(text) and text.startswith(self.held):
            yield from self.more()
        return self.held.startswith(text)

    def literal(self, text: str) -> Reading[None]:
        """Take `text`, whose white space may be more or less. Raises Mismatch."""
        loose = True  # white space may stand here
        for letter in text.rstrip():
            if letter.isspace():
                loose = True
                continue
            if loose or letter in _STRUCTURE:
                yield from self.space()
            while not self.held:
                yield from self.more()
            if self.held[0] != letter:
                raise Mismatch
            self.take(1)
            loose = letter in _STRUCTURE

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Take the longest text of this pattern, each beginning of which is one, and white space before it. Raises
        Mismatch for none."""
        yield from self.space()
        while True:
            found = pattern.match(self.held)
            if self.held and (found is None or found.end() < len(self.held)):
                if found is None or not found[0]:
                    raise Mismatch
                return self.take(found.end())
            yield from self.more()

    def until(self, ends: Iterable[str]) -> Reading[tuple[str, str]]:
        """Take all up to the first of `ends`, and that: both."""
        ends, longest, looked = list(ends), max(map(len, ends)), 0
        while True:
            places = [(at, end) for end in ends if (at := self.held.find(end, looked)) >= 0]
            if places:
                at, end = min(places)
                text = self.take(at)
                return text, self.take(len(end))
            looked = max(0, len(self.held) - longest + 1)
            yield from self.more()
