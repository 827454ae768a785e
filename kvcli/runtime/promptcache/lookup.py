"""`PromptCaches`: which rows of a prompt need not be computed. It asks the live sequence, the pages that stayed in the
pool, a file that the user named, and the store on disk, and gives new rows to all of them.

Whatever is found is a prefix of the prompt's token ids, and the last token is always run again. Rows that this machine
would not compute bit for bit (converted ones, or another device's) are used where the user named the file, and never
get into the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from kvcli.errors import CacheFileError, DoesNotFit
from kvcli.options import PromptCacheOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache import missed
from kvcli.runtime.promptcache.caches import LIVE_ROWS, Ledger, Reuse, live_rows
from kvcli.runtime.promptcache.convert import blocked, move, named
from kvcli.runtime.promptcache.file import PromptCacheFile
from kvcli.runtime.promptcache.found import Found, files_of
from kvcli.runtime.promptcache.held import WindowTrail
from kvcli.runtime.promptcache.keeper import EngineView, Keeper, Tell
from kvcli.runtime.promptcache.ledger import PromptLedger
from kvcli.runtime.promptcache.lookups import Choice, Reading
from kvcli.runtime.promptcache.marks import Mark
from kvcli.runtime.promptcache.pagefiles import read_page, take_rows
from kvcli.runtime.promptcache.prefix import PrefixTrees
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed
from kvcli.runtime.promptcache.sameness import same_rows
from kvcli.runtime.promptcache.settings import pair
from kvcli.runtime.promptcache.store import discard
from kvcli.runtime.promptcache.userfile import UserFile


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
        self.tree = PrefixTrees(engine.pool)
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
        if not seq.shares:
            return LIVE_ROWS.restore(seq, prompt, marks)
        wanted, file = prompt[:-1], self.keeper.file
        self._wait()  # what is being written is to be found
        self.keeper.writer.tell()
        ledger, marks = self._begin(seq, len(prompt)), list(marks)
        ledger.mark(marks, 0)  # a file that is written again keeps what it has for them
        began = time.perf_counter()
        reuse = self._from_memory(seq, wanted)
        if file is not None and (not file.asked or file.has_more(wanted, reuse.tokens + self._page_size)):
            reuse = self._from_file(file, seq, wanted, reuse, ledger)
        if self.options.store is not None and len(prompt) >= self.options.stored_from:
            ledger.counts = True
            reuse = self._from_store(seq, prompt, reuse, ledger)
            if not self.options.chat:  # the rows of a saved chat are to be stored
                reuse = self._from_larger(seq, prompt, reuse, ledger)
        ledger.reuse, ledger.looked_s = reuse, time.perf_counter() - began
        ledger.mark(marks, self.tree.common(wanted))
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
        live = live_rows(seq, wanted)
        length, pages, bases, foreign = self.tree.find(wanted)
        if length > live or (length == live and foreign < seq.foreign):
            seq.adopt(wanted[:length], pages, bases, foreign)
        else:
            seq.rewind(live)
        return Reuse(max(live, length))

    def _from_file(self, user: UserFile, seq: Sequence, wanted: list[int], reuse: Reuse, ledger: PromptLedger) -> Reuse:
        try:
            with user.open(self.engine.identity()) as file:
                if user.converts:
                    length = self._convert_file(file, seq, wanted, reuse.tokens, ledger)
                else:
                    agrees = common_length(file.contents.tokens, wanted)
                    agrees = min(agrees, same_rows(file.contents.identity, self.engine.identity()))
                    found = Found.in_file(file, agrees, self.engine.pool.layout.page_size)
                    length = self._load(found, seq, wanted, reuse.tokens, ledger.trail)
                    ledger.also.append((self.engine.pool.layout, found.valid))
                    if length > reuse.tokens and (other := self._made_otherwise(file)):
                        seq.foreign = length
                        self.tell.notice(f"{file.path} was computed {other}; answers may differ in the last bits")
        except FileNotFoundError:
            return reuse
        except DoesNotFit:
            return self._missed(reuse, missed.NO_ROOM)
        except CacheFileError as error:
            if self.options.strict:
                raise
            user.tokens = []  # nothing that is of use
            self.tell.warn(f"{error.message}; {user.fate()}")
            return replace(reuse, reason=error.message)
        if length > reuse.tokens:
            return Reuse(length, length, how=f"converted from {pair(user.types)}" if user.converts else "")
        name, held = str(user.path), user.tokens
        why = missed.diverges(name, common_length(held, wanted), held, wanted, self.engine.text_of)
        if common_length(held, wanted) < min(len(held), len(wanted)):
            why += "; it is left as it is"
        return self._missed(reuse, why)

    def _made_otherwise(self, file: PromptCacheFile) -> str:
        """Why rows of a file may have other last bits than those that this engine computes; "" = they have the same."""
        on, size = file.contents.about.get("computed_on"), file.contents.identity.get("page_size")
        if on != self.engine.computed_on:
            return f"on {on}"
        own = str(self.engine.pool.layout.page_size)
        return f"in pages of {size}, not {own}" if self.engine.sums and size != own else ""

    def _missed(self, reuse: Reuse, why: str) -> Reuse:
        """The reuse that there is, with the reason why it is no more, which is told."""
        if why:
            self.tell.notice(why)
        return replace(reuse, reason=why or reuse.reason)

    def _convert_file(
        self, file: PromptCacheFile, seq: Sequence, wanted: list[int], have: int, ledger: PromptLedger
    ) -> int:
        """Rows of a file of a larger cache type, encoded as this run's."""
        source, agrees = self.engine.source_of(file), common_length(file.contents.tokens, wanted)
        found = Found.in_file(file, agrees, source.page_size)
        length = longest(source, agrees, found.valid)
        if agrees <= have:
            return have
        if why := blocked(source, self.engine.pool.layout, length):
            raise CacheFileError(f"{file.path}: {why}")
        length = self._convert(found, seq, wanted[:length], source, str(file.path))
        ledger.also.append((source, found.valid))
        return length

    def _convert(self, found: Found, seq: Sequence, tokens: list[int], source: KVLayout, name: str) -> int:
        """Make `seq` have these rows, which files have in another layout; how many of them."""
        converted = self.engine.convert(found, tokens, source)
        seq.foreign = length = move(converted, seq)
        self.tell.announce(
            f"{name}: {length:,} tokens converted from {named(source)}; answers may differ from those of a run"
            " without it"
        )
        return length

    def _from_larger(self, seq: Sequence, prompt: list[int], reuse: Reuse, ledger: PromptLedger) -> Reuse:
        """What the store has of a prompt in a larger cache type, where that is more: it is converted, and nothing of
        it gets into the store."""
        store, wanted = self.keeper.store, prompt[:-1]
        for source in self.engine.larger() if store is not None and self.options.converts else ():
            assert store is not None
            with closing(store.like(self.engine.identity_of(source)).find(prompt)) as found:
                length = longest(source, len(wanted), found.valid)
                if length < reuse.tokens + source.page_size or blocked(source, self.engine.pool.layout, length):
                    continue
                choice = self._predict(reuse.tokens, length, source, converts=True)
                if choice is not None and not choice.reads:
                    return self._missed(replace(reuse, choice=choice), missed.slower(length, choice))
                began = time.perf_counter()
                try:
                    length = self._convert(found, seq, wanted[:length], source, str(store.root))
                except DoesNotFit:
                    return self._missed(reuse, missed.NO_ROOM)
                except CacheFileError as error:
                    self.tell.warn(discard(Path(error.path), error) if error.path else error.message)
                    continue
                store.touch(files_of(found.pieces(needed(source, length))))
                ledger.also.append((source, found.valid))
                ledger.reading = self._read(found, length, source, time.perf_counter() - began, converts=True)
                return Reuse(length, length, choice=choice, how=f"converted from {named(source)}")
        return reuse

    def _from_store(self, seq: Sequence, prompt: list[int], reuse: Reuse, ledger: PromptLedger) -> Reuse:
        store, wanted = self.keeper.store, prompt[:-1]
        assert store is not None
        while True:
            found = store.find(prompt)
            try:
                length, choice = self._choose(found, wanted, reuse.tokens)
                if choice is not None and not choice.reads:
                    return self._missed(replace(reuse, choice=choice), missed.slower(length, choice))
                began = time.perf_counter()
                length = self._load(found, seq, wanted, reuse.tokens)
                if length > reuse.tokens:
                    ledger.reading = self._read(found, length, self.engine.pool.layout, time.perf_counter() - began)
                    return Reuse(length, length, choice=choice)
            except CacheFileError as error:  # found out while its pages were read
                self.tell.warn(discard(Path(error.path), error) if error.path else error.message)
                if not error.path or os.path.lexists(error.path):
                    return replace(reuse, reason=error.message)
                continue
            except DoesNotFit:
                return self._missed(reuse, missed.NO_ROOM)
            finally:
                found.close()
                ledger.found(found.kept)
            if not reuse.tokens or found.closest - reuse.tokens >= store.page_size:
                return self._missed(reuse, missed.reason(store, found, prompt, self.engine.text_of))
            return reuse

    def _choose(self, found: Found, wanted: list[int], have: int) -> tuple[int, Choice | None]:
        """How many rows the store has of a prompt, and what reading them would take and computing them; None where
        that is not known, or they are not enough to be read."""
        layout = self.engine.pool.layout
        length = longest(layout, len(wanted), found.valid)
        return length, None if length < have + layout.page_size else self._predict(have, length, layout)

    def _predict(self, have: int, length: int, layout: KVLayout, converts: bool = False) -> Choice | None:
        """What reading rows [have, length) in that layout would take and computing them; None = that is not known."""
        lookups = self.keeper.lookups
        if lookups is None:
            return None
        return lookups.predict(have, length, _page_bytes(layout, length), converts)

    def _read(self, found: Found, length: int, layout: KVLayout, seconds: float, converts: bool = False) -> Reading:
        """What was read of a prompt's first `length` rows in that layout, from where."""
        paths = {file.path for file in files_of(found.pieces(needed(layout, length)))}
        rows = {f.path: (f.contents.start, min(f.agrees, length)) for f in found.kept if f.path in paths}
        return Reading(length, _page_bytes(layout, length), seconds, rows, converts)

    def _load(self, found: Found, seq: Sequence, wanted: list[int], have: int, trail: WindowTrail | None = None) -> int:
        """Read the pages of the longest prefix, where it is longer than `have` by enough; the rows there are. Raises
        CacheFileError and DoesNotFit.

        With `trail` also those that it wants: for a file that is written again as a whole.
        """
        pool, size = self.engine.pool, self.engine.pool.layout.page_size
        length = longest(pool.layout, len(wanted), found.valid)
        if length < have + size:
            return have
        whole = (key for key, valid in found.valid.items() if valid >= (key[1] + 1) * size)
        wanted_too = [key for key in whole if trail is not None and trail.wants(key, length)]
        left = {key: read_page(p, pool.layout.arenas[key[0]]) for key, p in found.pieces(wanted_too).items()}
        files = take_rows(seq, found, wanted[:length])
        if trail is not None:
            trail.copies.update(left)
        elif self.keeper.store is not None:
            self.keeper.store.touch(files)
        return length

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


def _page_bytes(layout: KVLayout, length: int) -> int:
    """Bytes of the pages of the first `length` rows."""
    return sum(layout.arenas[arena].page_bytes for arena, _ in needed(layout, length))
