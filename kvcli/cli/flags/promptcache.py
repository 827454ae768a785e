"""The flags of prompt caches: the store that `run` and `chat` keep by themselves, and a file that `run` is given."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kvcli import paths
from kvcli.cli import render
from kvcli.cli.flags.checks import checked, file_name, number
from kvcli.cli.helptext import PROMPT_CACHE
from kvcli.cli.invocation import Invocation
from kvcli.errors import OutputError, UsageError
from kvcli.options import PromptCacheOptions
from kvcli.runtime.host.memory import parse_size
from kvcli.runtime.promptcache import sessions

_option = functools.partial(typer.Option, rich_help_panel=PROMPT_CACHE)
CACHE_SIZE, CACHE_TTL = "4GiB", "7d"  # of the store: how much is kept, and how long unused
_TIME = re.compile(r"(\d{1,9}(?:\.\d*)?)\s*([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_time(text: str, flag: str) -> float:
    """'90s', '30m', '36h' or '7d' -> seconds. Raises UsageError."""
    match = _TIME.fullmatch(text.strip().lower())
    if match is None:
        raise UsageError(f"{flag} must be a time, not '{text}'", "write 30m, 36h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


def size_option(flag: str, help: str) -> typer.models.OptionInfo:
    """An option whose value is a number of bytes, see `parse_size`."""
    return _option(flag, metavar="SIZE", help=help, callback=checked(functools.partial(parse_size, flag=flag)))


def time_option(flag: str, help: str) -> typer.models.OptionInfo:
    """An option whose value is a time, see `parse_time`."""
    return _option(flag, metavar="TIME", help=help, callback=checked(functools.partial(parse_time, flag=flag)))


CacheDir = Annotated[
    str | None,
    _option(
        "--cache-dir",
        metavar="FOLDER",
        help="Folder in which long prompts are stored.",
        show_default="~/.cache/kv/prompts",
    ),
]


def _check_scope(name: str) -> str:
    """Raises UsageError for a name that is none; "" is the scope of everything else."""
    return name and sessions.check_name(name, "scope")


CacheScope = Annotated[
    str,
    _option(
        "--cache-scope",
        metavar="NAME",
        help="Keep stored prompts apart: those of another scope are neither used nor told of.",
        callback=checked(_check_scope),
        show_default=False,
    ),
]


@dataclass(frozen=True)
class StoreFlags:
    """The rows of long prompts are kept on disk, unless told otherwise."""

    use_cache: Annotated[
        bool, _option("--cache/--no-cache", help="Store the cache of long prompts on disk and reuse it.")
    ] = True
    cache_dir: CacheDir = None
    cache_min_tokens: Annotated[
        int,
        number(
            PROMPT_CACHE, "--cache-min-tokens", least=1, help="Minimum length of a prompt that is stored, in tokens."
        ),
    ] = PromptCacheOptions.min_tokens
    cache_size: Annotated[str, size_option("--cache-size", "Maximum size of all stored prompts.")] = CACHE_SIZE
    cache_ttl: Annotated[str, time_option("--cache-ttl", "How long an unused prompt stays stored, e.g. 36h or 7d.")] = (
        CACHE_TTL
    )
    cache_scope: CacheScope = ""

    def options(self, invocation: Invocation) -> PromptCacheOptions:
        """A folder that cannot be made, or written into, is told at once."""
        size = parse_size(self.cache_size, "--cache-size")
        ttl = parse_time(self.cache_ttl, "--cache-ttl")
        folder = store_folder(self.cache_dir) if self.use_cache else None
        tell = render.warn if self.cache_dir else render.notice
        if folder is not None and not (os.path.isdir(folder) or paths.can_be_made(folder)):
            tell(f"cannot make the folder {folder}: long prompts are not kept", invocation)
            folder = None
        elif folder is not None and os.path.isdir(folder) and not os.access(folder, os.W_OK | os.X_OK):
            tell(f"cannot write into {folder}: prompts are read from there, and none is kept", invocation)
        return PromptCacheOptions(
            store=folder, scope=self.cache_scope, min_tokens=self.cache_min_tokens, max_bytes=size, ttl_s=ttl
        )


@dataclass(frozen=True)
class FileFlags:
    """A prompt cache in a file that the user names."""

    prompt_cache: Annotated[
        str | None,
        file_name(
            *(PROMPT_CACHE, "--prompt-cache"),
            help="Reuse the cache in this file; create or extend it after the prompt (--batch: the first one; "
            "kv chat: at its end).",
        ),
    ] = None
    prompt_cache_all: Annotated[
        bool, _option("--prompt-cache-all", help="Also store the cache of the answer in that file.")
    ] = False
    prompt_cache_ro: Annotated[bool, _option("--prompt-cache-ro", help="Never write that file.")] = False
    prompt_cache_strict: Annotated[
        bool,
        _option(
            "--prompt-cache-strict",
            help="Exit with code 6 if that file is damaged, or of another model or setting (not: of another prompt).",
        ),
    ] = False

    def add_to(self, options: PromptCacheOptions) -> PromptCacheOptions:
        """Raises UsageError for flags that need a file and have none."""
        flags = {"all": self.prompt_cache_all, "ro": self.prompt_cache_ro, "strict": self.prompt_cache_strict}
        if self.prompt_cache is None:
            if given := [f"--prompt-cache-{name}" for name, value in flags.items() if value]:
                raise UsageError(f"{given[0]} needs --prompt-cache FILE", "it says what becomes of that file")
            return options
        if self.prompt_cache_all and self.prompt_cache_ro:
            raise UsageError(
                "--prompt-cache-all and --prompt-cache-ro cannot be used together", "leave one of them out"
            )
        if self.prompt_cache_ro:
            file = Path(self.prompt_cache).absolute()
            if file.is_dir():
                raise UsageError(f"--prompt-cache {self.prompt_cache} is a folder", "name a file")
        else:
            file = writable(self.prompt_cache, "name another file, or add --prompt-cache-ro to read one only")
        options = replace(options, file=file, save_answer=self.prompt_cache_all)
        return replace(options, read_only=self.prompt_cache_ro, strict=self.prompt_cache_strict)


CACHE_MARK = "--cache-mark"
CacheMarks = Annotated[
    list[str] | None,
    _option(
        CACHE_MARK,
        "--mark",
        metavar="TEXT",
        help="Keep what a later prompt needs to go on from behind this text in the prompt (repeatable).",
    ),
]


Chunks = Annotated[
    bool,
    _option(
        "--chunks",
        help="Cache each file of -f by itself, and reuse it behind any other text. Answers are near those of the whole"
        " prompt, not the same.",
    ),
]


def writable(name: str, hint: str = "name another file") -> Path:
    """A file that can be made. Raises UsageError or OutputError at once, so that no prompt is computed in vain."""
    if name == "-":
        raise UsageError("a prompt cache cannot be written to stdout", "name a file; one that is called - is ./-")
    file = Path(name).absolute()
    if file.is_dir():
        raise OutputError(f"cannot write {name}: it is a folder", "name a file")
    if not os.access(file.parent, os.W_OK):
        raise OutputError(f"cannot write {name}: its folder is missing or not writable", hint)
    return file


def store_folder(given: str | None) -> Path:
    """The folder of the store, which may be missing. Raises UsageError for a file."""
    folder = Path(given).absolute() if given else paths.cache_dir() / "prompts"
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"{folder} is not a folder", "--cache-dir or KV_CACHE_DIR names one")
    return folder
