"""What a saved chat was opened with is what it is opened with again. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcli.cli import render
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import CacheFlags
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.codecs import canonical
from kvcli.options import FORGET_NOTHING, CacheOptions
from kvcli.runtime.promptcache import sessions
from kvcli.runtime.promptcache.sessions import Opened


def opened_with(options: CacheOptions) -> Opened:
    """What is saved of these options."""
    type_k, type_v = (name if name == "auto" else canonical(name) for name in (options.type_k, options.type_v))
    return Opened(options.ctx_size, type_k, type_v, options.evict)


def as_saved(
    ctx: Any, cache: CacheFlags, evict: EvictFlags, name: str, model: str, invocation: Invocation
) -> tuple[CacheFlags, EvictFlags]:
    """The flags with the context, the cache types and the eviction that the chat `name` was opened with, where neither
    the command line nor a setting says which, and the model is the same. Raises UsageError for a damaged chat."""
    if name not in sessions.names() or (saved := sessions.read(name)).model != model:
        return cache, evict
    opened, told, found = saved.opened, list[str](), cache
    if opened.ctx_size and not _given(ctx, "ctx_size"):
        told.append(f"-c {opened.ctx_size}")
        found = replace(found, ctx_size=str(opened.ctx_size))
    if opened.types and not _given(ctx, "cache_type", "cache_type_k", "cache_type_v"):
        told.append(f"-ct {opened.types}")
        found = replace(found, cache_type=opened.types)
    if (kept := opened.evict) != FORGET_NOTHING and not _given(ctx, "evict", "window", "keep", "budget"):
        told.append(as_flags(kept.named))
        evict = EvictFlags(kept.policy, str(kept.window) if kept.window else None, kept.keep, kept.budget or None)
    if told:
        render.notice(f"session {name} is opened as before, with {' '.join(told)}", invocation)
    return found, evict


def _given(ctx: Any, *names: str) -> bool:
    return any(ctx.get_parameter_source(name).name != "DEFAULT" for name in names)
