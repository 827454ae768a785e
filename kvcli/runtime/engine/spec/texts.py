"""Guesses at how a text goes on, from what stood behind the same tokens before. No torch.

Two methods: `ngram` takes what followed the last few tokens when they last stood in the text (prompt lookup decoding);
`suffix` looks for the longest end of the text that stood anywhere before, in earlier answers, too, and takes what most
often followed (after SuffixDecoding, arXiv 2411.04975).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvcli.runtime.engine.spec import NGRAM, SUFFIX

LENGTHS = (2, 4, 8, 16, 32)  # of ends that are looked for
NGRAM_MOST = 4  # tokens that `ngram` looks for
PLACES = 32  # where the last tokens stood, the newest ones, that are looked at
VOTES = 8  # of those that are left, the newest ones, that say what follows
MOST_TOKENS = 1 << 17  # of a text that are remembered, its end
POOL_TOKENS = 1 << 15  # of earlier answers


class Guess(NamedTuple):
    """Tokens that may come next, and how many of the last ones stood before what they are from."""

    ids: list[int]
    matched: int


class Text:
    """Token ids that grow, and where each pair of them stands."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # positions behind the pair

    def extend(self, ids: Iterable[int]) -> None:
        """Append tokens."""
        own, places = self.ids, self._places
        last = own[-1] if own else -1
        for token in ids:
            own.append(token)
            places.setdefault((last, token), []).append(len(own))
            last = token

    def find(self, end: Sequence[int], most: int) -> tuple[int, list[int]]:
        """How many tokens of `end`, one of LENGTHS up to `most` or 0, stood before with something behind them; and the
        positions of that, the newest last."""
        own, matched = self.ids, 0
        places = [at for at in self._places.get((end[-2], end[-1]), ())[-PLACES - 1 :] if at < len(own)]
        for length in LENGTHS:
            if length > min(most, len(end)):
                break
            wanted = list(end[-length:])
            longer = [at for at in places if at >= length and own[at - length : at] == wanted]
            if not longer:
                break
            places, matched = longer, length
        return matched, places if matched else []


class Texts:
    """The text of one prompt and its answer, with earlier answers beside it where the method looks there."""

    def __init__(self, method: str, pool: Text | None) -> None:
        self.text, self._method, self._pool = Text(), method, pool if method == SUFFIX else None

    def extend(self, ids: Sequence[int]) -> None:
        """The text has gone on."""
        self.text.extend(ids[-MOST_TOKENS:])

    def guess(self, most: int) -> Guess:
        """At most so many tokens; none where nothing like it is known."""
        end = self.text.ids[-LENGTHS[-1] :]
        if len(end) < LENGTHS[0] or most < 1:
            return Guess([], 0)
        if self._method == NGRAM:
            matched, stood = self.text.find(end, NGRAM_MOST)
            return Guess(_going_on([(self.text, at) for at in stood[-1:]], most), matched)
        found = [(self.text.find(end, LENGTHS[-1]), self.text)]
        if self._pool is not None:
            found.append((self._pool.find(end, LENGTHS[-1]), self._pool))
        matched = max(length for (length, _), _ in found)
        # The newest first: of what followed as often, it decides.
        places = [(text, at) for (length, some), text in found if length == matched for at in reversed(some)]
        return Guess(_going_on(places[:VOTES], most), matched)


def _going_on(places: list[tuple[Text, int]], most: int) -> list[int]:
    """What most often stands there, of those that agree so far; where a text ends, it goes on with what is guessed."""
    found: list[int] = []
    while len(places) > 1 and len(found) < most:
        next_ids = [_token(text, at, found) for text, at in places]
        token = Counter(next_ids).most_common(1)[0][0]
        if token < 0:
            return found
        places = [(text, at + 1) for (text, at), other in zip(places, next_ids, strict=True) if other == token]
        found.append(token)
    return _alone(*places[0], found, most) if places else found


def _alone(text: Text, at: int, found: list[int], most: int) -> list[int]:
    """The same from one place on, at which the next token stands."""
    own = text.ids[at : at + most - len(found)]
    beyond = at + len(own) - len(text.ids)
    found += own
    while len(found) < most:
        found.append(found[beyond])
        beyond += 1
    return found[: found.index(-1)] if -1 in found else found


def _token(text: Text, at: int, found: list[int]) -> int:
    beyond = at - len(text.ids)
    if beyond < 0:
        return text.ids[at]
    return found[beyond] if beyond < len(found) else -1


class Pool:
    """Earlier answers of a session, the newest POOL_TOKENS of them, each with a -1 behind it."""

    def __init__(self) -> None:
        self.text = Text()

    def add(self, ids: Sequence[int]) -> None:
        """An answer is there."""
        if len(self.text.ids) + len(ids) > POOL_TOKENS:
            kept, self.text = self.text.ids[-POOL_TOKENS // 2 :], Text()
            self.text.extend(kept)
        self.text.extend([*ids[-POOL_TOKENS // 2 :], -1])
