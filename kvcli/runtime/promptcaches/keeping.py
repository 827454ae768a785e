"""`Keeper`: which rows of a prompt are written to disk, into the store and into the file that the user named."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.layout import PageKey
from kvcli.runtime.cache.pages import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import SLIDING
from kvcli.runtime.promptcaches import userfile
from kvcli.runtime.promptcaches.cachewriter import CacheWriter
from kvcli.runtime.promptcaches.held import Held, Trail
from kvcli.runtime.promptcaches.pagefiles import basis_arrays
from kvcli.runtime.promptcaches.promptcache import Contents
from kvcli.runtime.promptcaches.promptstore import Limits, PromptStore
from kvcli.telling import Tell


@dataclass(frozen=True)
class Setting:
    """What caches need to know of an engine."""

    pool: PagePool
    pool_bytes: int  # as planned for the whole context: pages that nobody uses never make the pool larger
    identity: Callable[[], dict[str, str]]  # see fingerprint.py; takes a while for a model that is new
    computed_on: str
    model: str
    text_of: Callable[[int], str]
    convert: userfile.Convert


class Keeper:
    """Writes what is new. One prompt at a time: `begin`, `follow` after each of its steps, `to_store` and `to_file`."""

    def __init__(self, setting: Setting, options: PromptCacheOptions, tell: Tell) -> None:
        self.setting, self.options, self.tell = setting, options, tell
        self.writer = CacheWriter(tell.warn)
        self.file = userfile.UserFile(options) if options.file is not None else None
        self.stored: dict[PageKey, int] = {}  # what the store has of the prompt: see `Found.valid`
        self.exact = True  # all rows are those that this machine computes
        self.trail = Trail(setting.pool.layout, 0)
        self._store: PromptStore | None = None

    @property
    def store(self) -> PromptStore | None:
        """The store; None where there is to be none."""
        if self._store is None and self.options.store is not None:
            identity = {**self.setting.identity(), "computed_on": self.setting.computed_on}
            limits = Limits(self.options.max_bytes, self.options.ttl_s)
            self._store = PromptStore(self.options.store, identity, self.setting.pool.layout.page_size, limits)
        return self._store

    def begin(self, n_tokens: int) -> None:
        """A prompt of `n_tokens` comes."""
        self.trail = Trail(self.setting.pool.layout, n_tokens)
        self.stored = {}

    def stores(self, n_tokens: int) -> bool:
        """Whether a prompt of `n_tokens` gets into the store."""
        return self.options.store is not None and n_tokens >= self.options.min_tokens and self.exact

    def follow(self, seq: Sequence) -> None:
        """A step of the prompt was computed."""
        if self.stores(self.trail.end) or (self.file is not None and not self.options.read_only):
            self.trail.follow(seq)

    def to_store(self, seq: Sequence, seconds: float) -> int:
        """Write the pages that the store does not have yet; returns the tokens that the file covers."""
        store, layout = self.store, self.setting.pool.layout
        assert store is not None
        size, length = layout.page_size, seq.length
        held = {**self.trail.copies, **seq.numbered()}
        keys = sorted(key for key in held if self.stored.get(key, -1) < min(length, (key[1] + 1) * size))
        if not keys:
            return 0
        whole = [number for arena, number in keys if layout.arenas[arena].kind != SLIDING]
        first = min(whole, default=length // size)  # sliding pages may come from before
        parent = store.chain(seq.tokens)[first]
        contents = self._contents(seq, keys, seconds, store.identity, first * size, parent)
        if not store.root.exists():
            most, days = self.options.max_bytes / (1 << 20), self.options.ttl_s / 86400
            room = f"{most / 1024:.3g} GiB" if most >= 1024 else f"{most:.3g} MiB"
            self.tell.announce(
                f"long prompts are kept in {store.root}, at most {room} for {days:.3g} days, and need not be"
                " computed again; --no-cache turns that off"
            )
        held_pages = Held(seq, self.trail.copies, keys)
        self.writer.start(contents, held_pages, store.add, f"the cache of this prompt in {store.root}")
        self.stored = {**self.stored, **dict.fromkeys(keys, length)}
        return length - first * size

    def to_file(self, seq: Sequence, seconds: float) -> int:
        """Write the file that the user named, where it has less than this; returns the tokens written."""
        assert self.file is not None
        if not self.file.wants(seq.tokens):
            return 0
        keys = sorted({**self.trail.copies, **seq.numbered()})
        contents = self._contents(seq, keys, seconds, self.setting.identity())
        held_pages = Held(seq, self.trail.copies, keys)
        self.writer.start(contents, held_pages, self.file.write, str(self.file.path))
        return seq.length

    def _contents(
        self,
        seq: Sequence,
        keys: Iterable[PageKey],
        seconds: float,
        identity: dict[str, str],
        start: int = 0,
        parent: str = "",
    ) -> Contents:
        """What a file says that has these pages, and the tokens from `start` on."""
        setting, arenas = self.setting, self.setting.pool.layout.arenas
        about = userfile.about(setting.model, setting.computed_on, seq.losses(), seconds, self.exact)
        sizes = {arena: arenas[arena].page_bytes for arena, _ in keys}
        basis = basis_arrays(seq.bases)
        return Contents(identity, seq.tokens[start:], list(keys), sizes, basis, about, start, parent)
