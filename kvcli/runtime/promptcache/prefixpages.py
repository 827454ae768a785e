"""Which pages make up the rows of a prefix, wherever they lie.

A row is a function of the tokens up to it and of its position. So a page is *valid* for a prompt as far as the tokens
it was computed from agree with the prompt's, and pages of several origins may be put together. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcli.runtime.cache.layout import KVLayout, PageKey

REWIND_ROWS = 512  # before a window at a prompt's end: they are kept, so that the end can be another


def common_length(a: list[int], b: list[int]) -> int:
    """How many ids two lists have in common from the start."""
    same, most = 0, min(len(a), len(b))
    if a[:most] == b[:most]:
        return most
    while most - same > 1:  # in halves: lists are compared quicker than their elements, one by one
        middle = (same + most) // 2
        same, most = (middle, most) if a[same:middle] == b[same:middle] else (same, middle)
    return same


def needed(layout: KVLayout, length: int) -> Iterator[PageKey]:
    """The pages that a sequence of `length` rows holds between steps, each in its one form, sealed or open, and the
    checkpoint that it goes on from where layers have a state: there is one at ends of pages alone."""
    for g, group in enumerate(layout.groups):
        opened = layout.open_arena(g)
        for number in group.held_pages(length):
            full = (number + 1) * layout.page_size <= length
            yield g if opened is None or (number >= group.sinks and (full or not group.tail)) else opened, number
    if layout.state_arenas and length:
        yield layout.state_arenas[1], length // layout.page_size - 1


def covers(layout: KVLayout, length: int, valid: Mapping[PageKey, int]) -> bool:
    """Whether a sequence of `length` rows can be gone on from with the pages of `valid`, see `longest`."""
    if layout.state_arenas and length % layout.page_size:
        return False
    ends = ((key, min(length, (key[1] + 1) * layout.page_size)) for key in needed(layout, length))
    return all(valid.get(key, -1) >= end for key, end in ends)


def longest(layout: KVLayout, length: int, valid: Mapping[PageKey, int]) -> int:
    """The longest prefix of at most `length` tokens that can be gone on from with the pages of `valid`.

    `valid`: up to how many tokens each page's rows agree with the prompt. Inside a page only where all groups have
    the page in a form that takes more rows; else to a page's end, and where layers have a state to a checkpoint. The
    longest one that agrees may lack what a window needs there; so where others end is tried, too. Where rows are
    computed in blocks (`KVLayout.grain`) it is whole ones.
    """
    size = layout.page_size
    length = min(length, max(valid.values(), default=0))
    if layout.state_arenas:
        ends_of = {(number + 1) * size for arena, number in valid if arena == layout.state_arenas[1]}
        ends_of = {end for end in ends_of if end <= length}
    else:
        ends_of = {min(length, reach) for reach in valid.values()} | set(range(size, length + 1, size))
    for candidate in sorted(ends_of - {0, -1}, reverse=True):
        if candidate % layout.grain == 0 and covers(layout, candidate, valid):
            return candidate
    return 0
