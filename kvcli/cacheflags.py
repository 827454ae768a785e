"""The flags of the cache that every command takes which has one or plans one: pages, which of them stay in 16 bits, and
the names of cache types. Never imports torch."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from kvcli.errors import UsageError
from kvcli.runtime.cachetypes import ALIASES, CODEC_SPECS

PAGE_SIZES = (16, 32, 64, 128)
MAX_SINKS = 1 << 20

_option = functools.partial(typer.Option, rich_help_panel="KV cache")
PageSize = Annotated[int, _option("--page-size", metavar="16|32|64|128", help="Tokens per page.")]
Tail = Annotated[
    int,
    _option("--kv-tail", metavar="0|1", help="Types below 16 bits: 16-bit pages at the end; 0 = encode rows at once."),
]
Sinks = Annotated[
    int, _option("--kv-sink", metavar="N", help="Types below 16 bits: 16-bit pages at the start of a sequence.")
]


def check_pages(page_size: int, tail: int, sinks: int) -> None:
    """Raises UsageError for a --page-size, --kv-tail or --kv-sink that cannot be."""
    if page_size not in PAGE_SIZES:
        raise UsageError(f"--page-size is {page_size}", "it is one of 16, 32, 64, 128")
    if tail not in (0, 1):
        raise UsageError(f"--kv-tail is {tail}", "it is 1, or 0 to encode each row at once")
    if not 0 <= sinks <= MAX_SINKS:
        raise UsageError(f"--kv-sink is {sinks}", f"it is a number of pages, 0 to {MAX_SINKS:,}")
    if tail == sinks == 0:
        hint = "give --kv-sink 1 or more: the first page, in 16 bits, fixes the scales and means"
        raise UsageError("--kv-tail 0 and --kv-sink 0 exclude each other", hint)


def check_cache_type(name: str, flag: str) -> str:
    """The name, as given, if `kv` can store the cache so; else UsageError that lists what exists."""
    if name == "auto" or ALIASES.get(name, name) in CODEC_SPECS:
        return name
    raise UsageError(f"{flag}: '{name}' is not a cache type", f"available: auto, {', '.join(CODEC_SPECS)}")
