"""Whole settings of the cache to compare: those of `--with`, which are options of `kv run` in quotes, and those that
the lists of cache types come to. Never imports torch."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvcli.cli import commandline, plainvalues
from kvcli.cli.flags.attending import AttendFlags
from kvcli.cli.flags.cache import Types
from kvcli.cli.flags.checks import checked
from kvcli.cli.flags.eviction import EvictFlags
from kvcli.cli.flags.shared import CacheFlags, grouped
from kvcli.cli.flags.typelists import TypeFlags, type_name
from kvcli.cli.helptext import KV_CACHE
from kvcli.cli.invocation import Invocation
from kvcli.cli.wording import as_flags
from kvcli.codecs import canonical
from kvcli.errors import UsageError
from kvcli.options import CacheOptions, EvictOptions


@dataclass(frozen=True)
class Compared:
    """One setting, and what to call it. `args`: as options of `kv run`."""

    name: str
    args: list[str]
    cache: CacheOptions

    @property
    def types(self) -> Types:
        """Of keys and of values, under their own names."""
        return canonical(self.cache.type_k), canonical(self.cache.type_v)


def parse(text: str) -> Compared:
    """The setting that these options of `kv run` make. Raises UsageError."""
    if not text.strip():
        raise UsageError("--with is empty", 'give options of the cache in quotes: --with "-ct int4"')
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--with {text!r} cannot be read: {str(error).lower()}", "close the quotes") from None
    try:
        cache = _read(words)
    except UsageError as error:
        hint = "give options of the KV cache" if "kv run --help" in error.hint else error.hint
        raise UsageError(f"--with '{text}': {error.message}", hint) from None
    return Compared(text.strip(), words, cache)


def _read(words: list[str]) -> CacheOptions:
    command = _command()
    reader = commandline.Reader(command.params, "kv run")
    try:
        with command.make_context("kv run", reader.read(words)) as context:
            found: CacheOptions = command.invoke(context)
    except Exception as error:
        if isinstance(error, typer.BadParameter.__mro__[1]):
            raise commandline.refused(error) from None
        raise
    return found


def _options(cache: CacheFlags, evict: EvictFlags, attend: AttendFlags) -> CacheOptions:
    """Those options of `kv run` that make a setting."""
    asked = evict.options(cache.page_size, prompt=False)
    return replace(cache.options(asked, attend.options(asked)), force_types=True)  # what is bad is to be measured


@functools.cache
def _command() -> Any:
    app = typer.Typer(add_completion=False)
    app.command(cls=TyperCommand, add_help_option=False)(grouped(_options))
    command = typer.main.get_command(app)
    plainvalues.read_plainly(command.params)
    return command


@dataclass(frozen=True)
class WithFlags:
    """Settings beyond cache types."""

    settings: Annotated[
        list[str],
        typer.Option(
            "--with",
            metavar="OPTIONS",
            help="Compare this setting, too: options of kv run for the KV cache in quotes, e.g."
            ' "-ct int4 --evict sink --window 512" (repeatable).',
            rich_help_panel=KV_CACHE,
            callback=checked(parse),
        ),
    ] = field(default_factory=list)

    def compared(self, types: TypeFlags, evict: EvictFlags, default: str, invocation: Invocation) -> list[Compared]:
        """The full cache in f16, then what is compared with it: the cache types, each with what is to be evicted, and
        the settings of --with. `default`: the types where nothing is asked for. Raises UsageError."""
        asked = evict.options(types.page_size, prompt=False)
        pages = types.page_size, CacheOptions.ubatch, types.kv_tail, types.kv_sink
        full = CacheOptions(0, "f16", "f16", *pages, force_types=True)
        found = [Compared("f16", ["-ct", "f16"], full)]
        args = [] if asked == EvictOptions() else as_flags(asked.named).split()
        for pair in types.types("f16" if self.settings else default, invocation):
            name = type_name(pair)
            cache = replace(full, type_k=pair[0], type_v=pair[1], evict=asked)
            found.append(Compared(" ".join([name, *args]), ["-ct", name, *args], cache))
        once: dict[CacheOptions, Compared] = {}
        for each in (*found, *map(parse, self.settings)):
            once.setdefault(each.cache, each)
        return list(once.values())
