"""What is forgotten where a context is full. One policy a file; the file's name is the value of --evict.

There are two kinds. A `Retention` says for each page of a sequence which entries it has in the page list: which of its
rows which queries see. It is a function of position alone, never of how the rows before came to be, so any chunking, a
replay and a fork give the same results to the bit. First rows are scored at their positions inside the cache, as
StreamingLLM has it (arXiv 2309.17453); no stored key moves. A `Scorer` (scoring.py) says what each row is worth, and
the best ones are moved together. Kernels know nothing of any of this.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeVar

from kvcli.errors import UsageError
from kvcli.options import EvictOptions
from kvcli.runtime.cache.scoring import Scorer
from kvcli.runtime.cache.selection import Budget, Selection

if TYPE_CHECKING:
    import numpy as np

    from kvcli.runtime.cache.shown import Shown

Pages = TypeVar("Pages", int, "np.ndarray")  # a page's number, or several: int64 [n]
WHOLE_PROMPT = -1  # --keep: as many tokens as the prompt has


@dataclass(frozen=True)
class Retention(ABC):
    """What stays of a sequence: a query at position p sees rows [0, keep) and [start(p), p].

    Whole pages leave, so it sees `window` rows of the second kind or more. A policy says when: by `start`, by `until`,
    its inverse, and by what it needs of a context.
    """

    keep: int
    window: int
    page_size: int
    reproducible: ClassVar[bool] = True  # from tokens and positions alone: rows may be stored, and shared

    @abstractmethod
    def start(self, position: int) -> int:
        """The first row behind the kept ones that a query at `position` sees: the start of a page; 0 = all are seen."""

    @abstractmethod
    def until(self, page: Pages) -> Pages:
        """The first query that does not see the rows of a page, or of each of several, behind the first `keep`."""

    @property
    @abstractmethod
    def pages_behind(self) -> int:
        """Most pages, but kept ones, that a step's first query sees behind its own."""

    @staticmethod
    @abstractmethod
    def room(window: int, page_size: int) -> int:
        """Rows that a context needs for such a window, beside the kept pages."""

    @staticmethod
    @abstractmethod
    def largest(room: int, page_size: int) -> int:
        """The largest window in so much room; below a page = none is possible."""

    def shown(self, pages: np.ndarray) -> Shown:
        """The entries of the pages with these numbers: int64 [n], ascending."""
        from kvcli.runtime.cache.shown import Shown  # plans are made without numpy

        return Shown.kept(pages, self.page_size, self.keep, self.until(pages))

    def gap(self, position: int) -> int:
        """Rows evicted for a query at `position`. Kept rows are that much nearer to it than their numbers say."""
        return max(0, self.start(position) - self.keep)

    @property
    def whole(self) -> int:
        """The longest prefix of a sequence whose last query still sees all of it."""
        return self._leaves(self.keep)

    def until_next(self, position: int) -> int:
        """Tokens behind `position` until one sees fewer of those before it."""
        return self._leaves(max(self.start(position), self.keep)) - position

    def _leaves(self, row: int) -> int:
        """The first query that does not see this row, which is not a kept one."""
        return self.until(row // self.page_size)

    @property
    def kept_pages(self) -> int:
        """Pages that hold the first `keep` rows."""
        return -(-self.keep // self.page_size)

    @property
    def identity(self) -> str:
        """What rows depend on beside tokens and positions, in words that promptcache/rowsettings.py reads."""
        return f"keep {self.keep} window {self.window}"

    def notice(self) -> str:
        """What is forgotten, for people."""
        return f"old tokens are forgotten: {self} stay, in whole pages"

    def __str__(self) -> str:
        return f"the first {self.keep:,} and the last {self.window:,}" if self.keep else f"the last {self.window:,}"


@dataclass(frozen=True)
class Policy:
    """`retention`, `scorer`: what it comes down to; neither = nothing is evicted. `keep`: first tokens that stay,
    unless told otherwise; `free`: whether it can be. `forgets`: what goes, in a few words."""

    retention: type[Retention] | None = None
    keep: int = 0
    free: bool = False
    forgets: str = ""
    scorer: type[Scorer] | None = None

    @property
    def evicts(self) -> bool:
        return self.retention is not None or self.scorer is not None


@functools.cache
def names() -> tuple[str, ...]:
    """Every policy, `none` first."""
    return tuple(sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: (name != "none", name)))


def policy(name: str) -> Policy:
    """Raises UsageError for a policy that does not exist."""
    if name not in names():
        raise UsageError(f"`evict` must be one of {', '.join(names())}, not '{name}'")
    found: Policy = importlib.import_module(f"{__name__}.{name}").POLICY
    return found


def forgetting(scored: bool = False) -> dict[str, str]:
    """What each policy that evicts anything forgets, in a few words. `scored`: of those that select rows by score."""
    found = {name: policy(name) for name in names()}
    return {name: p.forgets for name, p in found.items() if (p.scorer if scored else p.retention)}


def scoring() -> list[str]:
    """The policies that select rows by score."""
    return list(forgetting(scored=True))


def check(asked: EvictOptions, page_size: int) -> None:
    """What can be refused before the context is known. Raises UsageError."""
    chosen = policy(asked.policy)
    if bool(asked.budget) != bool(chosen.scorer):
        if asked.budget:
            policies = " or ".join(f"`evict={name}`" for name in scoring())
            raise UsageError(f"`budget` needs {policies}, not {asked.policy}", "other policies have a `window`")
        raise UsageError(f"`evict={asked.policy}` needs `budget`", "how many rows stay: `budget=1024`, or `budget=25%`")
    if chosen.scorer and (budget := Budget.of(asked.budget)).rows:
        least = Selection(asked.policy, chosen.scorer(), budget, page_size, 0).least
        if budget.rows < least:
            raise UsageError(
                f"`budget` is {budget.rows:,}, less than the {least:,} rows that `evict={asked.policy}` needs",
                "a page that is being filled stays whole: use a larger budget, or a smaller `page_size`",
            )
    if asked.window and chosen.retention is None:
        if chosen.scorer:
            raise UsageError(f"`evict={asked.policy}` has no `window`", "`budget` says how many rows stay")
        raise UsageError("`window` needs `evict`", "`evict=sink` keeps the first tokens and a window")
    if asked.keep is not None and not chosen.free:
        keeping = " or ".join(f"`evict={name}`" for name in names() if policy(name).free)
        raise UsageError(f"`keep` needs {keeping}, not {asked.policy}", "no other policy keeps first tokens")
    if asked.keep is not None and asked.keep < WHOLE_PROMPT:
        raise UsageError(f"`keep` must be 0 or more, or -1 for the whole prompt, not {asked.keep}")
    if asked.window < 0 or 0 < asked.window < page_size:
        raise UsageError(
            f"`window` is {asked.window}, less than a page of {page_size} tokens",
            "whole pages are evicted: use a larger window, or a smaller `page_size`",
        )


def least_context(asked: EvictOptions, page_size: int) -> int:
    """The shortest context in which `retention` is possible; 0 = any."""
    chosen = policy(asked.policy)
    if chosen.retention is None:
        return 0
    return _kept(asked, chosen, page_size)[1] + chosen.retention.room(asked.window or page_size, page_size)


def retention(asked: EvictOptions, ctx_size: int, page_size: int) -> Retention | None:
    """What stays in a context of `ctx_size` tokens; None = everything. Without --window the largest is taken.

    Before the prompt is known, --keep -1 counts as the largest window, which takes as much room.
    Raises UsageError where the kept tokens and what the window needs are more than the context.
    """
    check(asked, page_size)
    chosen = policy(asked.policy)
    if chosen.retention is None:
        return None
    keep, kept = _kept(asked, chosen, page_size)
    largest = chosen.retention.largest(ctx_size - kept, page_size)
    window = largest if not asked.window or asked.keep == WHOLE_PROMPT else asked.window
    if largest < max(page_size, asked.window):
        wanted = f"{asked.window:,} of window" if asked.window else f"at least {page_size} of window"
        least = least_context(asked, page_size)
        more = least - kept - (asked.window or page_size)
        held, beside = f"{kept:,} for the {keep:,} kept in whole pages", ""
        if asked.keep == WHOLE_PROMPT:  # whose length nobody knows yet
            held, beside = "the whole prompt (`keep=-1`) in whole pages", " and the prompt"
        raise UsageError(
            f"the context of {ctx_size:,} tokens is too short to evict: {held}"
            f" + {wanted} + {more:,} more before old ones go = {least:,}{beside}",
            f"use a context of {least} or more{beside and ' beside the prompt'} (`ctx={least}`)"
            + (f", or `window={largest}`" if asked.window and largest >= page_size else ", or a smaller `page_size`"),
        )
    return chosen.retention(keep, window, page_size)


def selection(asked: EvictOptions, ctx_size: int, page_size: int) -> Selection | None:
    """How rows are selected by score in a context of `ctx_size` tokens; None = they are not. Raises UsageError where
    more are to stay than there is room for."""
    check(asked, page_size)
    scorer = policy(asked.policy).scorer
    if scorer is None:
        return None
    budget = Budget.of(asked.budget)
    if budget.rows >= ctx_size:
        raise UsageError(
            f"a `budget` of {budget.rows:,} rows forgets nothing in a context of {ctx_size:,} tokens",
            "use a smaller one, or a larger `ctx`",
        )
    return Selection(asked.policy, scorer(), budget, page_size, ctx_size)


def _kept(asked: EvictOptions, chosen: Policy, page_size: int) -> tuple[int, int]:
    """First tokens that stay, and that many in whole pages."""
    keep = chosen.keep if asked.keep is None else max(0, asked.keep)
    return keep, -(-keep // page_size) * page_size
