"""What the commands that compare cache types share: lists of types on the command line, and the engine for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcli.api.checks import Types, check_pages
from kvcli.cli import engines, render, report
from kvcli.cli.flags.cache import PageSize, Sinks, Tail, type_pairs, types_checked
from kvcli.cli.flags.shared import ModelFlags
from kvcli.cli.helptext import KV_CACHE
from kvcli.cli.interrupt import Interrupts
from kvcli.cli.invocation import Invocation
from kvcli.codecs import canonical
from kvcli.errors import UsageError
from kvcli.options import CacheOptions, EvictOptions

if TYPE_CHECKING:
    from kvcli.runtime.cache.layout import KVLayout
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.engine.loaded import LoadedModel

PARALLEL, MOST_SEQUENCES = "--parallel", 256


def counts(text: str) -> list[int]:
    """'1,2,16' -> numbers of sequences, each once, the fewest first. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if wrong := [word for word in words if not word.isdecimal() or not 1 <= int(word) <= MOST_SEQUENCES]:
        hint = "numbers with commas between them, e.g. 1,2,4,8"
        raise UsageError(f"{PARALLEL} must be 1 to {MOST_SEQUENCES}, not {wrong[0]!r}", hint)
    return sorted({int(word) for word in words})


def _option(*names: str, help: str) -> typer.models.OptionInfo:
    callback = types_checked(names[-1], type_pairs)
    return typer.Option(
        *names, metavar="LIST", help=help, rich_help_panel=KV_CACHE, show_default=False, callback=callback
    )


@dataclass(frozen=True)
class TypeFlags:
    """The cache types to compare."""

    cache_type: Annotated[
        str | None,
        _option(
            *("-ct", "--cache-type"),
            help="Cache types to compare, e.g. f16,int8,int8/int4 (keys/values).",
        ),
    ] = None
    cache_type_k: Annotated[
        str | None,
        _option(
            *("-ctk", "--cache-type-k"),
            help="Cache types of keys to compare, in place of those of -ct.",
        ),
    ] = None
    cache_type_v: Annotated[
        str | None,
        _option(
            *("-ctv", "--cache-type-v"),
            help="Cache types of values to compare, in place of those of -ct.",
        ),
    ] = None
    page_size: PageSize = CacheOptions.page_size
    kv_tail: Tail = CacheOptions.tail
    kv_sink: Sinks = CacheOptions.sinks

    def types(self, default: str, invocation: Invocation) -> list[Types]:
        """Every pair once, in order, under their own names; foreign names are told. Raises UsageError."""
        pairs = type_pairs(self.cache_type, self.cache_type_k, self.cache_type_v) or type_pairs(default, None, None)
        check_pages(self.kv_tail, self.kv_sink, pairs)
        engines.tell_aliases(pairs, invocation)
        return list(dict.fromkeys((canonical(k), canonical(v)) for k, v in pairs))


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
    return engines.open_engine(model.options(invocation.offline), options, invocation, interrupts)


def evict_object(engine: Engine, asked: EvictOptions) -> dict[str, Any]:
    """What was forgotten, for JSON."""
    return report.evict_object(asked, engine.retention)


def warn_of_types(engine: Engine, types: list[Types], tokens: int, invocation: Invocation) -> None:
    """Say of a type that `kv run` would refuse for this model, or that is not put to the test by so many tokens."""
    from kvcli.runtime.evaluate import quality

    for each in types:
        warn_of_layout(engine.loaded, quality.layout_of(engine, each), type_name(each), tokens, invocation)


def warn_of_layout(loaded: LoadedModel, layout: KVLayout, name: str, tokens: int, invocation: Invocation) -> None:
    """As above of one setting, which is called `name`, and of an eviction that forgets nothing of so many tokens."""
    from kvcli.runtime.engine import guard

    if reason := guard.weakness(loaded.weights, loaded.config, layout):
        render.warn(f"{reason}; measured all the same", invocation)
    counts = layout.pages(max(1, tokens - 1), 1)  # that the last token reads
    sealed = [count for group, count in zip(layout.groups, counts, strict=True) if group.sealed]
    if sealed and not any(sealed):
        text = f"{name} makes no difference in {tokens:,} tokens: all that is read of them is in 16 bits"
        render.warn(f"{text}; take more tokens", invocation)
    if layout.retention and not layout.retention.gap(tokens - 1):
        render.warn(f"{name} forgets nothing of {tokens:,} tokens: use a smaller `window`", invocation)


def type_name(types: Types) -> str:
    """int8, or int8/int4 where keys and values differ."""
    return types[0] if types[0] == types[1] else "/".join(types)
