"""`Keeper`: which rows of a prompt are written to disk, into the store and into the file that the user named."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import SLIDING
from kvcli.runtime.promptcache import chatfiles, userfile
from kvcli.runtime.promptcache.caches import Written
from kvcli.runtime.promptcache.chatfiles import OWNER, Plan, State, relied_on
from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.held import Held, Trail
from kvcli.runtime.promptcache.pagefiles import basis_arrays
from kvcli.runtime.promptcache.prefixpages import needed
from kvcli.runtime.promptcache.store import Kept, Limits, PromptStore
from kvcli.runtime.promptcache.writer import CacheWriter, Job
from kvcli.words import human_bytes

PART_S, PART_SHARE = 20.0, 0.25  # a prefill that takes longer is stored in parts: so long, or that much of it, each
STALE_S = 1.0  # after a prefill of more seconds than this another process may have stored the same
WORDS = 64  # tokens of a file's text that it tells in words


@dataclass(frozen=True)
class Setting:
    """What caches need to know of an engine."""

    pool: PagePool
    pool_bytes: int  # as planned for the whole context: pages that nobody uses never make the pool larger
    identity: Callable[[], dict[str, str]]  # see fingerprint.py; takes a while for a model that is new
    computed_on: str
    model: str
    text_of: Callable[[list[int]], str]
    convert: userfile.Convert


class Keeper:
    """Writes what is new. One prompt at a time: `begin`, `follow` after each of its steps, `to_store` and `to_file`."""

    def __init__(self, setting: Setting, options: PromptCacheOptions, tell: Tell) -> None:
        self.setting, self.options, self.tell = setting, options, tell
        self.writer = CacheWriter(tell.warn)
        self.file = userfile.UserFile(options) if options.file is not None else None
        self.kept: list[Kept] = []  # what the store has of the prompt
        self.base = 0  # rows of the prompt that were there
        self.owner = "" if options.chat is None else options.chat or f"({os.getpid()} {time.time_ns()})"
        self._owned: dict[Path, Contents] = {}  # files of this chat, which its next ones may replace
        self._stored: list[tuple[Job, Kept, int]] = []  # the prompt's files in the store; tokens whose rows they get
        self._parts: set[Path] = set()  # those of them that the file of the whole prompt will replace
        self._named: tuple[Job, int] | None = None  # the user's own, and its tokens
        self._began = self._last_part = 0.0
        self.exact = True  # all rows are those that this machine computes
        self.trail = Trail(setting.pool.layout, 0)
        self._store: PromptStore | None = None

    @property
    def store(self) -> PromptStore | None:
        """The store; None where there is to be none."""
        if self._store is None and self.options.store is not None:
            identity = {**self.setting.identity(), "computed_on": self.setting.computed_on}
            limits = Limits(self.options.max_bytes, self.options.ttl_s)
            page_size = self.setting.pool.layout.page_size
            self._store = PromptStore(self.options.store, identity, page_size, limits, self.tell.warn)
        return self._store

    def begin(self, n_tokens: int) -> None:
        """A prompt of `n_tokens` comes."""
        self.trail = Trail(self.setting.pool.layout, n_tokens)
        self.base, self.kept, self._stored, self._parts, self._named = 0, [], [], set(), None
        self._began = self._last_part = time.monotonic()

    def found(self, kept: list[Kept]) -> None:
        """What the store has of the prompt, beside what is on its way there."""
        paths = {file.path for file in kept}
        self.kept = [*kept, *(file for job, file, _ in self._stored if not job.problem and file.path not in paths)]
        if self.owner:
            mine = (file for file in kept if file.contents.about.get(OWNER) == self.owner)
            self._owned.update((file.path, file.contents) for file in mine)

    def stores(self, n_tokens: int) -> bool:
        """Whether a prompt of `n_tokens` gets into the store."""
        return self.options.store is not None and n_tokens >= self.options.stored_from and self.exact

    def follow(self, seq: Sequence) -> None:
        """A step of the prompt was computed. What has taken long is stored at once, lest it be lost."""
        if self.stores(self.trail.end) or (self.file is not None and not self.options.read_only):
            self.trail.follow(seq)
        now = time.monotonic()
        due = now - self._last_part >= max(PART_S, (now - self._began) * PART_SHARE)
        if due and seq.length < self.trail.end and self.stores(seq.length):
            self._last_part = now
            held = seq.numbered()
            state = State(self._layout, seq.length, 0, held, self.kept, self.owner)
            plan = Plan(sorted(state.new & set(needed(self._layout, seq.length))))
            self._parts |= self._write(seq, state, plan, now - self._began)

    @property
    def _layout(self) -> KVLayout:
        return self.setting.pool.layout

    def to_store(self, seq: Sequence, seconds: float, elsewhere: Iterable[list[int]] = ()) -> None:
        """Write the pages that the store does not have yet, but for parts of this prompt, in one file.

        `elsewhere`: the tokens of a chat's other branches, whose files stay.
        """
        store = self.store
        assert store is not None
        if seconds > STALE_S:
            with closing(store.find(seq.tokens)) as found:
                self.found(found.kept)
        store.touch(file for file in self.kept if file.agrees == file.contents.end)  # none of a prompt's goes alone
        held = {**self.trail.copies, **seq.numbered()}
        kept = [file for file in self.kept if file.path not in self._parts]
        state = State(self._layout, seq.length, self.base, held, kept, self.owner)
        if self.owner and state.new:
            plan = chatfiles.plan(state, self._owned, relied_on(store, self._layout, elsewhere))
        else:
            plan = Plan(sorted(state.new))
        self._write(seq, state, replace(plan, replaced=(*plan.replaced, *self._parts)), seconds)
        self._parts.clear()

    def _write(self, seq: Sequence, state: State, plan: Plan, seconds: float) -> set[Path]:
        """Write a file of the store, if there is anything to write."""
        store, layout = self.store, self._layout
        if store is None or not plan.pages:
            return set()
        whole = [number for arena, number in plan.pages if layout.arenas[arena].kind != SLIDING]
        first = min(whole, default=seq.length // layout.page_size)  # sliding pages may come from before
        parent = store.chain(seq.tokens)[first]
        about = {OWNER: self.owner} if plan.own else {}
        contents = self._contents(seq, plan.pages, seconds, store.identity, about, first * layout.page_size, parent)
        self._announce(store)
        held_pages = Held(seq, self.trail.copies, plan.pages)
        write = partial(store.add, replaced=plan.replaced)
        job = self.writer.start(contents, held_pages, write, f"the cache of this prompt in {store.root}")
        file = Kept(store.path_of(contents), contents, seq.length)
        stored = (each for each in self._stored if each[1].path not in plan.replaced)
        self._stored = [*stored, (job, file, state.rows(plan.pages))]
        self._replace(file, plan)
        return {file.path}

    def _announce(self, store: PromptStore) -> None:
        """Say what the store is, where this is its first file."""
        if not store.root.exists():
            room, days = human_bytes(self.options.max_bytes), self.options.ttl_s / 86400
            self.tell.announce(
                f"long prompts, their text included, are kept in {store.root}, at most {room} for {days:.3g} days, and"
                " need not be computed again; --no-cache turns that off"
            )

    def _replace(self, file: Kept, plan: Plan) -> None:
        """The store has this file now, or will soon, and no longer those that it replaces."""
        self.kept = [file, *(other for other in self.kept if other.path not in plan.replaced)]
        for path in plan.replaced:
            self._owned.pop(path, None)
        if plan.own:
            self._owned[file.path] = file.contents

    def to_file(self, seq: Sequence, seconds: float) -> None:
        """Write the file that the user named, where it has less than this."""
        assert self.file is not None
        if not self.file.wants(seq.tokens):
            return
        keys = sorted({**self.trail.copies, **seq.numbered()})
        contents = self._contents(seq, keys, seconds, self.setting.identity(), {})
        held_pages = Held(seq, self.trail.copies, keys)
        self._named = self.writer.start(contents, held_pages, self.file.write, str(self.file.path)), seq.length

    def written(self) -> Written:
        """What has become of the prompt's files; those that are not done are taken for written."""
        stored = [(job, n) for job, _, n in self._stored]
        named = [] if self._named is None else [self._named]
        failures = [job.failure for job, _ in (*stored, *named) if job.problem]
        written = (sum(n for job, n in jobs if not job.problem) for jobs in (stored, named))
        return Written(max(written), tuple(failures))

    def _contents(
        self,
        seq: Sequence,
        keys: Iterable[PageKey],
        seconds: float,
        identity: dict[str, str],
        more: dict[str, str],
        start: int = 0,
        parent: str = "",
    ) -> Contents:
        """What a file says that has these pages, and the tokens from `start` on."""
        setting, arenas = self.setting, self.setting.pool.layout.arenas
        about = userfile.about(setting.model, setting.computed_on, seq.losses(), seconds, self.exact) | more
        about["begins"] = " ".join(setting.text_of(seq.tokens[max(start, self.options.lead) :][:WORDS]).split())
        about |= {"source": self.options.source} if self.options.source else {}
        about |= {"chat": self.options.chat} if self.options.chat is not None else {}
        sizes = {arena: arenas[arena].page_bytes for arena, _ in keys}
        basis = basis_arrays(seq.bases)
        return Contents(identity, seq.tokens[start:], list(keys), sizes, basis, about, start, parent)
