"""How the words of a command line are read before Typer sees them, and what is said of words that make no sense.

`-n5` and `-c32k` are options with their values, `-vq` is two options without. Any other word with a dash in front is
one option: it is never taken apart into letters, and where there is no such option an error says what is meant.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvcli.cli import foreign
from kvcli.errors import ModelError, UsageError
from kvcli.words import listed, meant, near

_NEGATIVE = re.compile(r"-\d[\d.]*")
_SHOWN = 3  # of the words that are too many, and of commands
_LISTS = ("LIST", "N[,N]", "T[,T]")  # what options are said to take that have several values in one word
_ANY = ("TEXT", "PROMPT", "OPTIONS")  # and those that have a text, which may look like an option
_TEXTS = ("prompt", "text")  # what arguments that are a user's text are called
_VALUES = "values"  # what arguments that may be negative numbers are called


class Reader:
    """Reads the words for one command, whose options and arguments are `params`. `path`: the words that name it.

    `having` finds the commands that have an option of some name.

    `called` tells what to call an option in messages, by the name that they would use: {"--predict": "-n/--predict"}
    where -n was typed. `given`: the options that were typed; `stopped`: whether a word ended them.
    """

    def __init__(
        self, params: Sequence[Any], path: str, having: Callable[[str], Sequence[str]] = lambda name: ()
    ) -> None:
        self.params, self.path, self.having = params, path, having
        self.options = {name: param for param in params for name in (*param.opts, *param.secondary_opts)}
        self.called: dict[str, str] = {}
        self.given: list[Any] = []
        self.stopped = False

    def read(self, args: Sequence[str], interspersed: bool = True) -> list[str]:
        """The words, with options of other programs replaced by ours of the same meaning.

        Not `interspersed`: options end at the first word that is none. Raises UsageError for an option that the command
        does not have.
        """
        words, options, plain = list(args), list[str](), list[str]()
        while words and words[0] != "--" and not self.stopped:
            word = words.pop(0)
            if word.startswith("-") and word != "-" and not self._is_value(word):
                options += self._option(word, words)
            else:
                plain.append(word)
                self.stopped = not interspersed
        if any(word.startswith("-") and word != "-" for word in plain):
            plain.insert(0, "--")
            words = words[1:]  # the rest begins with the same
        return options + plain + words

    def _option(self, word: str, rest: list[str]) -> list[str]:
        """The words that stand for an option; its value may be taken from the rest."""
        name, value = self._parts(word)
        ours = self._ours(name)
        if ours is None:
            if value is None and self._is_row(word):
                return [word]
            raise self._missing(word, name)
        if self.options[ours] in self.given:
            self._check_twice(self.options[ours], name)
        self.given.append(self.options[ours])
        self.called |= {each: f"{name}/{each}" for each in self.options[ours].opts if name != each}
        if not _takes_value(self.options[ours]):
            if value is not None:
                raise UsageError(f"{name} takes no value: {word}", f"see {self.path} --help")
            return [_written(self.options[ours], ours)]
        if value is None and (choices := _optional(self.options[ours])):
            there = bool(rest) and rest[0] in choices
            if rest and not there and not rest[0].startswith("-"):
                _check_model(name, rest[0], choices)
            value = rest.pop(0) if there else choices[0]
        elif value is None:
            value = self._next(self.options[ours], name, rest)
        written = _written(self.options[ours], ours)
        return [f"{written}={value}"] if written.startswith("--") else [written, value]

    def _next(self, option: Any, name: str, rest: list[str]) -> str:
        """The value of an option, from the words behind its name. An option of the command is none, unless the value
        may be any text. Raises UsageError."""
        metavar, another = option.metavar or "VALUE", bool(rest) and rest[0] in self.options
        if rest and not (another and metavar not in _ANY):
            return rest.pop(0)
        behind = f", and {rest[0]} is an option" if another else ""
        raise UsageError(f"{name} needs a value: {name} {metavar}{behind}", f"see {self.path} --help")

    def _check_twice(self, option: Any, name: str) -> None:
        """The last value of an option counts, but not where the others were to be compared with it: UsageError then."""
        if option.metavar in _LISTS:
            raise UsageError(f"{name} is given twice", f"put all values in one list: {name} {option.metavar}")
        if "--gpu" in option.opts:
            from kvcli.runtime.plan.cards import one_at_a_time

            raise one_at_a_time()

    def _parts(self, word: str) -> tuple[str, str | None]:
        """--name=value, -n=value or -n5: a name, and the value that is part of the word."""
        name, equals, value = word.partition("=")
        whole = equals or word in self.options or _note(word)
        if not whole and (attached := re.match(r"(-[A-Za-z]+)([^A-Za-z].*)", word, re.S)):
            return attached[1], attached[2]
        return name, value if equals else None

    def _ours(self, name: str) -> str | None:
        """The option of this command that is meant, if its name or one of the same meaning is known."""
        spelled = _dashed(name)
        return next((each for each in (spelled, foreign.ALIASES.get(spelled)) if each in self.options), None)

    def _is_value(self, word: str) -> bool:
        """Whether a word is a negative number, for a command that has an argument for it."""
        return _NEGATIVE.fullmatch(word) is not None and any(param.name == _VALUES for param in self.params)

    def _is_row(self, word: str) -> bool:
        """Whether a word is several options of one letter, none of which takes a value."""
        each = [self.options.get(f"-{letter}") for letter in word[1:]]
        return all(option is not None and not _takes_value(option) for option in each)

    def _missing(self, word: str, name: str) -> UsageError:
        """The error for an option that does not exist: what there is instead, as far as we know."""
        spelled, hint = _dashed(name), f"see {self.path} --help"
        if note := _note(spelled):
            return UsageError(f"{name} {note}", hint)
        alike = 0.7 if word.startswith("--") else 0.85
        begun = [each for each in self.options if spelled.startswith("--") and each.startswith(f"{spelled}-")]
        if offered := begun[:2] or near(f"--{spelled.lstrip('-')}", self.options, 2, alike):
            hint = meant(offered)
        elif (option := self.options.get(word[:2])) and _takes_value(option):
            hint = f"did you mean {word[:2]} {word[2:]}?"
        elif others := self.having(spelled):
            more = [f"{len(others) - _SHOWN} more"] if len(others) > _SHOWN else []
            hint = f"{listed([*others[:_SHOWN], *more])} {'have' if others[1:] else 'has'} it; {hint}"
        elif not word.startswith("--") and _takes_text(self.params):
            hint += f'; for a text that begins with -: {self.path} -- "-..."'
        return UsageError(f"no such option: {name if '=' in word else word}", hint)


def _written(param: Any, name: str) -> str:
    """A name of two dashes that means the same, where there is one: of others Typer first looks for similar ones."""
    alike = param.opts if name in param.opts else param.secondary_opts
    return next((each for each in alike if each.startswith("--")), name)


def _optional(param: Any) -> list[str]:
    """The words that an option may have as its value, which is the first where none of them follows; [] = it needs a
    value."""
    metavar = str(param.metavar or "")
    return metavar.strip("[]").split("|") if metavar.startswith("[") and param.param_type_name == "option" else []


def _check_model(name: str, word: str, choices: Sequence[str]) -> None:
    """Raises UsageError where the word behind an option that may have a value is neither that nor a model's name."""
    from kvcli.runtime.hub.modelref import ModelRef

    try:
        ModelRef.parse(word, planning=True)
    except ModelError as error:
        both = f"'{word}' behind {name} is neither one of {', '.join(choices)} nor the name of a model"
        near = foreign.program(word)
        raise UsageError(both, meant([near]) if near in choices else error.hint) from None


def _takes_value(param: Any) -> bool:
    return not param.is_flag and not param.count


def _note(name: str) -> str:
    """What stands behind an option of another program, which may have been typed with one dash instead of two."""
    return foreign.NOTES.get(name) or foreign.NOTES.get(f"-{name}", "")


def _dashed(name: str) -> str:
    """--ctx_size as --ctx-size."""
    return name.replace("_", "-") if name.startswith("--") else name


def no_command(word: str, path: str, commands: Iterable[str]) -> UsageError:
    """The error for a command that does not exist below `path`: what there is instead."""
    help_page = f"see {path} --help"
    of_others = {"kv": foreign.COMMANDS, "kv config": foreign.COMMANDS_OF_CONFIG}.get(path, {})
    if word in of_others:
        help_page = of_others[word]
    elif offered := near(word, commands, 2):
        help_page = meant(f"{path} {name}" for name in offered)
    return UsageError(f"no such command: {path} {word}", help_page)


def as_typed(message: str, given: Mapping[str, str]) -> str:
    """A message that begins with the name of an option, which is called there as `given` says: -n/--predict."""
    name = re.match(r"--[\w-]*\w|", message)[0]  # type: ignore[index]
    return given.get(name, name) + message.removeprefix(name)


def refused(error: Any) -> UsageError:
    """What Typer refuses, in our words where we have some."""
    command, path = (error.ctx.command, error.ctx.command_path) if error.ctx else (None, "kv")
    kind, param, help_page = type(error).__name__, getattr(error, "param", None), f"see {path} --help"
    if kind == "MissingParameter" and param:
        return UsageError(f"{_name(param)} is missing", help_page)
    if kind == "BadParameter" and param:
        if must := _must(error.message, param):
            return UsageError(f"{_name(param)} must be {must}, not '{_value(error)}'")
        return UsageError(f"{_name(param)}: {error.message.removeprefix('Value error, ').rstrip('.')}", help_page)
    text = error.format_message()
    extra = re.fullmatch(r"Got unexpected extra argument(?:s|\(s\))? \((.+)\)", text, re.DOTALL)
    if extra and command:
        return _too_many(extra[1].split(" "), command, path, error.ctx.params)
    return UsageError(text.rstrip("."), help_page)


def _name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper()).strip("[].")
    return next((name for name in param.opts if name.startswith("--")), param.opts[0])


def _must(message: str, param: Any) -> str:
    """What a value has to be, from what older and newer Typers say of one that is not; "" = none of these."""
    if "valid int" in message:
        return "a whole number"
    if re.search("valid (number|float)", message):
        return "a number"
    if least := re.search(r"(?:greater than or equal to |x>=)(-?[\d.]*\d)", message):
        return f"{least[1]} or more"
    return f"one of {', '.join(str(param.metavar).split('|'))}" if "is not one of" in message else ""


def _value(error: Any) -> Any:
    """What was given: newer Typers have it in the error of pydantic that is the cause, older ones in the message."""
    if hasattr(error.__cause__, "errors"):
        return error.__cause__.errors()[0]["input"]
    return re.sub(r"^'(.*)'$", r"\1", error.message.partition(" is not ")[0])


def _too_many(words: Sequence[str], command: Any, path: str, given: Mapping[str, Any]) -> UsageError:
    """For words behind the last argument of the command `path`. `given`: the values of its arguments."""
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    told = f"unexpected argument{'s' if words[1:] else ''}: {' '.join(words[:_SHOWN])}{more}"
    if not _takes_text(command.params):
        return UsageError(told, f"see {path} --help")
    text = next(str(given[p.name]) for p in command.params if _is_text(p) and given.get(p.name) is not None)
    if _names_model(text) and any("--model" in param.opts for param in command.params):
        return UsageError(told, f"{path} -m {text} ... takes the model {text}")
    if not any(os.path.isfile(word) for word in words):
        return UsageError(told, "put the text in quotes")
    many = any(param.multiple for param in command.params if "--file" in param.opts)
    repeat = "repeat -f for each file, or " if many else ""
    return UsageError(told, f"{repeat}cat FILES | {path}")


def _takes_text(params: Sequence[Any]) -> bool:
    """Whether an argument among these is a text of the user's."""
    return any(map(_is_text, params))


def _is_text(param: Any) -> bool:
    return param.param_type_name == "argument" and str(param.metavar or param.name).lower().strip("[]") in _TEXTS


def _names_model(word: str) -> bool:
    from kvcli.runtime.hub.recipes import load_recipes

    return word in load_recipes() or (word.endswith(".gguf") and os.path.isfile(word))
