"""The words of a command line before Typer reads them: options as ours, never taken apart into letters.

`-n5` and `-c32k` are options with their values, `-vq` is two options without; any other word with a dash in front is one
option, and an error that says what is meant where there is none of that name.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvcli import foreign
from kvcli.errors import UsageError


def as_ours(args: Sequence[str], params: Iterable[Any], path: str, interspersed: bool = True) -> list[str]:
    """The words, with options of other programs replaced by ours of the same meaning.

    `params` are those of the command called `path`; not `interspersed`: options end at the first word that is none.
    Raises UsageError for an option that the command does not have.
    """
    takes_value = {name: _takes_value(param) for param in params for name in (*param.opts, *param.secondary_opts)}
    words, found = list(args), []
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            found.append(word)
            if not interspersed:
                break
            continue
        if word == "--":
            found.append(word)
            break
        name, value = _split(word, takes_value, path)
        if value is None and takes_value.get(name) and words:
            value = words.pop(0)
        if value is None:
            found.append(name)
        else:
            found += [f"{name}={value}"] if name.startswith("--") else [name, value]
    return found + words


def _takes_value(param: Any) -> bool:
    return param.param_type_name == "option" and not param.is_flag and not param.count


def _split(word: str, takes_value: dict[str, bool], path: str) -> tuple[str, str | None]:
    """One of our options and the value that is part of the word; or a row such as -vq as it is."""
    if word in takes_value:
        return word, None
    letters = re.match(r"--?[A-Za-z][\w-]*" if word.startswith("--") or "=" in word else r"-[A-Za-z]*", word)
    name = letters[0] if letters else word
    rest = word[len(name) :]
    ours = _ours(name, takes_value)
    if ours and rest and not takes_value[ours]:
        raise UsageError(f"{name} takes no value: {word}", f"see {path} --help")
    if ours:
        return ours, rest.removeprefix("=") if rest else None
    if not rest and all(takes_value.get(f"-{letter}") is False for letter in word[1:]) and not word.startswith("--"):
        return word, None
    raise _missing(word, name, takes_value, path)


def _ours(name: str, takes_value: dict[str, bool]) -> str | None:
    """The option of this command that is meant, if its name or one of the same meaning is known."""
    spelled = name.replace("_", "-") if name.startswith("--") else name
    for each in (spelled, foreign.ALIASES.get(spelled, "")):
        if each in takes_value:
            return each
    return None


def _missing(word: str, name: str, takes_value: dict[str, bool], path: str) -> UsageError:
    """The error for an option that does not exist: what there is instead, as far as we know."""
    spelled = name.replace("_", "-") if name.startswith("--") else name
    help_page = f"see {path} --help"
    if spelled in foreign.NOTES:
        return UsageError(f"{name} {foreign.NOTES[spelled]}", help_page)
    alike = 0.7 if word.startswith("--") else 0.85
    if near := difflib.get_close_matches(f"--{spelled.lstrip('-')}", takes_value, 2, alike):
        help_page = f"did you mean {' or '.join(near)}?"
    elif takes_value.get(word[:2]) and not word.startswith("--"):
        help_page = f"did you mean {word[:2]} {word[2:]}?"
    return UsageError(f"no such option: {name if '=' in word else word}", help_page)


def no_command(word: str, path: str, commands: Iterable[str]) -> UsageError:
    """The error for a command that does not exist below `path`: what there is instead."""
    help_page = f"see {path} --help"
    if path == "kv" and word in foreign.COMMANDS:
        help_page = foreign.COMMANDS[word]
    elif near := difflib.get_close_matches(word, list(commands), 2):
        help_page = f"did you mean {' or '.join(f'{path} {name}' for name in near)}?"
    return UsageError(f"no such command: {path} {word}", help_page)
