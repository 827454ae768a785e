"""Checks of a prompt cache that need the model: why it fits a prompt or not, and whether its rows are right."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvcli.cli.wording import as_flags
from kvcli.errors import CacheFileError, CheckFailed
from kvcli.options import CacheOptions
from kvcli.runtime.promptcache.rowsettings import cache_options, differences, sentence
from kvcli.runtime.promptcache.sameness import selected_by
from kvcli.words import counted

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.evaluate.recompute import Difference
    from kvcli.runtime.promptcache.file import Contents, PromptCacheFile

AROUND = 8  # tokens shown before and behind the place where texts part


def options_of(identity: dict[str, str]) -> CacheOptions:
    """The cache options that a file was made with. Raises CacheFileError where it says nothing of the kind."""
    try:
        return cache_options(identity)
    except ValueError:
        raise CacheFileError("its cache options make no sense", "kv cache show prints them") from None


def _differing(found: dict[str, str], engine: Engine) -> str:
    """What of a file's identity is not the engine's; "" = nothing."""
    from kvcli.runtime.promptcache import fingerprint

    expected = fingerprint.identity(engine.loaded.file, engine.loaded.adapters, engine.config, engine.layout)
    return as_flags(sentence(differences({k: v for k, v in found.items() if k in expected}, expected)))


@dataclass(frozen=True)
class Place:
    """Text around a token."""

    before: str
    token: str
    text: str  # from the token on

    def __str__(self) -> str:
        return f"{self.before!r} then {self.token!r}: {self.text!r}"


@dataclass(frozen=True)
class Agreement:
    """How far a cache of tokens [first_token, end_token) agrees with a prompt.

    `made_with`: why this model cannot use it. `reused_tokens`: None = that depends on the files that it goes on
    from. `cache` and `prompt`: the place where they part. `selected`: its rows were, and serve what goes on from all of
    its tokens.
    """

    first_token: int
    end_token: int
    page_size: int
    prompt_tokens: int
    made_with: str | None = None
    common_tokens: int = 0
    reused_tokens: int | None = None
    cache: Place | None = None
    prompt: Place | None = None
    selected: bool = False

    def as_json(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name != "selected"}
        return values | {"parts_at": self.first_token + self.common_tokens if self.cache else None}

    def __str__(self) -> str:
        if self.made_with:
            return f"not usable with this model: it was made with {self.made_with}\n"
        size, common = self.page_size, self.common_tokens
        lines = [
            f"cache    tokens {self.first_token:,} to {self.end_token:,}",
            f"prompt   {counted(self.prompt_tokens, 'token')}",
            f"common   {counted(common, 'token')}, {counted(common // size, 'whole page')} of {size}",
        ]
        if self.reused_tokens is not None:
            rest = self.prompt_tokens - self.reused_tokens
            lines.append(f"reused   {counted(self.reused_tokens, 'token')}, {rest:,} to prefill")
        if self.selected and not self.reused_tokens:
            lines.append("its rows were selected by score, which are of use behind all of its tokens only")
        if self.cache and self.prompt:
            lines.append(f"they part at token {self.first_token + common:,}")
            lines += [f"  cache   {self.cache}", f"  prompt  {self.prompt}"]
        elif self.end_token > self.prompt_tokens:
            lines.append("the prompt is the beginning of what the cache holds")
        else:
            lines.append("the prompt goes on from what the cache holds")
        return "\n".join(lines) + "\n"


def agreement(contents: Contents, prompt: list[int], engine: Engine) -> Agreement:
    """Compare a cache with a prompt's tokens."""
    from kvcli.runtime.promptcache.prefixpages import common_length, longest

    size, start = engine.layout.page_size, contents.start
    found = start, contents.end, size, len(prompt)
    if differing := _differing(contents.identity, engine):
        return Agreement(*found, made_with=differing)
    asked, held = prompt[start:], contents.tokens
    shared = common_length(asked, held)
    reused, selected = None, bool(selected_by(contents.identity))
    if selected:
        reused = shared if shared == len(held) < len(prompt) else 0
    elif not start:
        usable = longest(engine.layout, min(shared, len(prompt) - 1), dict.fromkeys(contents.pages, shared))
        reused = usable if usable >= size else 0  # less than a page is not read
    places: list[Place | None] = [None, None]
    if shared < min(len(asked), len(held)):
        decode, around = engine.tokenizer.decode, slice(max(0, shared - AROUND), shared)
        places = [
            Place(decode(ids[around]), decode([ids[shared]]), decode(ids[shared : shared + AROUND]))
            for ids in (held, asked)
        ]
    return Agreement(*found, None, shared, reused, places[0], places[1], selected)


def recompute(engine: Engine, file: PromptCacheFile, pages: int, tol: float) -> Difference:
    """Compare rows computed again with those of a file. Raises CheckFailed, CacheFileError, and UsageError for a file
    that cannot be gone on from."""
    from kvcli.runtime.evaluate.recompute import compare
    from kvcli.runtime.promptcache.file import foreign

    if differing := _differing(file.contents.identity, engine):
        raise foreign(file.path, differing)
    found = compare(engine, file, pages)
    if found.max_error > tol:
        where = file.contents.about.get("computed_on", "another machine")
        raise CheckFailed(f"{file.path}: {found}, more than {tol:g}", f"it was computed on {where}; see --tol")
    return found
