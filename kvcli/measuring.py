"""What the commands that compare cache types share: lists of types on the command line, and the engine for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli import opening, render
from kvcli.cacheflags import PageSize, Sinks, Tail, check_cache_type, check_pages
from kvcli.errors import UsageError
from kvcli.flags import ModelFlags
from kvcli.interrupt import Interrupts
from kvcli.invocation import Invocation
from kvcli.options import CacheOptions, EvictOptions
from kvcli.runtime.cachetypes import alias_note, canonical

if TYPE_CHECKING:
    from kvcli.runtime.engine import Engine

Types = tuple[str, str]  # of keys and of values, canonical names


def _option(*names: str, metavar: str, help: str) -> typer.models.OptionInfo:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel="KV cache", show_default=False)


@dataclass(frozen=True)
class TypeFlags:
    """The cache types to compare."""

    cache_type: Annotated[
        str | None, _option("-ct", "--cache-type", metavar="LIST", help="Types, e.g. f16,int8,int8/int4 (K/V).")
    ] = None
    cache_type_k: Annotated[
        str | None, _option("-ctk", "--cache-type-k", metavar="LIST", help="Types of keys, paired with -ctv.")
    ] = None
    cache_type_v: Annotated[
        str | None, _option("-ctv", "--cache-type-v", metavar="LIST", help="Types of values, paired with -ctk.")
    ] = None
    page_size: PageSize = CacheOptions.page_size
    kv_tail: Tail = CacheOptions.tail
    kv_sink: Sinks = CacheOptions.sinks

    def types(self, default: str, invocation: Invocation) -> list[Types]:
        """Every pair once, in order, under their own names; foreign names are told. Raises UsageError."""
        check_pages(self.page_size, self.kv_tail, self.kv_sink)
        given = self.cache_type
        if given is None and self.cache_type_k is None and self.cache_type_v is None:
            given = default
        pairs = [_pair(entry) for entry in _entries(given, "--cache-type")] if given is not None else []
        pairs += self._zipped()
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            if note := alias_note(name):
                render.announce(note, invocation)
        return list(dict.fromkeys((canonical(k), canonical(v)) for k, v in pairs))

    def _zipped(self) -> list[Types]:
        """-ctk and -ctv side by side; one entry stands for as many as the other has, none for f16."""
        if self.cache_type_k is None and self.cache_type_v is None:
            return []
        keys = _checked(self.cache_type_k or "f16", "--cache-type-k")
        values = _checked(self.cache_type_v or "f16", "--cache-type-v")
        if len(keys) != len(values) and 1 not in (len(keys), len(values)):
            raise UsageError(
                f"--cache-type-k has {len(keys)} types and --cache-type-v {len(values)}",
                "they are paired: give as many, or one",
            )
        longest = max(len(keys), len(values))
        return list(zip(keys * (longest // len(keys)), values * (longest // len(values)), strict=True))


def type_product(both: str | None, keys: str | None, values: str | None) -> list[Types]:
    """Lists as -ct, -ctk and -ctv take them: each of the first, and each type of keys with each type of values.

    None is f16, as for `kv run`. Raises UsageError.
    """
    pairs = [_pair(entry) for entry in _entries(both, "--cache-type")] if both is not None else []
    if keys is not None or values is not None:
        of_values = _checked(values or "f16", "--cache-type-v")
        pairs += [(k, v) for k in _checked(keys or "f16", "--cache-type-k") for v in of_values]
    return list(dict.fromkeys((canonical(k), canonical(v)) for k, v in pairs or [("f16", "f16")]))


def open_for(
    model: ModelFlags,
    types: TypeFlags,
    evict: EvictOptions,
    ctx_size: int,
    invocation: Invocation,
    interrupts: Interrupts,
) -> Engine:
    """The engine whose model is measured, with a 16-bit cache of its own that long."""
    cut = types.page_size, CacheOptions.ubatch, types.kv_tail, types.kv_sink
    options = CacheOptions(ctx_size, "f16", "f16", *cut, evict=evict)
    return opening.open_engine(model.options(invocation.offline), options, invocation, interrupts)


def evict_object(engine: Engine, asked: EvictOptions) -> dict[str, Any]:
    """What was forgotten, for JSON."""
    kept = engine.retention
    return {"policy": asked.policy, "keep": kept.keep if kept else None, "window": kept.window if kept else None}


def warn_of_weak_keys(engine: Engine, types: list[Types], invocation: Invocation) -> None:
    """A type that `kv run` would refuse for this model is measured all the same: say so."""
    from kvcli.runtime import guard, quality

    for each in types:
        reason = guard.weakness(engine.model_weights, engine.config, quality.layout_of(engine, each))
        if reason:
            render.warn(f"{reason}; measured all the same", invocation)


def type_name(types: Types) -> str:
    """int8, or int8/int4 where keys and values differ."""
    return types[0] if types[0] == types[1] else "/".join(types)


def _entries(text: str | None, flag: str) -> list[str]:
    entries = [entry.strip() for entry in (text or "").split(",")]
    if "" in entries:
        raise UsageError(
            f"{flag} is '{text}', which has an empty entry", "write types with commas between, e.g. f16,int8"
        )
    return entries


def _checked(text: str | None, flag: str) -> list[str]:
    return [check_cache_type(entry, flag) for entry in _entries(text, flag)]


def _pair(entry: str) -> Types:
    keys, slash, values = entry.partition("/")
    return (
        check_cache_type(keys.strip(), "--cache-type"),
        check_cache_type(values.strip() if slash else keys.strip(), "--cache-type"),
    )
