"""How many guessed tokens are worth computing: as many as are likely to be right, by what a step of more rows takes.

Whether a guess would have been right is seen without computing it, from the token that came instead. So guesses of
each kind are judged by their own past from the first one on, and those that are expected to cost time are not computed.
Where expectations were wrong all the same, an account is kept: what guesses have cost more than they gained stays below
a hundredth and a half of the time of other steps, and a few of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from kvcli.runtime.engine.spec.texts import LENGTHS

ROWS = (4, 8, 16)  # of a step with guesses, at most: kernels take so many rows in about the time of one less
CPU_COSTS = (1.7, 3.6, 6.5)  # what such steps take, in steps of one row, until it was measured
GPU_COSTS = (2.3, 2.3, 2.3)
_RIGHT = (0.2, 0.4, 0.6, 0.75, 0.8)  # how often guesses are right, by tokens matched, until it was seen
_TRUST = 2.0  # guesses that this counts for
_MEMORY = 0.96  # what a guess counts when the next one comes
_MARGIN = 1.15  # by which more tokens than time must be expected
_DRAFT_RIGHT, _DRAFT_MARGIN = 0.75, 1.05  # the same of draft models
_FOREIGN = 8.0  # times of what is expected: then a graph was captured, or the process waited, which says nothing
_RATE, _BACK = 0.1, 0.002  # of what is measured, and of what was assumed
_LOSS = 0.015  # of the time of other steps, which guesses may cost
_CREDIT, _SAVED = 1.0, 4.0  # steps of one row that they may cost beside, and that they may have gained before


class Pace:
    """What steps take on this machine with this model, and how often guesses are right."""

    def __init__(self, costs: Sequence[float]) -> None:
        """`costs`: what steps of ROWS take in steps of one row, where that is not known yet."""
        self._prior, self.costs = tuple(costs), list(costs)
        self._measured = [1] * len(self.costs)  # how often, with what is assumed
        self._one_s = 0.0
        self._account = _CREDIT  # in steps of one row

    @property
    def may(self) -> bool:
        """Whether guesses may cost something."""
        return self._account > 0

    @property
    def rich(self) -> bool:
        """Whether there is enough to find out whether guesses have become right."""
        return self._account >= _CREDIT

    @property
    def one_s(self) -> float:
        """What a step of one row takes; 0 = that is not known yet."""
        return self._one_s

    def spent(self, seconds: float) -> None:
        """So long were guesses made for the next step."""
        if self._one_s:
            self._account -= seconds / self._one_s

    def cost(self, rows: int) -> float:
        """What a step of so many rows takes, in steps of one."""
        return 1.0 if rows == 1 else self.costs[_kind(rows, ROWS)]

    def took(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of so many rows, which gave so many tokens, took so long."""
        if rows == 1:
            self._account += _LOSS
            self._one_s += (min(seconds, 2 * self._one_s) - self._one_s) * _RATE if self._one_s else seconds
            # What is not computed is not measured either, and may have been measured at a bad moment.
            for i, prior in enumerate(self._prior):
                self.costs[i] += (prior - self.costs[i]) * _BACK
        elif self._one_s and seconds < _FOREIGN * self.cost(rows) * self._one_s:
            i = _kind(rows, ROWS)
            self._account += tokens - seconds / self._one_s
            found = max(0.5 * self.costs[i], min(seconds / self._one_s, 2 * self.costs[i]))
            self._measured[i] += 1
            self.costs[i] += (found - self.costs[i]) * max(_RATE, 1 / self._measured[i])
        self._account = min(self._account, _CREDIT + _SAVED)


class Judgement:
    """How often guesses were right in one text, by how many tokens they go by."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._right = [share * _TRUST for share in _RIGHT]
        self._seen = [_TRUST] * len(_RIGHT)

    def saw(self, matched: int, right: bool) -> None:
        """A guess that went by so many tokens was right, or was not."""
        i = _kind(matched + 1, LENGTHS[1:])
        self._right[i] = self._right[i] * _MEMORY + right
        self._seen[i] = self._seen[i] * _MEMORY + 1

    def worth(self, matched: int, there: int) -> int:
        """How many of the `there` guessed tokens to compute; the first goes by `matched` tokens, each by one more."""
        if not (there and self._pace.may):
            return 0
        kinds = (_kind(matched + i + 1, LENGTHS[1:]) for i in range(there))
        chances = list(accumulate((self._right[i] / self._seen[i] for i in kinds), mul))
        best, most = _MARGIN, 0
        for rows, cost in zip(ROWS, self._pace.costs, strict=True):
            n = min(rows - 1, there)
            if n and (gain := (1 + sum(chances[:n])) / cost) > best:
                best, most = gain, n
        return most


class Drafted:
    """How often guesses of a draft model are right, and how long it takes for one: from that, how many are worth it.

    Each is right with the same chance, if those before it were. Those behind the first wrong one tell nothing.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._right, self._seen = _DRAFT_RIGHT * _TRUST, _TRUST
        self._one_s = 0.0

    def saw(self, drafted: int, accepted: int) -> None:
        """So many of the guesses were right."""
        for i in range(min(accepted + 1, drafted)):
            self._right = self._right * _MEMORY + (i < accepted)
            self._seen = self._seen * _MEMORY + 1

    def took(self, tokens: int, seconds: float) -> None:
        """So many guesses took so long."""
        each, expected = seconds / tokens, self._one_s or self._pace.one_s
        if expected and each > _FOREIGN * expected:
            return
        self._one_s += (min(each, 2 * self._one_s) - self._one_s) * _RATE if self._one_s else each
        self._pace.spent(seconds)

    def worth(self, most: int) -> int:
        """How many guesses to make. A step of one row is measured before the first; and where none are worth it, some
        are made all the same as soon as the account allows it."""
        pace, right = self._pace, self._right / self._seen
        if not (most > 0 and pace.may and pace.one_s):
            return 0
        each = self._one_s / pace.one_s
        tokens, best, found = 1.0, _DRAFT_MARGIN, 0
        for n in range(1, min(most, ROWS[-1] - 1) + 1):
            tokens += right**n
            if (gain := tokens / (pace.cost(n + 1) + n * each)) > best:
                best, found = gain, n
        return found or (min(most, ROWS[0] - 1) if pace.rich else 0)


def _kind(n: int, edges: Sequence[int]) -> int:
    """Which stretch of numbers up to each of the edges has n."""
    return next((i for i, edge in enumerate(edges) if n <= edge), len(edges))
