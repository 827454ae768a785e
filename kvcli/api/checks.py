"""What can be refused of options before any file is opened. No torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Sequence
from os import PathLike, fspath

from kvcli.api import kinds
from kvcli.codecs import CODECS, canonical
from kvcli.errors import UsageError
from kvcli.options import AttendOptions, CacheOptions, EvictOptions, LoadOptions, LoraOption
from kvcli.runtime.cache import attending, eviction
from kvcli.runtime.cache.layout import PAGE_SIZES
from kvcli.runtime.host.device import parse_device
from kvcli.runtime.host.memory import main_memory, parse_size

BACKENDS = ("auto", "native", "reference")
_TOKENS = re.compile(r"(\d+)([kKmM]?)", re.ASCII)
MAX_CONTEXT = 1 << 31
MAX_SINKS = 1 << 20
MAX_THREADS = 1024

Types = tuple[str, str]  # of keys and of values
Adapters = str | PathLike[str] | Sequence[str | PathLike[str]]  # "FILE" or "FILE:SCALE", one or several


def check_load(options: LoadOptions) -> None:
    """Raises UsageError for a value out of range, or of another kind."""
    kinds.options(options, LoadOptions, "options")
    if not options.model.strip():
        raise UsageError("`model` is empty", "give a name from kv models ls, or a .gguf file")
    if options.backend not in BACKENDS:
        raise UsageError(f"`backend` must be auto, native or reference, not '{options.backend}'")
    if not 0 <= options.threads <= MAX_THREADS:
        raise UsageError(f"`threads` must be 0 (the physical cores) to {MAX_THREADS:,}, not {options.threads}")
    if options.memory_limit is not None:
        parse_size(options.memory_limit, "`memory_limit`", main_memory().total)
    parse_device(options.device)


def block_format(quantize: str | None) -> str:
    """The block format that the matrices of a folder are to be packed as; "" = none is named. Raises UsageError."""
    from kvcli.runtime.formats.packing import named

    return named(quantize) if quantize is not None else ""


def parse_tokens(text: str, flag: str, more: str = "") -> int:
    """'4096', '32k' (x 1024) or '1m' (x 1024 x 1024) -> tokens. Raises UsageError; `more` belongs to its hint."""
    match = _TOKENS.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{flag} must be a number of tokens, not '{text}'", f"write 4096 or 32k{more}")
    tokens = int(match[1][:12]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()]
    if tokens > MAX_CONTEXT or len(match[1]) > 12:
        raise UsageError(f"{flag} must be at most {MAX_CONTEXT:,}, not '{text}'")
    return tokens


def lora_option(text: str) -> LoraOption:
    """The adapter in 'FILE' or 'FILE:SCALE'; a file may have a colon in its name. Raises UsageError.

    >>> lora_option("style.gguf:0.5")
    LoraOption(path='style.gguf', scale=0.5)
    """
    path, colon, number = text.rpartition(":")
    try:
        option = LoraOption(path, float(number)) if colon else LoraOption(text)
    except ValueError:
        if os.path.isfile(path) and not os.path.exists(text):
            raise UsageError(f"the scale of `lora` must be a number, not '{number}'", f"such as {path}:0.5") from None
        option = LoraOption(text)
    if not option.path.strip() or not math.isfinite(option.scale):
        raise UsageError(f"`lora` must be a file, or a file and a scale, not '{text}'", "such as style.gguf:0.5")
    return option


def adapters(lora: Adapters) -> tuple[LoraOption, ...]:
    """One adapter or several as options. Raises UsageError."""
    several = (lora,) if isinstance(lora, (str, PathLike)) else lora
    return tuple(lora_option(fspath(each)) for each in several)


def check_cache(options: CacheOptions) -> None:
    """Raises UsageError for a value out of range or of another kind, or for values that exclude each other."""
    kinds.options(options, CacheOptions, "cache")
    kinds.options(options.evict, EvictOptions, "evict")
    kinds.options(options.attend, AttendOptions, "attend")
    types = check_cache_type(options.type_k), check_cache_type(options.type_v)
    if not 0 <= options.ctx_size <= MAX_CONTEXT:
        raise UsageError(f"`ctx` must be 0 (automatic) to {MAX_CONTEXT:,}, not {options.ctx_size}")
    if options.page_size not in PAGE_SIZES:
        raise UsageError(f"`page_size` must be 16, 32, 64 or 128, not {options.page_size}")
    if options.tail not in (0, 1):
        raise UsageError(f"`tail` must be 0 or 1, not {options.tail}")
    if not 0 <= options.sinks <= MAX_SINKS:
        raise UsageError(f"`sinks` must be 0 to {MAX_SINKS:,} pages, not {options.sinks}")
    check_pages(options.tail, options.sinks, [types])
    if options.sequences < 1:
        raise UsageError(f"`sequences` must be 1 or more, not {options.sequences}")
    if options.ubatch < 0:
        raise UsageError(f"`ubatch` must be 0 or more, not {options.ubatch}", "0 = automatic")
    eviction.check(options.evict, options.page_size)
    attending.check(options.attend, options.evict)


def check_pages(tail: int, sinks: int, types: Iterable[Types]) -> None:
    """Raises UsageError for 16-bit pages that cannot be so few, of a cache of one of these types."""
    if tail == sinks == 0 and any(CODECS[canonical(name)].sealed for pair in types for name in pair):
        hint = "give `sinks=1` or more: the first page, in 16 bits, fixes the scales and means"
        raise UsageError("`tail=0` and `sinks=0` cannot be used together", hint)


def check_cache_type(name: str, called: str = "`cache_type`") -> str:
    """The name in lower case. Raises UsageError that lists what exists; `called`: what to call the option there."""
    try:
        canonical(name)
    except UsageError:
        raise UsageError(f"{called}: '{name}' is not a cache type", f"available: auto, {', '.join(CODECS)}") from None
    return name.lower()


def type_pair(text: str, called: str = "`cache_type`") -> Types:
    """The types of keys and values in 'int8/int4', or one type for both. Raises UsageError.

    >>> type_pair("int8/int4"), type_pair("f16")
    (('int8', 'int4'), ('f16', 'f16'))
    """
    keys, slash, values = (part.strip() for part in kinds.text(text, called.strip("`")).partition("/"))
    return check_cache_type(keys, called), check_cache_type(values if slash else keys, called)
