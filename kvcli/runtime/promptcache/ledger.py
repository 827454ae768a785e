"""`PromptLedger`: what one prompt takes from the caches, and which of its rows are written to disk, into the store and
into the file that the user named."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from kvcli.runtime.cache.layout import KVLayout, PageKey
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import WINDOWED
from kvcli.runtime.promptcache import chatfiles, userfile
from kvcli.runtime.promptcache.caches import Ledger, Written
from kvcli.runtime.promptcache.chatfiles import Plan, State, relied_on
from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.found import Kept
from kvcli.runtime.promptcache.held import HeldPages, WindowTrail
from kvcli.runtime.promptcache.keeper import Keeper
from kvcli.runtime.promptcache.lookuprecord import Reading
from kvcli.runtime.promptcache.marks import (
    SHARED,
    SLACK,
    USER,
    Breakpoint,
    Mark,
    affordable,
    evenly,
    nearest,
    pages_of,
    settled,
)
from kvcli.runtime.promptcache.pagefiles import basis_arrays, selected_arrays
from kvcli.runtime.promptcache.prefix import PrefixTrees
from kvcli.runtime.promptcache.prefixpages import covers, needed
from kvcli.runtime.promptcache.store import OWNER, PromptStore
from kvcli.runtime.promptcache.writer import Job

PART_S, PART_SHARE = 20.0, 0.25  # a prefill that takes longer is stored in parts: so long, or that much of it, each
EVEN_TIMES = 2  # what windows leave at even marks takes no more than so many times what a prompt takes without
MARKS_SHARE = 8  # what windows leave at the marks of a prompt takes no more than such a part of the store
STALE_S = 1.0  # after a prefill of more seconds than this another process may have stored the same
WORDS = 64  # tokens of a file's text that it tells in words


class PromptLedger(Ledger):
    """Of one prompt of `n_tokens`: `follow` after each of its steps, `prefilled`, then `answered`.

    `tree`: where its pages stay in memory, None = nowhere. `elsewhere`: gives the tokens of a chat's other branches,
    whose files stay.
    """

    def __init__(
        self,
        keeper: Keeper,
        tree: PrefixTrees | None,
        n_tokens: int,
        elsewhere: Callable[[], Iterable[list[int]]] = tuple,
    ) -> None:
        super().__init__()
        self.keeper, self.tree, self.elsewhere = keeper, tree, elsewhere
        self.kept: list[Kept] = []  # what the store has of the prompt
        self.marks: list[Mark] = []
        self.also: list[tuple[KVLayout, Mapping[PageKey, int]]] = []  # pages of it in files that it does not write
        self._kept_marks: set[Mark] = set()
        self._there: frozenset[PageKey] = frozenset()  # whole pages that the store has, and does not lose
        self.trail = WindowTrail(keeper.engine.pool.layout, n_tokens)
        self._stored: list[tuple[Job, Kept, int]] = []  # the prompt's files in the store; tokens whose rows they get
        self._parts: set[Path] = set()  # those of them that the file of the whole prompt will replace
        self._named: tuple[Job, int] | None = None  # the user's own, and its tokens
        self._refused = ""  # why it is not written
        self.counts = False  # among the look-ups in the store
        self.looked_s = 0.0  # how long that took
        self.reading: Reading | None = None  # what was read from there
        self.alone = True  # nothing else was computed until the prompt was
        self.done = False
        self._prefill_s = 0.0  # what the prompt took
        self._began = self._last_part = time.monotonic()

    def found(self, kept: list[Kept]) -> None:
        """What the store has of the prompt, beside what is on its way there. What lies in an old folder is stored
        again."""
        store, size = self.keeper.store, self._layout.page_size
        kept = [file for file in kept if store is not None and store.writes(file.path.parent)]
        paths = {file.path for file in kept}
        self.kept = [*kept, *(file for job, file, _ in self._stored if not job.problem and file.path not in paths)]
        if owner := self.keeper.owner:
            mine = (file for file in kept if file.contents.about.get(OWNER) == owner and file.page_size == size)
            self.keeper.owned.update((file.path, file.contents) for file in mine)

    def mark(self, marks: Iterable[Mark], common: int) -> None:
        """What is to be kept for prompts that start from these, and from where this one and the one that has the most
        in common with it part: `common` tokens in memory, or what the store knows."""
        parted = (file.agrees for file in self.kept if file.agrees < file.contents.end)
        shared, end = max([common, *parted]), self.trail.end
        parting = [Mark(shared, SHARED)] if self.reuse.tokens + SLACK < shared < end - 1 else []
        self.marks = settled(self._layout, [*marks, *parting, *evenly(self._layout, end)], end)
        own = sum(self._layout.arenas[arena].page_bytes for arena, _ in needed(self._layout, end))
        most = self.keeper.options.max_bytes // MARKS_SHARE
        self.trail.mark(affordable(self._layout, self.marks, most, EVEN_TIMES * own))
        if not self.keeper.owner:
            state = State(self._layout, end, 0, (), self.kept)
            self._there = frozenset(key for key, (_, reach) in state.providers.items() if reach >= state.end(key))

    def breakpoints(self) -> tuple[Breakpoint, ...]:
        return tuple(Breakpoint(m, m.at <= self.reuse.tokens, m in self._kept_marks) for m in self.marks)

    def _places(self, tokens: list[int]) -> Iterator[tuple[KVLayout, Mapping[PageKey, int]]]:
        """Everywhere that later prompts find rows of this one: the pages, and up to how many tokens each is right.
        Files that are not done are taken for written."""
        if self.tree is not None:
            yield from ((self._layout, valid) for valid in self.tree.valid(tokens))
        failed = {file.path for job, file, _ in self._stored if job.problem}
        kept = [file for file in self.kept if file.path not in failed]
        state = State(self._layout, len(tokens), 0, (), kept, self.keeper.owner)
        yield self._layout, {key: reach for key, (_, reach) in state.providers.items()}
        if self._named is not None and not self._named[0].problem:
            yield self._layout, dict.fromkeys(self._named[0].contents.pages, self._named[1])
        yield from self.also

    def _look_back(self, seq: Sequence) -> None:
        """See which marks later prompts can start from. Why one of the user's is not kept is told."""
        if not self.marks:
            return
        places = list(self._places(seq.tokens[: self.trail.end]))
        lost: dict[tuple[str, str], list[str]] = {}
        for mark in self.marks:
            if any(covers(layout, at, valid) for layout, valid in places for at in _starts(layout, mark.at)):
                self._kept_marks.add(mark)
            elif mark.kind == USER and mark.at <= seq.length:
                lost.setdefault((" ".join(mark.name.split()), self._why(mark)), []).append(f"{mark.at:,}")
        for (name, why), (first, *more) in lost.items():
            where = f"token {first}{f' and {len(more)} later ones' if more else ''}"
            self.keeper.writer.later(f"the mark behind '{name}' ({where}) is not kept: {why}")

    def _why(self, mark: Mark) -> str:
        """Why later prompts cannot start from it."""
        if self.tree is None and not self.keeper.keeps(self.trail.end):
            return "nothing of this prompt is written"
        if mark not in self.trail.marks:
            return f"marks take at most 1/{MARKS_SHARE} of `max_bytes`"
        if mark.at <= self.reuse.tokens:
            return (
                "rows that sliding windows need there were not stored with the prompt that was reused;"
                " once that is removed (kv cache rm), a run stores them"
            )
        return "its rows were not written"

    def follow(self, seq: Sequence) -> None:
        """A step of the prompt was computed. What has taken long is stored at once, lest it be lost."""
        keeper = self.keeper
        if seq.selected:
            return
        if self._stores(seq, self.trail.end) or (keeper.file is not None and not keeper.options.read_only):
            self.trail.follow(seq, self._there if keeper.file is None else ())
        if self.tree is not None and (leaving := self.trail.leaving(seq)):
            self.tree.insert(seq, whole=True, only=leaving)
        now = time.monotonic()
        due = now - self._last_part >= max(PART_S, (now - self._began) * PART_SHARE) and seq.exact is None
        if due and seq.length < self.trail.end and self._stores(seq, seq.length):
            self._last_part = now
            held = seq.numbered()
            state = State(self._layout, seq.length, 0, held, self.kept, keeper.owner)
            plan = Plan(sorted(state.new & set(needed(self._layout, seq.length))))
            self._parts |= self._write(seq, state, plan, now - self._began)
        keeper.writer.pump()

    def prefilled(self, seq: Sequence, seconds: float) -> None:
        """All of the prompt's rows are there, after `seconds`."""
        keeper, options, self._prefill_s = self.keeper, self.keeper.options, seconds
        if seq.selected:  # when the rows before these were read
            return
        if self.tree is not None:
            self.tree.insert(seq, whole=True)
        if self.counts and keeper.lookups is not None:
            compute_s = seconds - self.looked_s if self.alone else None
            reuse, elsewhere = self.reuse, 0 if self.reading else self.reuse.disk
            mark = nearest(self.marks, reuse.tokens, self._layout.page_size)
            found = reuse.tokens, self.reading, compute_s, reuse.choice, elsewhere, mark
            keeper.lookups.looked_up(self.trail.end, *found)
        if self._stores(seq, seq.length):
            self.to_store(seq, seconds)
        later = options.save_answer if seq.selector is None else options.selected
        if keeper.file is not None and not later and options.chat is None:
            self.to_file(seq, seconds)

    def answered(self, seq: Sequence) -> Written:
        """There will be no more rows. Where that is awaited, all is written first."""
        keeper, options, self.done = self.keeper, self.keeper.options, True
        if self.tree is not None and seq.shares:
            self.tree.insert(seq)
        told = seq.shares or seq.exact is not None
        selects = options.selected and seq.selector is not None
        if keeper.file is not None and options.chat is None:
            if selects or (options.save_answer and told):
                self.to_file(seq, self._prefill_s)
            elif options.save_answer:
                lossy = "they stand behind rows that were selected by score"
                keeper.writer.later(f"rows of the answer are not written into {keeper.file.path}: {lossy}")
        if options.awaited:
            keeper.wait()
        keeper.writer.pump()
        if self.counts and keeper.lookups is not None:
            keeper.lookups.flush()
        self._look_back(seq)
        return self._written()

    def interrupted(self, seq: Sequence) -> None:
        """Ctrl-C, or an error: what was computed of the prompt is kept, and the next run goes on from there."""
        keeper, self.done, seconds = self.keeper, True, time.monotonic() - self._began
        seq.rewind_to(seq.length)  # less the pages of a step that did not come to its end
        if seq.length < self.reuse.tokens + self._layout.page_size:
            return
        if self.tree is not None:
            self.tree.insert(seq, whole=True)
        if self._stores(seq, self.trail.end):
            self.to_store(seq, seconds)
        if keeper.file is not None:
            self.to_file(seq, seconds)
        keeper.wait()
        self._look_back(seq)
        written = self._written()
        if written.tokens and not written.failures:
            n, total = seq.length, self.trail.end
            keeper.tell.announce(f"{n:,} of {total:,} prompt tokens are kept; the same prompt goes on from there")

    @property
    def _layout(self) -> KVLayout:
        return self.keeper.engine.pool.layout

    def _stores(self, seq: Sequence, n_tokens: int) -> bool:
        """Whether rows of a sequence get into the store, as those of a prompt of so many tokens."""
        return not seq.foreign and self.keeper.stores(n_tokens)

    def to_store(self, seq: Sequence, seconds: float) -> None:
        """Write the pages that the store does not have yet, but for parts of this prompt, in one file. Nothing where
        queries left out pages: such rows are of use to this sequence alone."""
        if seq.exact is not None:
            return
        store, owner = self.keeper.store, self.keeper.owner
        assert store is not None
        if seconds > STALE_S:
            with closing(store.find(seq.tokens)) as found:
                self.found(found.kept)
        store.touch(file for file in self.kept if file.agrees == file.contents.end)  # none of a prompt's goes alone
        held = {**self.trail.copies, **seq.numbered()}
        kept = [file for file in self.kept if file.path not in self._parts]
        state = State(self._layout, seq.length, self.reuse.tokens, held, kept, owner, self.trail.marked)
        if owner and state.new:
            plan = chatfiles.plan(state, self.keeper.owned, relied_on(store, self._layout, self.elsewhere()))
        else:
            plan = Plan(sorted(state.new))
        self._write(seq, state, replace(plan, replaced=(*plan.replaced, *self._parts)), seconds)
        self._parts.clear()

    def _write(self, seq: Sequence, state: State, plan: Plan, seconds: float) -> set[Path]:
        """Write files of the store, one for each of its folders that gets anything."""
        shelves, paths = self.keeper.store, set[Path]()
        if shelves is None or not plan.pages:
            return paths
        self.keeper.announce(shelves)
        targets = shelves.of(plan.pages, seq.length)
        for store, pages, until in targets:
            last = store is targets[-1][0]
            replaced = tuple(path for path in plan.replaced if path not in paths) if last else ()
            part = replace(plan, pages=pages, replaced=replaced)
            paths.add(self._segment(seq, state, store, part, until, seconds))
        return paths

    def _segment(self, seq: Sequence, state: State, store: PromptStore, plan: Plan, until: int, seconds: float) -> Path:
        """Write one of them, with tokens as far as `until`."""
        size, arenas = self._layout.page_size, self._layout.arenas
        whole = [number for arena, number in plan.pages if arenas[arena].kind not in WINDOWED]
        first = min(whole, default=seq.length // size)  # sliding pages may come from before
        marked = (m.at // size for m in self.trail.marks if not pages_of(self._layout, m.at).isdisjoint(plan.pages))
        first = min([first, *marked])  # so that a prompt which parts from this one there finds them
        parent = store.chain(seq.tokens)[first * size // store.block]
        about = {OWNER: self.keeper.owner} if plan.own else {}
        contents = self._contents(seq, plan.pages, seconds, store.identity, about, first * size, parent, until)
        held_pages = HeldPages(seq, self.trail.copies, plan.pages)
        write = partial(store.add, replaced=plan.replaced)
        job = self.keeper.writer.start(contents, held_pages, write, f"the cache of this prompt in {store.root}")
        file = Kept(store.path_of(contents), contents, until, size)
        stored = (each for each in self._stored if each[1].path not in plan.replaced)
        self._stored = [*stored, (job, file, state.rows(plan.pages))]
        self._replace(file, plan)
        return file.path

    def _replace(self, file: Kept, plan: Plan) -> None:
        """The store has this file now, or will soon, and no longer those that it replaces."""
        self.kept = [file, *(other for other in self.kept if other.path not in plan.replaced)]
        if lookups := self.keeper.lookups:
            lookups.stored(file.path, file.contents.start, file.contents.end, plan.replaced)
        for path in plan.replaced:
            self.keeper.owned.pop(path, None)
        if plan.own:
            self.keeper.owned[file.path] = file.contents

    def to_file(self, seq: Sequence, seconds: float) -> None:
        """Write the file that the user named, where it has less than this."""
        file = self.keeper.file
        assert file is not None
        if not file.wants(seq.tokens):
            return
        if seq.exact is not None:
            reads = self._layout.attend.named
            lossy = f"with {reads} rows from token {seq.exact:,} on are lossy"
            self._refused = f"{file.path} is not written: {lossy}"
            self.keeper.writer.later(self._refused)
            return
        keys = sorted({**self.trail.copies, **seq.numbered()})
        identity = self.keeper.engine.identity()
        if seq.selected:
            assert self._layout.selection is not None
            identity["eviction"] = self._layout.selection.identity
        elif not seq.evicted:
            identity["eviction"] = "none"
        contents = self._contents(seq, keys, seconds, identity, {})
        held_pages = HeldPages(seq, self.trail.copies, keys)
        file.tokens = list(seq.tokens)  # from now on: of several prompts the first one has the file
        self._named = self.keeper.writer.start(contents, held_pages, file.write, str(file.path)), seq.length

    def _written(self) -> Written:
        """What has become of the prompt's files; those that are not done are taken for written."""
        stored = [(job, n) for job, _, n in self._stored]
        named = [] if self._named is None else [self._named]
        failures = [job.failure for job, _ in (*stored, *named) if job.problem]
        written = (sum(n for job, n in jobs if not job.problem) for jobs in (stored, named))
        return Written(max(written), tuple(filter(None, (*failures, self._refused))))

    def _contents(
        self,
        seq: Sequence,
        keys: Iterable[PageKey],
        seconds: float,
        identity: dict[str, str],
        more: dict[str, str],
        start: int = 0,
        parent: str = "",
        end: int | None = None,
    ) -> Contents:
        """What a file says that has these pages, and the tokens from `start` to `end`."""
        engine, options, arenas = self.keeper.engine, self.keeper.options, self._layout.arenas
        losses = seq.losses(evicted=identity["eviction"] != "none")
        about = userfile.about(engine.model, engine.computed_on, losses, seconds, not seq.foreign) | more
        about["begins"] = " ".join(engine.text_of(seq.tokens[max(start, options.lead) :][:WORDS]).split())
        about |= {"source": options.source} if options.source else {}
        about |= {"chat": options.chat} if options.chat is not None else {}
        sizes = {arena: arenas[arena].page_bytes for arena, _ in keys}
        basis = basis_arrays(seq.bases) | selected_arrays(seq)
        return Contents(identity, seq.tokens[start:end], list(keys), sizes, basis, about, start, parent)


def _starts(layout: KVLayout, at: int) -> set[int]:
    """Where a prompt starts that has `at` tokens in common with another: there, or where that page begins below 16
    bits and where layers keep a state, and that block where rows are computed in such."""
    paged = layout.states or any(group.sealed for group in layout.groups)
    unit = max(layout.page_size if paged else 1, layout.grain)
    return {at, at // unit * unit} - {0}
