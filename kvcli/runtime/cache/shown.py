"""`Shown`: what a policy says of pages, in the form in which page lists are made of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcli.kernels import NEVER


@dataclass(frozen=True, eq=False)
class Shown:
    """Rows of pages, and the queries that see them: int64 [n] each, in the order of `page`.

    Slots [lo, hi) of page number `page` are seen by queries at positions [since, until), from the rows' own on;
    `turned`: see `Entries`.
    """

    page: np.ndarray
    lo: np.ndarray
    hi: np.ndarray
    since: np.ndarray
    until: np.ndarray
    turned: np.ndarray

    @classmethod
    def whole(cls, pages: np.ndarray, page_size: int) -> Shown:
        """All rows of the pages with these numbers, to everybody."""
        zeros = np.zeros_like(pages)
        return cls(pages, zeros, zeros + page_size, zeros, zeros + NEVER, zeros)

    @classmethod
    def kept(cls, pages: np.ndarray, page_size: int, keep: int, until: np.ndarray) -> Shown:
        """The first `keep` rows to everybody, those behind them to queries before `until`, int64 [n].

        Kept rows are turned to those that come later. Of a page that `keep` cuts all rows are seen as those behind it
        are; from then on it is cut.
        """
        stays, zeros = (pages + 1) * page_size <= keep, np.zeros_like(pages)
        cut = np.flatnonzero((pages * page_size < keep) & ~stays)
        none = zeros[cut]
        columns = (
            (pages, pages[cut]),
            (zeros, none),
            (zeros + page_size, none + keep % page_size),
            (zeros, until[cut]),
            (np.where(stays, NEVER, until), none + NEVER),
            (stays.astype(np.int64), none + 1),
        )
        order = np.argsort(np.concatenate(columns[0]), kind="stable")
        return cls(*(np.concatenate(column)[order] for column in columns))

    def chunked(self, chunk: int, page_size: int) -> Shown:
        """These rows, but each to queries of its own chunk of `chunk` positions alone: a page that has rows of several
        chunks is shown in as many entries."""
        first, last = ((self.page * page_size + slot) // chunk for slot in (self.lo, self.hi - 1))
        times = last - first + 1
        some = np.repeat(np.arange(len(self.page)), times)
        number = first[some] + np.arange(len(some)) - np.repeat(np.cumsum(times) - times, times)
        begin = number * chunk - self.page[some] * page_size  # the chunk's first slot
        lo, hi = np.maximum(self.lo[some], begin), np.minimum(self.hi[some], begin + chunk)
        until = np.minimum(self.until[some], (number + 1) * chunk)
        return Shown(self.page[some], lo, hi, self.since[some], until, self.turned[some])

    def limited(self, since: np.ndarray | int, until: np.ndarray | int, start: int) -> Shown:
        """These rows, but only to queries in [since, until), int64 [n]; what none sees from `start` on is left out."""
        begin, end = np.maximum(self.since, since), np.minimum(self.until, until)
        some, found = np.maximum(begin, start) < end, (self.page, self.lo, self.hi, begin, end, self.turned)
        return Shown(*(found if some.all() else (x[some] for x in found)))
