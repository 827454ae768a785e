"""What the user typed, for messages about it: which of an option's names, words that are too many, a dash in front."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from kvcli.errors import UsageError

_SHOWN = 3  # of the words that are too many
_TEXTS = ("prompt", "text")  # what arguments that are a user's text are called


def leaf(command: Any, args: Sequence[str]) -> Any:
    """The command that the first words of `args` lead to; options among them are passed over."""
    for word in args:
        command = getattr(command, "commands", {}).get(word, command)
    return command


def option_name(names: Sequence[str], args: Sequence[str], name: str = "") -> str:
    """`name`, or the first long one of an option's names; where `args` have another one, behind that: -n/--predict."""
    name = name or next((name for name in names if name.startswith("--")), names[0])
    typed = [other for other in names if any(_is(other, word) for word in args)]
    return f"{typed[0]}/{name}" if typed and name not in typed else name


def as_typed(message: str, command: Any, args: Sequence[str]) -> str:
    """A message that begins with the name of an option, with the one that the user typed in front of it."""
    name = re.match(r"--[\w-]*\w|", message)[0]  # type: ignore[index]
    names = next((param.opts for param in command.params if name in param.opts), [name])
    return option_name(names, args, name) + message.removeprefix(name)


def _is(name: str, word: str) -> bool:
    """Whether a word of the command line is this option: -c in '-c' and '-c5', --ctx-size in '--ctx-size=5'."""
    return word == name or word.startswith(name if len(name) == 2 else f"{name}=")


def too_many(message: str, command: Any, path: str) -> UsageError | None:
    """For words behind the last argument of the command `path`, in our words; None for any other message."""
    found = re.fullmatch(r"Got unexpected extra argument(?:s|\(s\))? \((.+)\)", message, re.DOTALL)
    if found is None:
        return None
    words = found[1].split(" ")
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    told = f"unexpected argument{'s' if words[1:] else ''}: {' '.join(words[:_SHOWN])}{more}"
    if not takes_text(command):
        return UsageError(told, f"see {path} --help")
    if not any(os.path.isfile(word) for word in words):
        return UsageError(told, "put the text in quotes")
    repeat = (
        "repeat -f for each file, or " if any(param.multiple for param in command.params if _is_file(param)) else ""
    )
    return UsageError(told, f"{repeat}cat FILES | {path}")


def _is_file(param: Any) -> bool:
    return "--file" in param.opts


def dashed_text(option: str, command: Any, args: Sequence[str], path: str) -> UsageError | None:
    """For an option that does not exist and may be the text of the command `path`: -hello is a row of short ones."""
    if option.startswith("--") or not takes_text(command):
        return None
    word = next((word for word in args if re.match(r"-[^-]", word) and option[1] in word), option)
    where = "" if word == option else f" (in {word!r})"
    return UsageError(
        f"no such option: {option}{where}", f'see {path} --help; for a text that begins with -: {path} -- "-..."'
    )


def takes_text(command: Any) -> bool:
    """Whether one of its arguments is a text of the user's."""
    arguments = (param for param in command.params if param.param_type_name == "argument")
    return any(str(param.metavar or param.name).lower() in _TEXTS for param in arguments)
