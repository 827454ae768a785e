"""What a chat leaves in the store: its newest state replaces its earlier ones. No torch.

Every turn writes a file of a few pages, the one being filled among them. The next turn writes that one again with more
rows, and pages leave windows (sliding ones, and where old rows are evicted). So a turn's file belongs to its chat. Once
it is short, or more than a third of it is of no use, the next file takes over what is still needed, and it is removed.
So where old rows are evicted, a chat takes about twice its live cache.

Two kinds of files stay until they are old: those of long messages, with which other chats may begin, and those of other
continuations (an answer that was taken back), unless they have only pages of windows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.found import Kept, files_of
from kvcli.runtime.promptcache.prefixpages import REWIND_ROWS, longest, needed
from kvcli.runtime.promptcache.shelves import Shelves
from kvcli.runtime.promptcache.store import OWNER

SHORT_ROWS = 512  # a file of fewer is joined with what comes after it
LONG_ROWS = PromptCacheOptions.min_tokens  # so many new rows are worth keeping for others


@dataclass(frozen=True)
class State:
    """What is to be written: the first `length` tokens of a sequence, which has the pages `held`. `base`: how many of
    them were there before the last message. `kept`: what the store has of them."""

    layout: KVLayout
    length: int
    base: int
    held: Collection[PageKey]
    kept: list[Kept]
    owner: str = ""  # the chat, "" = it is none
    marked: Collection[PageKey] = ()  # what marks need

    def end(self, key: PageKey) -> int:
        """The tokens up to the end of a page."""
        return min(self.length, (key[1] + 1) * self.layout.page_size)

    def windowed(self, key: PageKey) -> bool:
        return self.layout.arenas[key[0]].windowed

    @cached_property
    def providers(self) -> dict[PageKey, tuple[Kept, int]]:
        """The file that has most of each page, and up to how many tokens. Pages of windows in files of another chat may
        go any time."""
        found: dict[PageKey, tuple[Kept, int]] = {}
        for file in self.kept:
            foreign = file.contents.about.get(OWNER, self.owner) != self.owner
            for key, reach in file.covers(self.layout.page_size).items():
                better = key not in found or reach > found[key][1]
                if better and not (foreign and self.windowed(key)):
                    found[key] = file, reach
        return found

    @cached_property
    def new(self) -> set[PageKey]:
        """The pages that the store does not have."""
        return {k for k in self.held if k not in self.providers or self.providers[k][1] < self.end(k)}

    @cached_property
    def lasting(self) -> set[PageKey]:
        """The pages that the chat may go on from: from its end, or from before its last message, if that was not too
        long, or from a mark. And those that are in no window."""
        size = self.layout.page_size
        before = max(min(self.base, self.length - 1), self.length - REWIND_ROWS, 0) // size * size
        whole = (key for key in (*self.held, *self.providers) if not self.windowed(key))
        return {*needed(self.layout, self.length), *needed(self.layout, before), *self.marked, *whole}

    def rows(self, keys: Iterable[PageKey]) -> int:
        """How many tokens have rows in these pages."""
        size = self.layout.page_size
        return sum(min(size, self.length - number * size) for number in {number for _, number in keys})


@dataclass(frozen=True)
class Plan:
    """The pages of the next file, and the files that it replaces. `own`: it may be replaced, too."""

    pages: list[PageKey]
    replaced: tuple[Path, ...] = ()
    own: bool = False


def plan(state: State, owned: Mapping[Path, Contents], spared: Collection[Path]) -> Plan:
    """How the state of a chat gets into the store. Its files `owned` may be replaced, those of `spared` may not."""
    own = state.rows(state.new) < LONG_ROWS
    pages = state.new & state.lasting if own else set(state.new)
    if not pages:
        return Plan([], own=own)
    replaced = []
    for path, contents in owned.items():
        live = None if path in spared else _live(state, path, contents)
        if live is None or not live - pages <= set(state.held):
            continue
        live_bytes = sum(contents.page_bytes[arena] for arena, _ in live - pages)
        if (
            3 * live_bytes < 2 * contents.payload_bytes
            or len({number for _, number in contents.pages}) * state.layout.page_size < SHORT_ROWS
        ):
            pages |= live
            replaced.append(path)
    return Plan(sorted(pages), tuple(replaced), own)


def _live(state: State, path: Path, contents: Contents) -> set[PageKey] | None:
    """The pages that the chat may go on from and that are best had from this file; None for a file that has rows of
    another continuation."""
    file = next((file for file in state.kept if file.path == path), None)
    if (file is None or file.agrees < contents.end) and not all(map(state.windowed, contents.pages)):
        return None
    best = {key for key, (provider, _) in state.providers.items() if provider is file}
    return {key for key in contents.pages if key in best and key in state.lasting and key not in state.new}


def relied_on(store: Shelves, layout: KVLayout, states: Iterable[list[int]]) -> set[Path]:
    """The files that other states of the chat, given by their tokens, would be read from."""
    paths: set[Path] = set()
    for tokens in states:
        found = store.find(tokens)
        length = longest(layout, len(tokens), found.valid)
        paths.update(file.path for file in files_of(found.pieces(needed(layout, length))))
        found.close()
    return paths
