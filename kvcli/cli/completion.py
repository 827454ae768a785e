"""Completion in a shell: commands, options, and the values that are known. Typer asks and answers the shell.

A script of the shell calls `kv` with `_KV_COMPLETE` set and with the words so far; see `kv completion`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvcli.cli import settings
from kvcli.cli.app import shared_options, walk
from kvcli.cli.invocation import Invocation

VARIABLE = "_KV_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


# From the call of `kv` to all values that an option or argument may have.
_Known = Callable[[Invocation], Iterable[str]]


class Suggestion(NamedTuple):
    """A value that may come next, as Typer's answers to shells want it; zsh and fish show the help."""

    value: str
    help: str | None = None
    type: str = "plain"


def script(shell: str) -> str:
    """What the shell is to run at its start."""
    from typer.completion import get_completion_script

    return str(get_completion_script(prog_name="kv", complete_var=VARIABLE, shell=shell))


def install(shell: str) -> Path:
    """Put the script where the shell finds it in the user's home folder. Raises OSError."""
    from typer.completion import install

    return Path(install(shell=shell, prog_name="kv", complete_var=VARIABLE)[1])


def words_so_far() -> list[str]:
    """Those behind `kv` that are complete, as the shell has put them into the environment."""
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return re.split(r"\s+", words)[1:-1]


def answer(command: Any, invocation: Invocation) -> int:
    """Print what may come next for one of the shells; the exit code."""
    from typer import completion

    for words, each in walk(command):
        for param in each.params:
            # Typer's own parameter for this stands in the declaration of an option; here is what all options share.
            param._custom_shell_complete = _completer(_values(words, param), invocation)
    completion.completion_init()
    context = {"obj": invocation}
    return int(completion.shell_complete(command, context, "kv", VARIABLE, os.environ[VARIABLE]))


def _completer(values: _Known | None, invocation: Invocation) -> Callable[[Any, Any, str], list[Suggestion]] | None:
    """What completes the value of an option or argument; None = Typer's own way, which is files."""
    if values is None:
        return None

    def complete(context: Any, param: Any, incomplete: str) -> list[Suggestion]:
        before, helps = "", dict[str, str]()
        if values is _cache_types:
            before, helps = re.match(r".*[,/]|", incomplete)[0], _helps_of_cache_types()  # type: ignore[index]
        return [
            Suggestion(before + value, helps.get(value))
            for value in values(invocation)
            if (before + value).startswith(incomplete)
        ]

    return complete


def _values(words: tuple[str, ...], param: Any) -> _Known | None:
    """All values of an option or argument; None where nobody knows them."""
    option = next((name for name in param.opts if name.startswith("--")), "")
    known = _OPTIONS.get(option) if option else _ARGUMENTS.get((*words, param.name))
    choices = re.sub(r"\[.*?\]", "", str(param.metavar or ""))
    if known is None and re.fullmatch(r"[a-z0-9_-]+(\|[a-z0-9_-]+)+", choices):
        return lambda invocation: choices.split("|")
    return known


def _models(invocation: Invocation) -> list[str]:
    """Those that have a file, here or to be downloaded."""
    from kvcli.runtime.hub import inventory

    return inventory.names()


def _downloaded(invocation: Invocation) -> list[str]:
    from kvcli.runtime.hub import inventory

    return inventory.downloaded_names()


def _planned(invocation: Invocation) -> list[str]:
    """Those that are known by their sizes, too."""
    from kvcli.runtime.hub import inventory

    return inventory.names(shapes=True)


def _cache_types(invocation: Invocation) -> list[str]:
    from kvcli.codecs import CODECS

    return ["auto", *CODECS]


def _helps_of_cache_types() -> dict[str, str]:
    from kvcli.codecs import CODECS

    return {row.name: row.help for row in CODECS.values()}


def _cards(invocation: Invocation) -> Iterable[str]:
    from kvcli.runtime.plan.cards import CARDS

    return (card.name for card in CARDS.values())


def _chats(invocation: Invocation) -> list[str]:
    from kvcli.runtime.promptcache import sessions

    return sessions.names()


def _prompt_caches(invocation: Invocation) -> Iterator[str]:
    from kvcli.cli import cachefiles
    from kvcli.cli.flags.promptcache import store_folder

    return (cachefiles.id_of(path) for path in cachefiles.stored(store_folder(os.environ.get("KV_CACHE_DIR"))))


def _kinds(invocation: Invocation) -> Iterator[str]:
    from kvcli.cli.flags.promptcache import store_folder
    from kvcli.cli.storage import kinds

    return (kind.name for kind in kinds(store_folder(os.environ.get("KV_CACHE_DIR"))))


def _settings(invocation: Invocation) -> Iterator[str]:
    assert invocation.tree is not None
    return (settings.name(option) for option in shared_options(invocation.tree()).values())


def _commands(invocation: Invocation) -> Iterator[str]:
    assert invocation.tree is not None
    return (name for name in invocation.tree().commands)


_OPTIONS: dict[str, _Known] = {
    "--model": _models,
    "--cache-type": _cache_types,
    "--cache-type-k": _cache_types,
    "--cache-type-v": _cache_types,
    "--gpu": _cards,
    "--session": _chats,
    "--resume": _chats,
}
_ARGUMENTS: dict[tuple[str, ...], _Known] = {
    ("pull", "model"): _models,
    ("inspect", "model"): _models,
    ("estimate", "model"): _planned,
    ("models", "path", "name"): _downloaded,
    ("models", "verify", "name"): _downloaded,
    ("models", "rm", "name"): _downloaded,
    ("chat", "show", "name"): _chats,
    ("chat", "export", "name"): _chats,
    ("chat", "rm", "names"): _chats,
    ("cache", "show", "name"): _prompt_caches,
    ("cache", "explain", "name"): _prompt_caches,
    ("cache", "verify", "names"): _prompt_caches,
    ("cache", "rm", "names"): _prompt_caches,
    ("cache", "pin", "names"): _prompt_caches,
    ("cache", "unpin", "names"): _prompt_caches,
    ("storage", "rm", "names"): _kinds,
    ("config", "show", "command"): _commands,
    ("config", "set", "name"): _settings,
    ("config", "unset", "name"): _settings,
}
