"""What is forgotten where a context is full. One policy a file; the file's name is the value of --evict.

Every policy comes down to two numbers, `Retention`. What a query sees is a function of its position alone, never of
how the rows before it came to be, so any chunking, a replay and a fork give the same results to the bit. The first
rows are scored at their positions inside the cache, as StreamingLLM has it (arXiv 2309.17453); no stored key moves.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass

from kvcli.errors import UsageError
from kvcli.options import EvictOptions

WHOLE_PROMPT = -1  # --keep: as many tokens as the prompt has


@dataclass(frozen=True)
class Policy:
    """`evicts`: anything at all. `keep`: first tokens that stay, unless told otherwise; `free`: whether it can be."""

    evicts: bool
    keep: int = 0
    free: bool = False


@dataclass(frozen=True)
class Retention:
    """A query at position p sees rows [0, keep) and [start(p), p]: whole pages leave, so it sees `window` rows of the
    second kind, or up to a page more."""

    keep: int
    window: int
    page_size: int

    def start(self, position: int) -> int:
        """The first row of the window of a query at `position`: the start of a page."""
        return max(0, position - self.window + 1) // self.page_size * self.page_size

    def gap(self, position: int) -> int:
        """Rows evicted for a query at `position`. Kept rows are that much nearer to it than their numbers say."""
        return max(0, self.start(position) - self.keep)

    @property
    def whole(self) -> int:
        """The longest prefix of a sequence whose last query still sees all of it."""
        return (self.keep // self.page_size + 1) * self.page_size + self.window - 1

    def until_next(self, position: int) -> int:
        """Tokens behind `position` until one sees fewer of those before it."""
        behind = max(self.start(position), self.keep) // self.page_size
        return (behind + 1) * self.page_size + self.window - 1 - position

    @property
    def kept_pages(self) -> int:
        """Pages that hold the first `keep` rows."""
        return -(-self.keep // self.page_size)

    @property
    def pages_behind(self) -> int:
        """Most pages of the window behind that of a step's first query."""
        return -(-(self.window - 1) // self.page_size)

    def notice(self) -> str:
        """What is forgotten, for people."""
        return f"old tokens are forgotten: {self} stay, in whole pages"

    def __str__(self) -> str:
        return f"the first {self.keep:,} and the last {self.window:,}" if self.keep else f"the last {self.window:,}"


def names() -> tuple[str, ...]:
    """Every policy, `none` first."""
    return tuple(sorted((m.name for m in pkgutil.iter_modules(__path__)), key=lambda name: (name != "none", name)))


def policy(name: str) -> Policy:
    """Raises UsageError for a policy that does not exist."""
    if name not in names():
        raise UsageError(f"`evict` must be one of {', '.join(names())}, not '{name}'")
    found: Policy = importlib.import_module(f"{__name__}.{name}").POLICY
    return found


def check(asked: EvictOptions, page_size: int) -> None:
    """What can be refused before the context is known. Raises UsageError."""
    chosen = policy(asked.policy)
    if asked.window and not chosen.evicts:
        raise UsageError("`window` needs `evict`", "`evict=sink` keeps the first tokens and a window")
    if asked.keep is not None and not chosen.free:
        raise UsageError(f"`keep` needs `evict=sink`, not {asked.policy}", "only sink keeps first tokens")
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
    return _kept(asked, chosen, page_size)[1] + (asked.window or page_size) + page_size if chosen.evicts else 0


def retention(asked: EvictOptions, ctx_size: int, page_size: int) -> Retention | None:
    """What stays in a context of `ctx_size` tokens; None = everything. Without --window the largest is taken.

    Before the prompt is known, --keep -1 counts as the largest window, which takes as much room.
    Raises UsageError where the kept tokens, the window and the page at its edge are more than the context.
    """
    check(asked, page_size)
    chosen = policy(asked.policy)
    if not chosen.evicts:
        return None
    keep, kept = _kept(asked, chosen, page_size)
    largest = ctx_size - kept - page_size
    window = largest if not asked.window or asked.keep == WHOLE_PROMPT else asked.window
    if largest < max(page_size, asked.window):
        wanted = f"{asked.window:,} of window" if asked.window else f"at least {page_size} of window"
        least = least_context(asked, page_size)
        raise UsageError(
            f"the context of {ctx_size:,} tokens is too short to evict: {kept:,} for the {keep:,} kept in whole pages"
            f" + {wanted} + a page of {page_size} at its edge = {least:,}",
            f"use a context of {least} or more (`ctx`)"
            + (f", or `window={largest}`" if asked.window and largest >= page_size else ", or a smaller `page_size`"),
        )
    return Retention(keep, window, page_size)


def _kept(asked: EvictOptions, chosen: Policy, page_size: int) -> tuple[int, int]:
    """First tokens that stay, and that many in whole pages."""
    keep = chosen.keep if asked.keep is None else max(0, asked.keep)
    return keep, -(-keep // page_size) * page_size
