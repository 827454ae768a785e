"""`FileRows`: rows of a prompt that files have: the one that the user named, those of the store, and those that lie
there in a larger cache type. They are read where they are more than there are, and reading is no slower than computing.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from kvcli.errors import CacheFileError, DoesNotFit
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache import missed
from kvcli.runtime.promptcache.caches import Reuse
from kvcli.runtime.promptcache.file import PromptCacheFile, foreign
from kvcli.runtime.promptcache.found import Found, files_of
from kvcli.runtime.promptcache.held import WindowTrail
from kvcli.runtime.promptcache.keeper import Keeper
from kvcli.runtime.promptcache.ledger import PromptLedger
from kvcli.runtime.promptcache.lookuprecord import Choice, Reading
from kvcli.runtime.promptcache.pagefiles import read_page, take_rows, take_selected
from kvcli.runtime.promptcache.prefixpages import common_length, longest, needed
from kvcli.runtime.promptcache.rowconversion import blocked, move, named
from kvcli.runtime.promptcache.rowsettings import differences, pair, sentence
from kvcli.runtime.promptcache.sameness import ALL, same_rows, selected_by, unevicted
from kvcli.runtime.promptcache.store import discard
from kvcli.runtime.promptcache.userfile import UserFile


class FileRows:
    """Finds rows of prompts in files. Each way has what is there already, `reuse`, and says what is there then."""

    def __init__(self, keeper: Keeper) -> None:
        self.keeper, self.engine, self.tell = keeper, keeper.engine, keeper.tell

    def named(
        self, user: UserFile, seq: Sequence, prompt: list[int], wanted: list[int], reuse: Reuse, ledger: PromptLedger
    ) -> Reuse:
        """Rows of the file that the user named, converted where it has a larger cache type. Raises CacheFileError where
        it cannot be used and that is strict."""
        layout = self.engine.pool.layout
        try:
            with user.open(self.engine.identity()) as file:
                if self.keeper.options.selected:
                    self._check_policy(file, prompt)
                if selected_by(file.contents.identity):
                    return self._selected(file, user, seq, prompt[:-1], reuse)
                if user.converts and self.keeper.options.strict:
                    there, here = file.contents, self.engine.identity()
                    raise foreign(file.path, sentence(differences(there.identity, here, len(there.tokens))))
                if user.converts:
                    length = self._convert_file(file, seq, wanted, reuse.tokens, ledger)
                else:
                    agrees = common_length(file.contents.tokens, wanted)
                    agrees = min(agrees, same_rows(file.contents.identity, self.engine.identity()))
                    found = Found.in_file(file, agrees, layout.page_size)
                    length = self._load(found, seq, wanted, reuse.tokens, ledger.trail)
                    ledger.also.append((layout, found.valid))
                    if length > reuse.tokens and (other := self._made_otherwise(file)):
                        seq.foreign = length
                        self.tell.notice(f"{file.path} was computed {other}; answers may differ in the last bits")
        except FileNotFoundError:
            return reuse
        except DoesNotFit:
            return self.missed(reuse, missed.NO_ROOM)
        except CacheFileError as error:
            if self.keeper.options.strict:
                raise
            user.tokens = []  # nothing that is of use
            self.tell.warn(f"{error.message}; {user.fate()}")
            return replace(reuse, reason=error.message)
        if length > reuse.tokens:
            return Reuse(length, length, how=f"converted from {pair(user.types)}" if user.converts else "")
        if seq.selector and not wanted:
            return self.missed(reuse, missed.looks_back(seq.selector.selection.policy))
        name, held = str(user.path), user.tokens
        shared = common_length(held, wanted)
        why = missed.diverges(name, shared, held, wanted, self.engine.text_of, reuse.tokens + layout.page_size)
        if shared < min(len(held), len(wanted)):
            why += "; it is left as it is"
        return self.missed(reuse, why)

    def _selected(self, file: PromptCacheFile, user: UserFile, seq: Sequence, wanted: list[int], reuse: Reuse) -> Reuse:
        """Rows that were selected of a prompt, where this one goes on from it and the policy is the same. Raises
        CacheFileError and DoesNotFit."""
        contents, layout = file.contents, self.engine.pool.layout
        here = {**self.engine.identity(), "eviction": layout.selection.identity if layout.selection else "none"}
        if user.converts or contents.identity["eviction"] != here["eviction"]:
            raise foreign(file.path, sentence(differences(contents.identity, here, len(contents.tokens))))
        if contents.identity["page_size"] != str(layout.page_size):
            raise foreign(file.path, f"page size {contents.identity['page_size']}, this run has {layout.page_size}")
        held = contents.tokens
        if common_length(held, wanted) < len(held):
            shared = common_length(held, wanted)
            why = missed.diverges(str(file.path), shared, held, wanted, self.engine.text_of, len(held))
            return self.missed(reuse, f"{why}; selected rows are of use behind all of them only")
        length = take_selected(seq, file)
        return Reuse(length, length, how=f"selected by {contents.identity['eviction'].removeprefix('select ')}")

    def _check_policy(self, file: PromptCacheFile, prompt: list[int]) -> None:
        """Raises CacheFileError for a file that would have other rows if it were built of this prompt: those of another
        policy or budget. One of all rows of the prompt's beginning is gone on from."""
        contents, layout, here = file.contents, self.engine.pool.layout, self.engine.identity()
        own, n = layout.selection.identity if layout.selection else here["eviction"], len(prompt)
        if layout.selection:
            whole = layout.selection.stays(n) >= n
        else:
            whole = layout.retention is None or not layout.retention.gap(n - 1)
        theirs, held = contents.identity.get("eviction", "none"), contents.tokens
        begins = common_length(held, prompt) == len(held) < n and unevicted(here) >= len(held)
        if theirs == own or (theirs == "none" and (whole or begins)):
            return
        raise foreign(file.path, sentence(differences(contents.identity, {**here, "eviction": own}, ALL)))

    def _made_otherwise(self, file: PromptCacheFile) -> str:
        """Why rows of a file may have other last bits than those that this engine computes; "" = they have the same."""
        on, size = file.contents.about.get("computed_on"), file.contents.identity.get("page_size")
        if on != self.engine.computed_on:
            return f"on {on}"
        own = str(self.engine.pool.layout.page_size)
        return f"in pages of {size}, not {own}" if self.engine.sums and size != own else ""

    def missed(self, reuse: Reuse, why: str) -> Reuse:
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

    def _larger(self, seq: Sequence, prompt: list[int], wanted: list[int], reuse: Reuse, ledger: PromptLedger) -> Reuse:
        """What the store has of the rows `wanted` of a prompt in a larger cache type, where that is more: it is
        converted, and nothing of it gets into the store."""
        store = self.keeper.store
        for source in self.engine.larger() if store is not None and self.keeper.options.converts else ():
            assert store is not None
            with closing(store.like(self.engine.identity_of(source)).find(prompt)) as found:
                length = longest(source, len(wanted), found.valid)
                if length < reuse.tokens + source.page_size or blocked(source, self.engine.pool.layout, length):
                    continue
                choice = self._predict(reuse.tokens, length, source, converts=True)
                if choice is not None and not choice.reads:
                    return self.missed(replace(reuse, choice=choice), missed.slower(length, choice))
                began = time.perf_counter()
                try:
                    length = self._convert(found, seq, wanted[:length], source, str(store.root))
                except DoesNotFit:
                    return self.missed(reuse, missed.NO_ROOM)
                except CacheFileError as error:
                    self.tell.warn(discard(Path(error.path), error) if error.path else error.message)
                    continue
                store.touch(files_of(found.pieces(needed(source, length))))
                ledger.also.append((source, found.valid))
                ledger.reading = self._read(found, length, source, time.perf_counter() - began, converts=True)
                return Reuse(length, length, choice=choice, how=f"converted from {named(source)}")
        return reuse

    def of_store(
        self, seq: Sequence, prompt: list[int], wanted: list[int], reuse: Reuse, ledger: PromptLedger
    ) -> Reuse:
        """What the store has of the rows `wanted` of a prompt, in this run's cache type or in a larger one."""
        own, why = self._stored(seq, prompt, wanted, reuse, ledger)
        # the rows of a saved chat are to be stored, so it computes its own
        found = own if self.keeper.options.chat else self._larger(seq, prompt, wanted, own, ledger)
        return self.missed(found, why) if found.tokens == own.tokens else found

    def _stored(
        self, seq: Sequence, prompt: list[int], wanted: list[int], reuse: Reuse, ledger: PromptLedger
    ) -> tuple[Reuse, str]:
        """What it has in this run's cache type, and why that is no more, where that was not told; files that turn out
        to be damaged are removed."""
        store = self.keeper.store
        assert store is not None
        while True:
            found = store.find(prompt)
            try:
                length, choice = self._choose(found, wanted, reuse.tokens)
                if choice is not None and not choice.reads:
                    return self.missed(replace(reuse, choice=choice), missed.slower(length, choice)), ""
                began = time.perf_counter()
                length = self._load(found, seq, wanted, reuse.tokens)
                if length > reuse.tokens:
                    ledger.reading = self._read(found, length, self.engine.pool.layout, time.perf_counter() - began)
                    return Reuse(length, length, choice=choice), ""
            except CacheFileError as error:  # found out while its pages were read
                self.tell.warn(discard(Path(error.path), error) if error.path else error.message)
                if not error.path or os.path.lexists(error.path):
                    return replace(reuse, reason=error.message), ""
                continue
            except DoesNotFit:
                return self.missed(reuse, missed.NO_ROOM), ""
            finally:
                found.close()
                ledger.found(found.kept)
            if seq.selector and len(wanted) < store.page_size <= found.closest:
                return reuse, missed.looks_back(seq.selector.selection.policy)
            if not reuse.tokens or found.closest - reuse.tokens >= store.page_size:
                return reuse, missed.reason(store, found, prompt, self.engine.text_of)
            return reuse, ""

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


def _page_bytes(layout: KVLayout, length: int) -> int:
    """Bytes of the pages of the first `length` rows."""
    return sum(layout.arenas[arena].page_bytes for arena, _ in needed(layout, length))
