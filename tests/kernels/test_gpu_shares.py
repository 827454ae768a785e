"""What programs of attention read, as it is worked out on the host: of any list each query is shown each row once."""

from __future__ import annotations

import gpucases  # noqa: F401  # before anything of kvcli.kernels.gpu
import numpy as np
import pytest

from kvcli.errors import UsageError
from kvcli.kernels import NEVER, Entries
from kvcli.kernels.gpu.places import MOST_SLOTS, words
from kvcli.kernels.gpu.shares import EDGES, OPEN, WHOLE, Class, Shares, next_change, shares
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.shown import Shown
from kvcli.runtime.plan import footprint

SIZE = 16


def entries(of: Shown, at: int = 1) -> Entries:
    n = len(of.page)
    return Entries(at + np.arange(n), of.page * SIZE, of.lo, of.hi, of.since, of.until, of.turned, [None] * n)


def random_list(random: np.random.Generator) -> Entries:
    """Parts of pages, gaps, pages of which one part is seen only before or behind some query, rows that are turned."""
    columns = []
    for page in range(12):
        cut, when = int(random.integers(0, SIZE + 1)), int(random.integers(0, 14 * SIZE))
        for lo, hi, since, until in ((0, cut, 0, NEVER), (cut, SIZE, 0, when), (cut, SIZE, when, NEVER)):
            if lo < hi and random.random() < 0.7:
                columns.append((page, lo, hi, since, until, random.integers(2)))
    return entries(Shown(*np.array(columns, np.int64).T))


def read(found: Shares, table: Class, block: int, position: int, window: int) -> list[tuple[int, ...]]:
    """What a query of a block is shown: the word of each row's page, its slot, and whether it is scored turned."""
    rows = []
    for kind, turned, lo, hi in found.work[block].tolist():
        for word, first, a, b, since, until in (table.edges if kind == WHOLE else found.edges)[lo:hi].tolist():
            shown = range(SIZE) if kind == WHOLE else range(a, b) if since <= position < until else ()
            seen = [s for s in shown if first + s <= position and (not window or first + s > position - window)]
            assert kind != WHOLE or len(seen) == SIZE, "rows of whole pages are not masked"
            rows += [(word, slot, turned) for slot in seen]
    return sorted(rows)


def expected(of: Entries, position: int, window: int) -> list[tuple[int, ...]]:
    rows = []
    for i, n in enumerate(of.shows(np.array([position]))[0].tolist()):
        slots = range(int(of.lo[i]), int(of.lo[i]) + n)
        seen = [s for s in slots if not window or of.first[i] + s > position - window]
        rows += [(int(of.addresses[i]), slot, int(of.turned[i])) for slot in seen]
    return sorted(rows)


@pytest.mark.parametrize("window", [0, 20, 70])
@pytest.mark.parametrize("seed", range(4))
def test_any_list(seed: int, window: int) -> None:
    random = np.random.default_rng(seed)
    mine, opened = random_list(random), random_list(random)
    opened.addresses[:] += 1000
    firsts = np.arange(9 * SIZE, 14 * SIZE, 4)
    table, other = (Class.of(x, SIZE, None) for x in (mine, opened))
    for beside in (None, other):
        found = shares(table, beside, firsts, firsts + 3, window, SIZE)
        assert set(np.unique(found.work[..., 0])) <= ({0, WHOLE, OPEN} if beside is None else {0, WHOLE, EDGES, OPEN})
        assert found.work.shape[1] <= (4 if beside is None else footprint.PREFILL_PARTS[1])
        for block, first in enumerate(firsts.tolist()):
            for position in range(first, first + 4):
                rows = expected(mine, position, window)
                rows += expected(opened, position, window) if beside else []
                assert read(found, table, block, position, window) == sorted(rows)


@pytest.mark.parametrize("parts", [8, 9, 20, 64])
def test_entries_are_shared_out(parts: int) -> None:
    shown = Rolling(64, 300, SIZE).shown(np.r_[0:4, 10:36])
    table = Class.of(entries(shown), SIZE, None)
    start = np.array([36 * SIZE - 3])  # sees 4 kept pages, 18 of the window, and its own
    whole = shares(table, None, start, start, 0, SIZE)
    spread = whole.spread(parts)
    assert spread.work.shape == (1, parts, 4)
    assert read(spread, table, 0, int(start[0]), 0) == read(whole, table, 0, int(start[0]), 0)
    lengths = (spread.work[0, :, 3] - spread.work[0, :, 2])[spread.work[0, :, 0] == WHOLE]
    assert lengths.sum() == 22 and lengths.max() <= -(-22 // (parts - 3)) + 1
    with pytest.raises(ValueError, match="too few"):
        whole.spread(2)


@pytest.mark.parametrize("seed", range(4))
def test_what_runs_of_queries_read_apart(seed: int) -> None:
    """What is left for a block, and the entries that its run reads apart, are what it is shown; without runs, too."""
    random = np.random.default_rng(seed)
    of = random_list(random)
    pages = np.arange(12)
    sealed = Shown(pages, 0 * pages, 0 * pages + SIZE, (pages + 1) * SIZE, 0 * pages + NEVER, 0 * pages)
    for some in (of, entries(sealed)):
        table = Class.of(some, SIZE, None)
        firsts = np.arange(3 * SIZE, 12 * SIZE, 4)
        runs = firsts // (2 * SIZE) - firsts[0] // (2 * SIZE)
        whole = shares(table, None, firsts, firsts + 3, 0, SIZE)
        for parts in (runs, None):
            for least in (1, 3):
                found, pasts = whole.without_past(least, parts)
                assert len(pasts) == (runs[-1] + 1 if parts is not None else 1)
                assert all(hi == lo == 0 or hi - lo >= least for lo, hi in pasts)
                for block, position in enumerate((firsts + 2).tolist()):
                    lo, hi = pasts[runs[block] if parts is not None else 0]
                    apart = [(word, slot, 0) for word in table.words[lo:hi].tolist() for slot in range(SIZE)]
                    assert sorted(read(found, table, block, position, 0) + apart) == expected(some, position, 0)
        assert some is of or [hi for _, hi in whole.without_past(1, runs)[1]] == [3, 4, 6, 8, 10]


def test_the_next_change() -> None:
    list_of = entries(Rolling(20, 40, SIZE).shown(np.arange(6)))
    changes, at = [], 0
    while at < 150:
        at = next_change([list_of], at)
        changes.append(at)
    assert changes == [71, 87, 103, 119, 135, (1 << 31) - 1]


def test_words() -> None:
    addresses, slots = np.array([0, 1 << 40, (1 << 47) - 128]), np.array([3, 0, MOST_SLOTS - 1])
    packed = words(addresses, slots)
    assert (packed & ((1 << 48) - 1)).tolist() == addresses.tolist()
    assert ((packed >> 48) & (MOST_SLOTS - 1)).tolist() == [0, 0, MOST_SLOTS - 1]
    assert words(addresses, None) is addresses
    with pytest.raises(UsageError, match="65,536 pages"):
        words(addresses, slots + 1)
