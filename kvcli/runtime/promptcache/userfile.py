"""`UserFile`: the prompt cache that `--prompt-cache FILE` names. When it is read, replaced or left alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvcli import __version__
from kvcli.errors import CacheFileError
from kvcli.options import PromptCacheOptions
from kvcli.runtime.promptcache.file import Contents, PromptCacheFile, foreign, is_prompt_cache, remove_parts, write
from kvcli.runtime.promptcache.fingerprint import LAYOUT_FIELDS
from kvcli.runtime.promptcache.prefixpages import common_length
from kvcli.runtime.promptcache.rowsettings import differences, sentence, types_of
from kvcli.runtime.promptcache.sameness import SCOPE, same_rows


def check_model(path: Path, identity: Mapping[str, str]) -> None:
    """Raises CacheFileError for a file that holds no rows of this model, and never will: one of another model, or none
    of ours. One that is missing, empty or damaged is written anew."""
    if not os.path.lexists(path):
        return
    try:
        with PromptCacheFile(path) as file:
            found = file.contents.identity
    except CacheFileError:
        if not is_prompt_cache(path):
            raise
        return
    if any(found.get(name) != identity[name] for name in ("weights", "model_config")):
        raise foreign(path, sentence(differences(found, identity)))


class UserFile:
    """One named file of a run, read once. It is written where there is none, where it is empty or damaged, and when the
    run's tokens go on from those that it holds: it loses nothing that could be of use."""

    def __init__(self, options: PromptCacheOptions) -> None:
        assert options.file is not None
        self.path: Path = options.file
        self.read_only, self.replaces, self.scope = options.read_only, options.replace, options.scope
        self.tokens: list[int] = []  # what it holds
        self.asked = False
        self.converts = False  # it is of another cache type
        self.types = "?", "?"  # of keys and values, then
        self._keep = False  # not ours to replace
        self._found: os.stat_result | None = None  # what was there when it was opened, or written by this process

    def open(self, identity: Mapping[str, str]) -> PromptCacheFile:
        """The file, checked but for its pages. Raises FileNotFoundError if there is none, or none that is wanted, and
        CacheFileError."""
        self.asked, self.converts, self._found = True, False, self._there()
        if self._found is None:
            if self.read_only:
                raise CacheFileError(f"there is no prompt cache {self.path}", "kv cache build makes one")
            raise FileNotFoundError(self.path)
        self._keep = not is_prompt_cache(self.path)
        if self.replaces and not self._keep:
            raise FileNotFoundError(self.path)
        try:
            file = PromptCacheFile(self.path, identity)
        except CacheFileError as error:
            if not error.foreign:
                self._keep = self._keep or error.passing
                raise
            file = self._open_other(identity)
        contents = file.contents
        self.tokens = contents.tokens
        if "computed_on" in contents.identity or same_rows(contents.identity, identity) < len(contents.tokens):
            self._keep = True  # the store's, or with rows that this run does not have
        if (scope := contents.identity.get(SCOPE, "")) not in ("", self.scope):
            file.close()
            raise foreign(self.path, f"scope {scope}, this run has {self.scope or 'none'}")
        if contents.start:
            file.close()
            what = f"holds only tokens {contents.start:,} to {contents.end:,} of a longer prompt"
            raise CacheFileError(f"{self.path} {what}", "the store puts its parts together by itself")
        return file

    def _open_other(self, identity: Mapping[str, str]) -> PromptCacheFile:
        """A file that may be of another cache type."""
        with PromptCacheFile(self.path) as other:  # damaged, or another's
            found = other.contents.identity
        self._keep = True
        theirs = {name: found.get(name, "") for name in LAYOUT_FIELDS}
        file = PromptCacheFile(self.path, {**identity, **theirs})
        self.converts, self.types = True, types_of(found)
        return file

    def has_more(self, wanted: list[int], least: int) -> bool:
        """Whether it agrees with `least` tokens of a prompt, or more, as far as is known."""
        return common_length(self.tokens, wanted) >= least

    def fate(self) -> str:
        """What becomes of a file that cannot be used."""
        if not os.path.lexists(self.path):
            return "the prompt is computed"
        return "it is left as it is" if self._keep or self.read_only else "it will be replaced"

    def wants(self, tokens: list[int]) -> bool:
        """Whether these rows are to be written."""
        goes_on = common_length(self.tokens, tokens) == len(self.tokens) < len(tokens)
        return goes_on and not self.read_only and not self._keep

    def write(self, contents: Contents, blocks: Iterator[Any]) -> None:
        """Put a file there. Raises OSError, and CacheFileError where another process has put one there meanwhile that
        does not have all of this."""
        remove_parts(self.path.parent, time.time(), self.path.name)
        try:
            write(self.path, contents, blocks, place=self._place)
        except FileExistsError:
            if not self._has(contents):
                raise CacheFileError("another process has put other rows there meanwhile") from None
        self._found, self.tokens = self._there(), contents.tokens

    def _there(self) -> os.stat_result | None:
        """What is there now, not followed; None = nothing."""
        try:
            return os.lstat(self.path)
        except OSError:
            return None

    def _place(self, temporary: str, path: Path) -> None:
        """Rename a file to `path`. Raises FileExistsError where something is there that was not found by `open`."""
        there, found = self._there(), self._found
        if not self.replaces and there is not None and (found is None or not _same(there, found)):
            raise FileExistsError
        if there is None and not self.replaces:
            try:
                os.link(temporary, path)  # of two processes one fails here
            except FileExistsError:
                raise
            except OSError:  # a file system without links
                os.replace(temporary, path)
            else:
                os.unlink(temporary)
        else:
            os.replace(temporary, path)

    def _has(self, contents: Contents) -> bool:
        """Whether the file that is there has all of these tokens, under the same identity."""
        try:
            with PromptCacheFile(self.path, contents.identity) as file:
                return common_length(file.contents.tokens, contents.tokens) == len(contents.tokens)
        except CacheFileError:
            return False


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    """Whether this is the same file, unchanged."""
    return os.path.samestat(one, other) and one.st_mtime_ns == other.st_mtime_ns


def about(model: str, computed_on: str, losses: tuple[str, ...], seconds: float, exact: bool) -> dict[str, str]:
    """What a file tells of its making; none of it decides whether it is used. `losses`: see `Sequence.losses`."""
    lossless = f"no: {'; '.join(losses)}" if losses else "yes"
    return {
        "model": model,
        "kv_version": __version__,
        "computed_on": computed_on,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "prefill_s": f"{seconds:.3f}",
        "lossless": lossless if exact else "no: converted from another cache type, or computed elsewhere",
    }
