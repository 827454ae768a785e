"""`PromptCaches`: which rows of a prompt need not be computed. It asks the live sequence, the pages that stayed in the
pool, a file that the user named, and the store on disk, and gives new rows to all of them.

Whatever is found is a prefix of the prompt's token ids, and the last token is always run again. Rows that this machine
would not compute bit for bit (converted ones, or another device's) are used where the user named the file, and never
get into the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from weakref import WeakKeyDictionary

import torch

from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache import missed
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Ledger, Reuse, live_rows
from kvcli.runtime.promptcache.filerows import FileRows
from kvcli.runtime.promptcache.keeper import EngineView, Keeper, Tell
from kvcli.runtime.promptcache.ledger import PromptLedger
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.promptcache.prefix import PrefixTrees
from kvcli.runtime.promptcache.prefixpages import common_length, longest


class PromptCaches:
    """The caches of one process, for any number of requests. What belongs to one of them is in its ledger."""

    def __init__(
        self,
        engine: EngineView,
        options: PromptCacheOptions,
        tell: Tell,
        elsewhere: Callable[[], Iterable[list[int]]] = tuple,
    ) -> None:
        """`elsewhere` gives the tokens of a chat's other branches."""
        self.engine, self.options, self.tell, self.elsewhere = engine, options, tell, elsewhere
        self.keeper = Keeper(engine, options, tell)
        self.tree, self.files = PrefixTrees(engine.pool), FileRows(self.keeper)
        self._ledgers: WeakKeyDictionary[Sequence, PromptLedger] = WeakKeyDictionary()  # the newest of each
        engine.pool.lend(self._make_room, engine.pool_bytes)

    def _make_room(self, arena: int, last_resort: bool) -> None:
        """Free a page of an arena that is here only in case it is of use again; at last, all that is held."""
        if self.tree.evict(arena) or not last_resort:
            return
        self.tree.clear()
        self._wait()

    @property
    def _page_size(self) -> int:
        return self.engine.pool.layout.page_size

    def _wait(self) -> None:
        self.keeper.wait()

    def ledger(self, prompt_tokens: int) -> PromptLedger:
        tree = self.tree if self.options.memory else None
        return PromptLedger(self.keeper, tree, prompt_tokens, self.elsewhere)

    @torch.inference_mode()
    def restore(self, seq: Sequence, prompt: list[int], marks: Iterable[Mark] = ()) -> Ledger:
        """See `Caches`. Raises CacheFileError for a named file that cannot be used, where that is strict."""
        if seq.exact is not None:
            seq.rewind_to(live_rows(seq, prompt[:-1]))  # what stays of it may have seen all
        if not seq.shares:
            return LIVE_ROWS.restore(seq, prompt, marks)
        wanted, file = prompt[: min(len(prompt) - 1, seq.reusable(len(prompt)))], self.keeper.file
        self._wait()  # what is being written is to be found
        self.keeper.writer.tell()
        ledger, marks = self._begin(seq, len(prompt)), list(marks)
        ledger.mark(marks, 0)  # a file that is written again keeps what it has for them
        began = time.perf_counter()
        reuse = self._from_memory(seq, wanted)
        if file is not None and (not file.asked or file.has_more(wanted, reuse.tokens + self._page_size)):
            reuse = self.files.named(file, seq, prompt, wanted, reuse, ledger)
        if self.options.store is not None and len(prompt) >= self.options.stored_from and not seq.selected:
            ledger.counts = not seq.selector or len(wanted) > 0  # else nothing could have been found
            reuse = self.files.of_store(seq, prompt, wanted, reuse, ledger)
        ledger.reuse, ledger.looked_s = reuse, time.perf_counter() - began
        ledger.mark(marks, self.tree.common(wanted))
        if seq.states:
            seq.states.wanted = frozenset(m.at // self._page_size * self._page_size for m in ledger.marks)
        return ledger

    def _begin(self, seq: Sequence, prompt_tokens: int) -> PromptLedger:
        """The ledger of a prompt that is looked for now. How long it takes says something of it alone only where no
        other is at work."""
        ledger = self.ledger(prompt_tokens)
        self._ledgers.pop(seq, None)
        for other in self._ledgers.values():
            ledger.alone &= other.done
            other.alone &= other.done
        self._ledgers[seq] = ledger
        return ledger

    def keeps(self, prompt_tokens: int) -> bool:
        return self.keeper.keeps(prompt_tokens)

    def find(self, seq: Sequence, tokens: list[int]) -> int:
        """See `Caches`; a named file is not looked into."""
        if not seq.shares:
            return LIVE_ROWS.find(seq, tokens)
        have = max(live_rows(seq, tokens), self.tree.find(tokens)[0])
        store = self.keeper.store if len(tokens) >= self.options.stored_from else None
        if store is None:
            return have
        self._wait()
        with closing(store.find(tokens)) as found:
            stored = longest(self.engine.pool.layout, len(tokens), found.valid)
        return stored if stored >= have + store.page_size else have

    def kept_otherwise(self, tokens: list[int]) -> str:
        """Why rows of `tokens` that are stored are not found; "" = there are none."""
        store = self.keeper.store
        if store is None:
            return ""
        with closing(store.find(tokens)) as found:
            return missed.kept_otherwise(store, found, tokens)

    def _from_memory(self, seq: Sequence, wanted: list[int]) -> Reuse:
        live, common = live_rows(seq, wanted), common_length(seq.tokens, wanted)
        length, pages, bases, foreign = self.tree.find(wanted)
        if length > live or (length == live and foreign < seq.foreign):
            seq.adopt(wanted[:length], pages, bases, foreign)
        else:
            seq.rewind(live)
        have = max(live, length)
        alike = max(common, self.tree.common(wanted)) if seq.states else have
        return Reuse(have, reason=missed.behind_state(alike, have))

    def park(self, seq: Sequence) -> None:
        if self.options.memory and seq.shares:
            self.tree.insert(seq)

    @torch.inference_mode()
    def resume(self, seq: Sequence, tokens: list[int]) -> None:
        if seq.shares:
            self._from_memory(seq, tokens[:-1])

    def spare(self, arena: int) -> int:
        return self.tree.spare(arena)

    def save(self, seq: Sequence) -> None:
        """Write all of `seq` to the store, however short it is, and to the user's file."""
        if not seq.shares or not seq.length:
            return
        ledger = self._ledgers.get(seq) or self.ledger(0)
        if self.options.store is not None and not seq.foreign and self.options.chat != "":
            ledger.to_store(seq, 0.0)
        if self.keeper.file is not None:
            ledger.to_file(seq, 0.0)

    def pump(self) -> None:
        self.keeper.writer.pump()

    @property
    def writes(self) -> bool:
        """Whether there is something that is not written yet; any thread may ask."""
        return self.keeper.writer.waiting_bytes > 0

    def close(self) -> None:
        """Wait until all is written, with a word if that takes more than a second; let go of all pages."""
        try:
            self._wait()
        finally:
            self.keeper.writer.give_up()
            if self.keeper.lookups is not None:
                self.keeper.lookups.flush()
            self.tree.clear()
            self.engine.pool.lend(lambda arena, last_resort: None, 0)
