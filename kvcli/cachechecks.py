"""Checks of a prompt cache that need the model: why it fits a prompt or not, and whether its rows are right."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcli.errors import CacheFileError, CheckFailed
from kvcli.options import CacheOptions
from kvcli.runtime.promptcaches.settings import cache_options, differences, sentence

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine
    from kvcli.runtime.promptcaches.promptcache import Contents, PromptCacheFile

AROUND = 8  # tokens shown before and behind the place where texts part


def options_of(identity: dict[str, str]) -> CacheOptions:
    """The cache options that a file was made with. Raises CacheFileError where it says nothing of the kind."""
    try:
        return cache_options(identity)
    except ValueError:
        raise CacheFileError("its cache options make no sense", "kv cache show prints them") from None


def _differing(found: dict[str, str], engine: Engine) -> str:
    """What of a file's identity is not the engine's; "" = nothing."""
    from kvcli.runtime.promptcaches import fingerprint

    expected = fingerprint.identity(engine.model_weights.file, engine.config, engine.layout)
    return sentence(differences({k: v for k, v in found.items() if k in expected}, expected))


def explain(contents: Contents, prompt: list[int], engine: Engine) -> str:
    """How far a cache agrees with a prompt's tokens, as lines."""
    from kvcli.runtime.promptcaches.prefixpages import common_length, longest

    if differing := _differing(contents.identity, engine):
        return f"of no use with this model: it was made with {differing}\n"
    asked, held = prompt[contents.start :], contents.tokens
    shared = common_length(asked, held)
    size = engine.layout.page_size
    lines = [
        f"cache    tokens {contents.start:,} to {contents.end:,}",
        f"prompt   {len(prompt):,} tokens",
        f"common   {shared:,} tokens, {shared // size} whole pages of {size}",
    ]
    if not contents.start:
        usable = longest(engine.layout, min(shared, len(prompt) - 1), dict.fromkeys(contents.pages, shared))
        usable = usable if usable >= size else 0  # less than a page is not read
        lines.append(f"reused   {usable:,} tokens, {len(prompt) - usable:,} to prefill")
    if shared < min(len(asked), len(held)):
        lines.append(f"they part at token {contents.start + shared:,}")
        for label, ids in (("cache ", held), ("prompt", asked)):
            before = engine.tokenizer.decode(ids[max(0, shared - AROUND) : shared])
            behind = engine.tokenizer.decode(ids[shared : shared + AROUND])
            lines.append(f"  {label}  {before!r} then {engine.tokenizer.decode([ids[shared]])!r}: {behind!r}")
    elif len(held) > len(asked):
        lines.append("the prompt is the beginning of what the cache holds")
    else:
        lines.append("the prompt goes on from what the cache holds")
    return "\n".join(lines) + "\n"


def recompute(engine: Engine, file: PromptCacheFile, pages: int, tol: float) -> str:
    """Rows computed again beside those of a file, told in half a line. Raises CheckFailed, CacheFileError."""
    from kvcli.runtime.promptcaches.promptcache import foreign
    from kvcli.runtime.promptcaches.recompute import compare

    if differing := _differing(file.contents.identity, engine):
        raise foreign(file.path, differing)
    found_difference = compare(engine, file, pages)
    text = (
        f"{found_difference.pages} pages computed again: max error {found_difference.max_error:.3g},"
        f" KL divergence of the next token {found_difference.divergence:.3g}"
    )
    if found_difference.max_error > tol:
        raise CheckFailed(f"{file.path}: {text}, more than {tol:g}", f"it was computed on {_where(file)}; see --tol")
    return f"; {text}"


def _where(file: PromptCacheFile) -> str:
    return file.contents.about.get("computed_on", "another machine")
