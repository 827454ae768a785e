"""`Keeper`: what all requests share of the rows that are written to disk: the store, the file that the user named, the
thread that writes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache import userfile
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.lookuprecord import Lookups
from kvcli.runtime.promptcache.sameness import SCOPE
from kvcli.runtime.promptcache.shelves import Shelves
from kvcli.runtime.promptcache.store import Limits
from kvcli.runtime.promptcache.writer import CacheWriter
from kvcli.words import human_bytes, human_time

PATIENCE_S = 1.0  # an exit is delayed by more only after a word


@dataclass(frozen=True)
class EngineView:
    """What caches need to know of an engine."""

    pool: PagePool
    pool_bytes: int  # as planned for the whole context: pages that nobody uses never make the pool larger
    identity: Callable[[], dict[str, str]]  # see fingerprint.py; takes a while for a model that is new
    computed_on: str
    model: str
    text_of: Callable[[list[int]], str]
    identity_of: Callable[[KVLayout], dict[str, str]]  # that of a layout of this model
    source_of: Callable[[PromptCacheFile], KVLayout]  # that of a file that may be converted; raises CacheFileError
    larger: Callable[[], list[KVLayout]]  # those whose rows may be converted
    convert: Callable[[Found, list[int], KVLayout], Sequence]  # the rows of tokens, from files of such a layout
    sums: str = ""  # what else decides the last bits of a row: how the cache is cut into pages; "" = nothing
    card: str = ""  # the name of the GPU that the pool is on


class Keeper:
    """The disk side of the caches of one process; what is written of one prompt: see `PromptLedger`."""

    def __init__(self, engine: EngineView, options: PromptCacheOptions, tell: Tell) -> None:
        self.engine, self.options, self.tell = engine, options, tell
        self.writer = CacheWriter(tell.warn)
        self.file = userfile.UserFile(options) if options.file is not None else None
        self.owner = "" if options.chat is None else options.chat or f"({os.getpid()} {time.time_ns()})"
        self.owned: dict[Path, Contents] = {}  # files of this chat, which its next ones may replace
        self._store: Shelves | None = None
        self._lookups: Lookups | None = None

    @property
    def store(self) -> Shelves | None:
        """The store; None where there is to be none."""
        if self._store is None and self.options.store is not None:
            identity = {**self.engine.identity(), "computed_on": self.engine.computed_on}
            identity |= {"sums": self.engine.sums} if self.engine.sums else {}
            identity |= {SCOPE: self.options.scope} if self.options.scope else {}
            limits = Limits(self.options.max_bytes, self.options.ttl_s)
            self._store = Shelves(self.options.store, identity, limits, self.tell.warn)
        return self._store

    @property
    def lookups(self) -> Lookups | None:
        """What is recorded of the store, and predicted; None where there is no store."""
        if self._lookups is None and (store := self.store) is not None:
            self._lookups = Lookups(store.root, store.identity, self.engine.model, self.engine.card)
        return self._lookups

    def wait(self) -> None:
        """Until all is written, with a word if that takes more than a second."""
        tell = self.tell.announce
        self.writer.finish(PATIENCE_S, lambda left: tell(f"writing the prompt cache ({human_bytes(left)})"))

    def stores(self, n_tokens: int) -> bool:
        """Whether a prompt of `n_tokens` gets into the store, if its rows are this engine's own."""
        return self.options.store is not None and n_tokens >= self.options.stored_from

    def keeps(self, n_tokens: int) -> bool:
        """Whether rows of a prompt of `n_tokens` get into the store or into the user's file."""
        return self.stores(n_tokens) or (self.file is not None and not self.options.read_only)

    def announce(self, store: Shelves) -> None:
        """Say what the store is, where this is its first file."""
        if not store.root.exists():
            room, time = human_bytes(self.options.max_bytes), human_time(self.options.ttl_s)
            self.tell.announce(
                f"long prompts are kept in {store.root}, at most {room} for {time}, so that none is computed twice."
                " The files hold their tokens in clear, readable by you alone; `store=None` turns that off"
            )
