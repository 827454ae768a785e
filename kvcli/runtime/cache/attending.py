"""Which pages a query reads where it does not read all: by means of their keys. Nothing is forgotten for it.

A token of an answer reads the `pages` that score highest beside the first ones and the recent ones (the selection of
Quest, arXiv 2406.10774, by means in place of bounds). A prompt is computed in steps; a block of its rows reads the
pages before the step whose weight is at least `threshold` of the largest one's (the rule of FlashPrefill, arXiv
2603.06199, for pooled queries as in the block-sparse pattern of MInference, 2407.02490), beside the first ones and
those of the step itself. What is chosen depends on the queries that are computed together, so such rows are of use to
one sequence alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcli.errors import UsageError
from kvcli.options import AttendOptions, EvictOptions
from kvcli.runtime.cache import eviction
from kvcli.words import counted

if TYPE_CHECKING:
    import numpy as np

    from kvcli.kernels import Choice, Entries

FIRST_PAGES = 1  # that every query reads: attention sinks
RECENT_PAGES = 1  # that a token of an answer reads, beside its own
LEAST_ROWS = 256  # of a prompt in a step that does not read everything
AUTO = 0.01  # threshold
ALL, OFF = "all", "off"


def pages_of(text: str) -> int:
    """K of 'pages:K'; 0 for 'all'. Raises UsageError.

    >>> pages_of("pages:16"), pages_of("all")
    (16, 0)
    """
    name, _, count = text.partition(":")
    if text == ALL:
        return 0
    if name == "pages" and count.isascii() and count.isdigit() and int(count):
        return int(count)
    raise UsageError(f"`attend` must be all or pages:K with a number of pages, not '{text}'", "such as pages:32")


def sparseness(text: str) -> tuple[float, float]:
    """`threshold` and `share` of 'off', 'auto', a threshold like '0.02' or a share like '25%'. Raises UsageError.

    >>> sparseness("off"), sparseness("0.02"), sparseness("25%")
    ((0.0, 0.0), (0.02, 0.0), (0.0, 0.25))
    """
    if text in (OFF, "auto"):
        return (0.0 if text == OFF else AUTO), 0.0
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        hint = "a page is read whose weight is at least that much of the largest; or a share of the pages, such as 25%"
        raise UsageError(f"`prefill_sparse` must be off, auto or a number above 0 and up to 1, not '{text}'", hint)
    return (0.0, number) if text.endswith("%") else (number, 0.0)


def check(asked: AttendOptions, evict: EvictOptions) -> None:
    """Raises UsageError for numbers out of range, and for a policy that chooses rows itself."""
    if asked.pages < 0 or asked.sparse_from < 0:
        raise UsageError(f"pages and positions must be 0 or more, not {min(asked.pages, asked.sparse_from)}")
    if not (0 <= asked.threshold <= 1 and 0 <= asked.share <= 1) or (asked.threshold and asked.share):
        raise UsageError("`threshold` and `share` must be 0 to 1, and one of them 0", "both say which pages are read")
    if (asked.pages or asked.sparse) and eviction.policy(evict.policy).scorer is not None:
        hint = "leave one of them out"
        raise UsageError(f"{asked.named} and `evict={evict.policy}` both choose rows by their scores", hint)


def most_pages(asked: AttendOptions) -> int:
    """That a token of an answer reads, its own among them."""
    return FIRST_PAGES + asked.pages + RECENT_PAGES + 1


def described(asked: AttendOptions) -> str:
    """What is read, for people."""
    found = []
    if asked.pages:
        found.append(f"tokens of answers read {counted(asked.pages, 'page')} beside the first and the recent ones")
    if asked.sparse:
        share = f"{100 * asked.share:g} % of them"
        how = f"from {asked.threshold:g} of the largest weight" if asked.threshold else share
        found.append(f"prompts read pages sparsely ({how}) from token {asked.sparse_from:,} on")
    return "; ".join(found)


@dataclass(frozen=True)
class PageChoice:
    """What the queries at positions [start, end) read, or some of them: of the pages that end at row `before` at the
    latest the `pages` best, or by `threshold` or `share` (see AttendOptions)."""

    start: int
    end: int
    before: int
    pages: int = 0
    threshold: float = 0.0
    share: float = 0.0

    @classmethod
    def of(cls, asked: AttendOptions, start: int, rows: int, answering: bool, page_size: int) -> PageChoice | None:
        """That of a step of `rows` from position `start` on, of an answer or of a prompt; None = everything is read.
        That of a token of an answer is the same for a whole page."""
        if answering:
            first = start // page_size * page_size
            before = first - RECENT_PAGES * page_size
            return cls(first, first + page_size, before, asked.pages) if asked.pages else None
        if not asked.sparse or rows < LEAST_ROWS or start < asked.sparse_from:
            return None
        return cls(start, start + rows, start, 0, asked.threshold, asked.share)

    def candidates(self, entries: Entries, page_size: int) -> np.ndarray:
        """Which entries are chosen among: whole pages that all these queries see, by ordinary queries; int64 [n]."""
        e = entries
        whole = (e.hi - e.lo == page_size) & (e.turned == 0) & (e.since <= self.start) & (e.until >= self.end)
        among = (e.first >= FIRST_PAGES * page_size) & (e.first + page_size <= self.before)
        found: np.ndarray = (whole & among).nonzero()[0]
        return found

    def choice(self, candidates: int) -> Choice | None:
        """What is read of so many; None = all of them."""
        from kvcli.kernels import Choice

        if self.threshold:
            return Choice(0, self.threshold) if candidates else None
        pages = self.pages or math.ceil(self.share * candidates)
        return Choice(pages) if pages < candidates else None
