"""A whole sequence to a prompt-cache file of one's own, and back. Nothing of it goes into the store."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvcli.errors import CacheFileError, OutputError, UsageError
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.promptcache import userfile
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile, foreign, write
from kvcli.runtime.promptcache.found import Found
from kvcli.runtime.promptcache.held import HeldPages
from kvcli.runtime.promptcache.keeper import EngineView
from kvcli.runtime.promptcache.ledger import WORDS
from kvcli.runtime.promptcache.pagefiles import basis_arrays, take_rows
from kvcli.runtime.promptcache.prefixpages import longest
from kvcli.runtime.promptcache.sameness import same_rows


def save(engine: EngineView, seq: Sequence, path: Path) -> None:
    """Write the rows of `seq` in place of what is at `path`. Raises OutputError, with nothing changed there, and
    UsageError for rows that only this sequence would have."""
    if not seq.shares:
        raise UsageError("rows of a sequence with an eviction policy of its own cannot be saved", "compute them again")
    layout, keys = seq.pool.layout, sorted(seq.numbered())
    sizes = {arena: layout.arenas[arena].page_bytes for arena, _ in keys}
    about = userfile.about(engine.model, engine.computed_on, seq.losses(), 0.0, True)
    about["begins"] = " ".join(engine.text_of(seq.tokens[:WORDS]).split())
    identity = engine.identity()
    if not seq.evicted:
        identity["eviction"] = "none"
    contents = Contents(identity, list(seq.tokens), keys, sizes, basis_arrays(seq.bases), about)
    try:
        with closing(HeldPages(seq, {}, keys)) as held:
            write(path, contents, (held.buffer(key) for key in keys))
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}", "name another file") from error


def load(engine: EngineView, path: Path) -> Sequence:
    """A new sequence with the rows of a file, as many of its tokens as a sequence can go on from.

    Raises CacheFileError for a file that is missing, damaged, of another model or setting, or computed by other
    kernels, whose last bits are not those of this machine; and DoesNotFit.
    """
    with PromptCacheFile(path, engine.identity()) as file:
        contents, pool = file.contents, engine.pool
        if contents.start:
            raise CacheFileError(f"{path} holds only a part of a prompt", "files of the store are found by themselves")
        made_by = contents.about.get("computed_on", engine.computed_on)
        if made_by != engine.computed_on:
            raise CacheFileError(f"{path} was computed by {made_by}, not {engine.computed_on}", "save it here again")
        size, own = contents.identity["page_size"], str(pool.layout.page_size)
        if engine.sums and size != own:
            raise foreign(path, f"page size {size}, this run has {own}")
        agrees = min(len(contents.tokens), same_rows(contents.identity, engine.identity()))
        found = Found.in_file(file, agrees, pool.layout.page_size)
        seq = Sequence(pool)
        take_rows(seq, found, contents.tokens[: longest(pool.layout, agrees, found.valid)])
    return seq
