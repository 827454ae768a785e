"""`PromptCaches`: which rows of a prompt need not be computed. It asks the live sequence, the pages that stayed in the
pool, a file that the user named, and the store on disk, and gives new rows to all of them.

Whatever is found is a prefix of the prompt's token ids, and the last token is always run again. Rows that this machine
would not compute bit for bit (converted ones, or another device's) are used where the user named the file, and never
get into the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvcli.errors import CacheFileError, DoesNotFit
from kvcli.options import PromptCacheOptions
from kvcli.runtime import missed, userfile
from kvcli.runtime.caches import Reuse
from kvcli.runtime.cachewriter import CacheWriter
from kvcli.runtime.pagefiles import bases_of, basis_arrays, load_pages
from kvcli.runtime.pages import PagePool
from kvcli.runtime.prefix import PrefixTree
from kvcli.runtime.promptcache import Contents
from kvcli.runtime.promptstore import Found, Limits, PromptStore, discard
from kvcli.runtime.sequence import PageKey, Sequence
from kvcli.runtime.snapshot import Snapshot, common_length, longest, needed

PATIENCE_S = 1.0  # an exit is delayed by more only after a word


@dataclass(frozen=True)
class Tell:
    """How the user hears of it: losses, what takes space or time, what is good to know."""

    warn: Callable[[str], None]
    announce: Callable[[str], None]
    notice: Callable[[str], None]


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


class PromptCaches:
    """The caches of one process. One sequence at a time goes through `restore`, `follow`..., `prefilled`."""

    def __init__(self, setting: Setting, options: PromptCacheOptions, tell: Tell) -> None:
        self.setting, self.options, self.tell = setting, options, tell
        self.tree = PrefixTree(setting.pool)
        self.writer = CacheWriter(tell.warn)
        setting.pool.reclaim, setting.pool.soft_bytes = self._make_room, setting.pool_bytes
        self._snapshot = Snapshot(setting.pool)
        self._stored: dict[PageKey, int] = {}  # what the store has of the prompt at hand
        self._store: PromptStore | None = None
        self._file = userfile.UserFile(options) if options.file is not None else None
        self._losses: tuple[str, ...] = ()
        self._exact = True  # all rows are those that this machine computes

    @property
    def store(self) -> PromptStore | None:
        if self._store is None and self.options.store is not None:
            identity = {**self.setting.identity(), "computed_on": self.setting.computed_on}
            limits = Limits(self.options.max_bytes, self.options.ttl_s)
            self._store = PromptStore(self.options.store, identity, self.setting.pool.layout.page_size, limits)
        return self._store

    def _make_room(self, arena: int, last_resort: bool) -> None:
        """Free a page of an arena that is here only in case it is of use again; at last, all that is held."""
        if self.tree.evict(arena) or not last_resort:
            return
        self._snapshot.close()
        self.tree.clear()
        self._wait()

    def _wait(self) -> None:
        """Until all is written."""
        tell = self.tell.announce
        self.writer.finish(PATIENCE_S, lambda nbytes: tell(f"writing the prompt cache ({nbytes >> 20:,} MiB)"))

    @torch.inference_mode()
    def restore(self, seq: Sequence, prompt: list[int]) -> Reuse:
        """See `Caches`. Raises CacheFileError for a named file that cannot be used, where that is strict."""
        wanted = prompt[:-1]
        self._wait()  # what is being written is to be found
        self._snapshot.close()
        self._snapshot = Snapshot(self.setting.pool)
        reuse = self._from_memory(seq, wanted)
        if self._file is not None and not self._file.asked:
            reuse = self._from_file(seq, wanted, reuse)
        self._stored = {}
        if self.options.store is not None and len(prompt) >= self.options.min_tokens:
            reuse = self._from_store(seq, prompt, reuse)
        self.follow(seq)
        return reuse

    def _from_memory(self, seq: Sequence, wanted: list[int]) -> Reuse:
        live = seq.rewindable(common_length(seq.tokens, wanted))
        length, pages, bases = self.tree.find(wanted)
        if length > live:
            seq.adopt(wanted[:length], pages, bases)
        else:
            seq.rewind(live)
        return Reuse(max(live, length))

    def _from_file(self, seq: Sequence, wanted: list[int], reuse: Reuse) -> Reuse:
        assert self._file is not None
        try:
            with self._file.open(self.setting.identity()) as file:
                if self._file.converts:
                    length = self._convert(file, seq, wanted, reuse.tokens)
                else:
                    found = Found()
                    found.add(file, common_length(file.contents.tokens, wanted))
                    length = self._load(found, seq, wanted, reuse.tokens)
                    if file.contents.about.get("computed_on") != self.setting.computed_on and length > reuse.tokens:
                        self._exact = False
                        self.tell.notice(f"{file.path} was computed on {file.contents.about.get('computed_on')}")
        except FileNotFoundError:
            return reuse
        except CacheFileError as error:
            if self.options.strict:
                raise
            self.tell.warn(f"{error.message}; {self._file.fate()}")
            return replace(reuse, reason=error.message)
        self._file.used = length > reuse.tokens
        if length > reuse.tokens:
            return Reuse(length, length)
        name, held = str(self._file.path), self._file.tokens
        why = missed.diverges(name, common_length(held, wanted), held, wanted, self.setting.text_of)
        return self._missed(reuse, why)

    def _missed(self, reuse: Reuse, why: str) -> Reuse:
        """The same, with the reason why it is no more."""
        if why:
            self.tell.notice(why)
        return replace(reuse, reason=why or reuse.reason)

    def _convert(self, file: userfile.PromptCacheFile, seq: Sequence, wanted: list[int], have: int) -> int:
        """Rows of a file of a larger cache type, encoded as this run's."""
        pool, shared = self.setting.pool, common_length(file.contents.tokens, wanted)
        if shared <= have:
            return have
        converted = self.setting.convert(file, shared)
        length = converted.rewindable(shared)
        pages: dict[PageKey, int] = {}
        held = converted.numbered()
        try:
            for key in needed(pool.layout, length):
                pages[key] = pool.take(key[0])
                pool.page(key[0], pages[key]).copy_(converted.pool.page(key[0], held[key]))
        except DoesNotFit:
            _release(pool, pages)
            return have
        arrays = basis_arrays(converted.bases)
        seq.adopt(wanted[:length], pages, bases_of(arrays, pool.layout, length, pool.device))
        _release(pool, pages)
        self._exact = False
        found = file.contents.identity
        self.tell.announce(
            f"{file.path}: {length:,} tokens converted from {found['cache_type_k'].split()[0]}; answers may differ"
            " from those of a run without it"
        )
        return length

    def _from_store(self, seq: Sequence, prompt: list[int], reuse: Reuse) -> Reuse:
        store, wanted = self.store, prompt[:-1]
        assert store is not None
        while True:
            found = store.find(prompt)
            for told in found.removed:
                self.tell.warn(told)
            try:
                length = self._load(found, seq, wanted, reuse.tokens)
            except CacheFileError as error:  # found out while its pages were read
                self.tell.warn(discard(Path(error.path), error))
                continue
            finally:
                found.close()
            self._stored = found.valid
            if length > reuse.tokens:
                return Reuse(length, length)
            if not reuse.tokens or found.closest - reuse.tokens >= store.page_size:
                return self._missed(reuse, missed.reason(store, found, wanted, self.setting.text_of))
            return reuse

    def _load(self, found: Found, seq: Sequence, wanted: list[int], have: int) -> int:
        """Read the pages of the longest prefix, where it is longer than `have` by enough; the rows there are."""
        pool, size = self.setting.pool, self.setting.pool.layout.page_size
        length = longest(pool.layout, min(len(wanted), max(found.valid.values(), default=0)), found.valid)
        if length < have + size:
            return have
        keys = set(needed(pool.layout, length))
        whole = [key for key, valid in found.valid.items() if valid >= (key[1] + 1) * size]
        beside = [key for key in whole if key not in keys and self._snapshot.keeps(key, length)]
        files = {key: found.files[key] for key in (*keys, *beside)}
        basis = next((f.contents.basis for f in files.values() if f.contents.basis), {})
        bases = bases_of(basis, pool.layout, length, pool.device)
        try:
            pages = load_pages(pool, files)
        except DoesNotFit:
            return have
        seq.adopt(wanted[:length], {key: pages[key] for key in keys}, bases)
        _release(pool, {key: pages[key] for key in keys})
        self._snapshot.pages.update((key, pages[key]) for key in beside)
        if self._store is not None:
            self._store.touch(file for file in files.values() if file.path.parent == self._store.folder)
        return length

    def follow(self, seq: Sequence) -> None:
        self._snapshot.follow(seq)
        self._losses = seq.losses()

    def prefilled(self, seq: Sequence, seconds: float) -> int:
        self.tree.insert(self._snapshot)
        written = 0
        if self.options.store is not None and seq.length >= self.options.min_tokens and self._exact:
            written = self._to_store(seconds)
        if self._file is not None and not self.options.save_answer:
            written = max(written, self._to_file(seconds))
        return written

    def answered(self, seq: Sequence) -> None:
        self.follow(seq)
        self.tree.insert(self._snapshot)
        if self._file is not None and self.options.save_answer:
            self._to_file(0.0)

    def save(self, seq: Sequence) -> None:
        """Write all whole pages of `seq` to the store, however short it is."""
        self.follow(seq)
        if self.options.store is not None and self._exact:
            self._to_store(0.0)

    def pump(self) -> None:
        self.writer.pump()

    def close(self) -> None:
        """Wait until all is written, with a word if that takes more than a second; let go of all pages."""
        try:
            self._wait()
        finally:
            self.writer.give_up()
            self._snapshot.close()
            self.tree.clear()

    def _contents(self, keys: list[PageKey], start: int, parent: str, seconds: float) -> Contents:
        """What a file says that has these pages of the snapshot, and its tokens from `start` on."""
        snapshot, layout = self._snapshot, self.setting.pool.layout
        identity = self._store.identity if self._store is not None and parent else self.setting.identity()
        about = userfile.about(self.setting.model, self.setting.computed_on, self._losses, seconds, self._exact)
        sizes = {arena: layout.arenas[arena].page_bytes for arena, _ in keys}
        basis = basis_arrays(snapshot.bases)
        return Contents(identity, snapshot.tokens[start:], sorted(keys), sizes, basis, about, start, parent)

    def _to_store(self, seconds: float) -> int:
        """Write the pages that the store does not have yet; returns the tokens that the file covers."""
        store, snapshot = self.store, self._snapshot
        assert store is not None
        size, length = store.page_size, len(snapshot.tokens)
        keys = [k for k in snapshot.pages if self._stored.get(k, -1) < min(length, (k[1] + 1) * size)]
        if not keys:
            return 0
        whole = [number for arena, number in keys if not self._slides(arena)]
        first = min(whole, default=length // size)
        start = first * size
        contents = self._contents(keys, start, store.chain(snapshot.tokens)[first], seconds)
        if not store.root.exists():
            gib, days = self.options.max_bytes / (1 << 30), self.options.ttl_s / 86400
            self.tell.announce(
                f"long prompts are kept in {store.root}, at most {gib:.3g} GiB for {days:.3g} days, and need not be"
                " computed again; --no-cache turns that off"
            )
        self.writer.start(contents, self._snapshot.share(), store.add, f"the cache of this prompt in {store.root}")
        self._stored = {**self._stored, **dict.fromkeys(keys, length)}
        return length - start

    def _slides(self, arena: int) -> bool:
        groups = self.setting.pool.layout.groups
        return arena < len(groups) and bool(groups[arena].window)

    def _to_file(self, seconds: float) -> int:
        """Write the file that the user named, where it has less than this."""
        assert self._file is not None
        if not self._file.wants(self._snapshot.tokens):
            return 0
        contents = self._contents(list(self._snapshot.pages), 0, "", seconds)
        self.writer.start(contents, self._snapshot.share(), self._file.write, str(self._file.path))
        return len(self._snapshot.tokens)


def _release(pool: PagePool, pages: dict[PageKey, int]) -> None:
    for (arena, _), page in pages.items():
        pool.release(arena, page)
