"""The flags of the cache that every command takes which has one or plans one: pages, which of them stay in 16 bits, and
cache types, one or lists of them. Never imports torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvcli.api.checks import MAX_SINKS, Types, check_cache_type, type_pair
from kvcli.cli.flags.checks import checked, in_range, number
from kvcli.cli.helptext import KV_CACHE
from kvcli.errors import UsageError
from kvcli.runtime.cache.layout import PAGE_SIZES

check_size_of_step = in_range("--ubatch-size", 0, hint="0 = automatic")


def _check_page_size(size: int) -> None:
    if size not in PAGE_SIZES:
        raise UsageError(f"--page-size must be 16, 32, 64 or 128, not {size}")


def _check_tail(pages: int) -> None:
    if pages not in (0, 1):
        raise UsageError(f"--kv-tail must be 0 or 1, not {pages}")


_option = functools.partial(typer.Option, rich_help_panel=KV_CACHE)
PageSize = Annotated[
    int,
    _option("--page-size", metavar="16|32|64|128", help="Tokens per page.", callback=checked(_check_page_size)),
]
Tail = Annotated[
    int,
    _option(
        "--kv-tail",
        metavar="0|1",
        help=(
            "With types below 16 bits: pages at the end of a sequence that stay in 16 bits; 0 = "
            "quantize each row at once."
        ),
        callback=checked(_check_tail),
    ),
]
Sinks = Annotated[
    int,
    number(
        KV_CACHE,
        "--kv-sink",
        least=0,
        most=MAX_SINKS,
        hint="it is a number of pages",
        help="With types below 16 bits: pages at the start of a sequence that stay in 16 bits.",
    ),
]


def type_pairs(both: str | None, keys: str | None, values: str | None) -> list[Types]:
    """The lists of -ct, -ctk and -ctv as pairs, names as given; [] where nothing is given.

    -ctk stands in place of the keys of -ct, -ctv in place of its values, and every type of keys comes with every one of
    values. -ctk alone is for the values too, -ctv alone has keys in 16 bits. Raises UsageError.
    """
    pairs = [] if both is None else [type_pair(entry, "--cache-type") for entry in _entries(both, "--cache-type")]
    if keys is None and values is None:
        return pairs
    of_keys = [k for k, _ in pairs] or ["auto"] if keys is None else _checked(keys, "--cache-type-k")
    of_values = [v for _, v in pairs] if values is None else _checked(values, "--cache-type-v")
    return [(k, v) for k in of_keys for v in of_values or [k]]


def one_pair(both: str | None, keys: str | None, values: str | None) -> Types:
    """The pair that -ct, -ctk and -ctv name, 16 bits where nothing is given. UsageError for several."""
    pairs = type_pairs(both, keys, values) or [("auto", "auto")]
    if len(pairs) > 1:
        named = ", ".join(dict.fromkeys("/".join(pair) for pair in pairs))
        raise UsageError(f"only one cache type can be used, not several: {named}", "for keys and values: -ct int8/int4")
    return pairs[0]


def types_checked(flag: str, parse: Callable[[str | None, str | None, str | None], object]) -> Callable[[Any], Any]:
    """The callback of one of these three options, whose values `parse` takes in this order."""
    flags = ("--cache-type", "--cache-type-k", "--cache-type-v")
    return checked(lambda text: parse(*(text if each == flag else None for each in flags)))


def _checked(text: str, flag: str) -> list[str]:
    return [check_cache_type(entry, flag) for entry in _entries(text, flag)]


def _entries(text: str, flag: str) -> list[str]:
    entries = [entry.strip() for entry in text.split(",")]
    if "" in entries:
        raise UsageError(
            f"{flag} must not have an empty entry: '{text}'", "write types with commas between, e.g. f16,int8"
        )
    return entries
