"""`Shelves`: the folders of a store in which rows of one engine may lie. No torch.

Rows for which nothing was evicted lie in one folder, whatever the policy, the window and the context are; those behind
lie apart, by policy. A folder of version 1 is read, where it was made with the same settings, and never written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.found import Found, Kept
from kvcli.runtime.promptcache.sameness import ALL, Identity, unevicted
from kvcli.runtime.promptcache.store import Limits, PromptStore, entries, seed_of_version_1


class Shelves:
    """Those of an engine whose rows are made as `identity` says, `computed_on` included."""

    def __init__(self, root: Path, identity: Identity, limits: Limits, warn: Callable[[str], None]) -> None:
        self.root, self.identity, self.limits, self._warn = root, dict(identity), limits, warn
        self.page_size = int(identity["page_size"])
        self.whole = unevicted(identity)  # rows that see all before them
        where = root, {**identity, "eviction": "none"}, self.page_size, limits, warn
        self.shared = PromptStore(*where)
        self.evicted = None if self.whole == ALL else PromptStore(root, identity, self.page_size, limits, warn)
        as_it_was = {name: value for name, value in identity.items() if name != "sums"}
        old = seed_of_version_1(as_it_was)
        self._version_1 = PromptStore(root, as_it_was, self.page_size, limits, warn, old, self.page_size)

    def find(self, tokens: list[int]) -> Found:
        """What there is of a prompt. See `PromptStore.find`."""
        found = self.shared.find(tokens, self.whole)
        for other in (self.evicted, self._version_1):
            if other is not None:
                found.join(other.find(tokens))
        return found

    def like(self, identity: Identity) -> PromptStore:
        """Where rows lie that were made with other cache options, on the same device and in the same scope."""
        own = {name: value for name, value in self.identity.items() if name not in identity}
        where = {**identity, **own, "eviction": "none"}
        return PromptStore(self.root, where, self.page_size, self.limits, self._warn)

    def writes(self, folder: Path) -> bool:
        """Whether new files go into this folder."""
        return folder != self._version_1.folder

    @property
    def empty(self) -> bool:
        """Whether there is nothing in any of them."""
        stores = filter(None, (self.shared, self.evicted, self._version_1))
        return all(next(entries(store.folder), None) is None for store in stores)

    def has(self, folder: Path) -> bool:
        """Whether `find` looks there."""
        return folder in {store.folder for store in (self.shared, self.evicted, self._version_1) if store}

    def touch(self, files: Iterable[PromptCacheFile | Kept]) -> None:
        self.shared.touch(files)

    def of(self, keys: Iterable[PageKey], length: int) -> list[tuple[PromptStore, list[PageKey], int]]:
        """Which of these pages of a sequence of `length` rows go where, and how many of its tokens are told there."""
        shared, evicted = list[PageKey](), list[PageKey]()
        for key in keys:
            end = min(length, (key[1] + 1) * self.page_size)
            (shared if end <= self.whole else evicted).append(key)
        found = [(self.shared, shared, min(length, self.whole))] if shared else []
        if evicted:
            assert self.evicted is not None
            found.append((self.evicted, evicted, length))
        return found
