"""Values of options that nobody typed: from the environment and from the config file.

An option takes the first of: the command line; `KV_` and its name in the environment; the table of its command in the
config file; the top of that file; a variable of another program that means the same; its default. Variables and the top
of the file set the options that commands share: all of `kv run` and `kv chat`, and those that others have from them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.cli import foreign
from kvcli.cli.helptext import FULL, GENERATION, GLOBAL, KV_CACHE, MODEL, PROMPT, PROMPT_CACHE, section
from kvcli.errors import UsageError
from kvcli.words import meant, near

# Where a value is from.
TYPED, VARIABLE, FILE, OTHER, DEFAULT = "command_line", "environment", "config_file", "other_program", "default"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")

_PER_CALL = ("--prompt", "--file", "--output", "--help", "--version")  # neither a file nor a variable sets these
_NO_OPTIONS = ("config", "cpu-isa")  # of which there are only variables
_MEASURING = ("estimate", "bench", "perplexity", "eval")  # they compare what others take from settings
_ALIKE = 0.8  # a variable that is so like one of ours was meant to be that one
_SHARED = (PROMPT, MODEL, GENERATION, KV_CACHE, FULL, PROMPT_CACHE)
# Where one of these is given, settings of the others from farther down count for nothing: they say the same, or depend.
_REPLACES = {
    "cache_type": ("cache_type_k", "cache_type_v"),
    "evict": ("window", "keep", "budget"),
    "system": ("system_file",),
    "system_file": ("system",),
    "json": ("jsonl",),
    "jsonl": ("json",),
    "session": ("resume", "continue_"),
    "resume": ("session", "continue_"),
    "continue_": ("session", "resume"),
}


@dataclass(frozen=True)
class Setting:
    """A value, where it is from, and what to call it in a message: KV_TEMP, or temp in FILE."""

    value: Any
    origin: str
    called: str


def file_path() -> Path | None:
    """The config file, whether or not it is there; `KV_CONFIG` names another one, or `none`."""
    named = os.environ.get("KV_CONFIG", "")
    return None if named == "none" else Path(named) if named else paths.config_dir() / "config.toml"


def parse(text: str, path: Path) -> dict[str, Any]:
    """What a config file with this text holds. Raises UsageError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}", "correct it, or go without it: KV_CONFIG=none") from None


def read_text(path: Path | None) -> str:
    """The text of the config file, "" where there is none. Raises UsageError."""
    if path is None or not os.path.lexists(path):
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise UsageError(f"cannot read {path}: {reason}", "correct it, or go without it: KV_CONFIG=none") from None


@cache
def names(option: Any) -> list[tuple[str, bool]]:
    """What an option is called in the file, and whether that name says no: ctx-size, stats, no-stats."""
    called = (option.opts, False), (option.secondary_opts, True)
    return [(name[2:], no) for some, no in called for name in some if name.startswith("--")]


def name(option: Any) -> str:
    return next((each for each, _ in names(option)), str(option.name))


def variable(name: str) -> str:
    """ctx-size -> KV_CTX_SIZE"""
    return f"KV_{name.replace('-', '_').upper()}"


@cache
def _is_settable(option: Any) -> bool:
    return option.param_type_name == "option" and set(_PER_CALL).isdisjoint(option.opts)


def settable(options: Iterable[Any]) -> list[Any]:
    """Those that the table of their command may set."""
    return [each for each in options if _is_settable(each)]


def shared(path: Sequence[str], options: Iterable[Any]) -> list[Any]:
    """Those that variables and the top of the file set, too. `path`: the words that name the command, () = `kv`."""
    if not path:
        return settable(options)
    if tuple(path) in (("run",), ("chat",)):
        return [each for each in settable(options) if section(each) != GLOBAL]  # these are set for `kv`
    return [each for each in settable(options) if section(each) in ((MODEL,) if path[0] in _MEASURING else _SHARED)]


class Settings:
    """The settings of one call of `kv`. `commands`: the names of all commands. `known()`: those of all shared options,
    asked where one is in doubt.
    """

    def __init__(
        self,
        commands: Collection[str],
        known: Callable[[], Collection[str]],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.path, self.environment = file_path(), environment
        self._commands, self._known = commands, cache(known)
        self._table: dict[str, Any] | None = None

    @property
    def table(self) -> dict[str, Any]:
        """What the config file holds. Raises UsageError."""
        if self._table is None:
            text = read_text(self.path)
            self._table = parse(text, self.path) if self.path and text else {}
        return self._table

    def of(
        self, path: Sequence[str], options: Iterable[Any], below: Collection[str] = (), last: bool = True
    ) -> dict[str, Setting]:
        """By `option.name`, what is set of the options of a command. `below`: the commands under it (of `kv` all are
        known); `last`: none of those is called.

        Raises UsageError for what makes no sense, in the table of this command and, for the last one, at the top.
        """
        options, below = list(options), below if path else self._commands
        common = shared(path, options)
        own: Any = self.table
        for word in path:
            own = own.get(word, {}) if isinstance(own, dict) else {}
        own = own if isinstance(own, dict) else {}  # `cache = false` beside the command
        for key, value in own.items():
            if isinstance(value, dict) and key not in below:
                raise self._unknown([*path, key], [".".join([*path, name]) for name in below])
        if path and last:
            self._check_top({name for option in settable(options) for name, _ in names(option)})
        return self.common(common, self._in_table(own, settable(options), path) if path else {})

    def common(self, options: list[Any], own: dict[str, Setting] | None = None) -> dict[str, Setting]:
        """What is set of options that commands share; `own`: what the table of one command sets. Raises UsageError."""
        levels = [self._of_other_programs(options), self._in_table(self.table, options, ()), own or {}]
        found: dict[str, Setting] = {}
        for level in (*levels, self._in_environment(options)):
            found = without(found, level) | level
        return found

    def _check_top(self, own: Collection[str]) -> None:
        """Raises UsageError for a key at the top of the file that is no shared option's; `own` ones are known to be."""
        for key, value in self.table.items():
            if not isinstance(value, dict) and (name := key.replace("_", "-")) not in own and name not in self._known():
                raise self._unknown([key], self._known())

    def _in_table(self, table: dict[str, Any], options: list[Any], path: Sequence[str]) -> dict[str, Setting]:
        """Raises UsageError for a key in the table of a command that is none of its options."""
        if not table:
            return {}
        by_name = {each: (option, no) for option in options for each, no in names(option)}
        found: dict[str, Setting] = {}
        for key, value in table.items():
            if isinstance(value, dict):
                continue
            name, called = key.replace("_", "-"), f"{'.'.join([*path, key])} in {self.path}"
            if name in by_name:
                option, no = by_name[name]
                if option.name in found:
                    raise UsageError(f"{called} sets what {found[option.name].called} sets, too")
                found[option.name] = Setting(_from_toml(option, no, value, called), FILE, called)
            elif path:
                raise self._unknown([*path, key], [".".join([*path, each]) for each in by_name])
        return found

    def _unknown(self, words: list[str], names: Iterable[str]) -> UsageError:
        name = ".".join(words)
        hint = meant(near(name.replace("_", "-"), names)) or f"kv config unset {name} removes it"
        return UsageError(f"{name} in {self.path} is not a setting", hint)

    def _in_environment(self, options: list[Any]) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        if not self._own():
            return found
        for option in options:
            for name, no in names(option):
                if text := self.environment.get(variable(name), ""):
                    value = _from_text(option, no, text, variable(name))
                    found.setdefault(option.name, Setting(value, VARIABLE, variable(name)))
        return found

    def _of_other_programs(self, options: list[Any]) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        there = [(other, name, text) for other, name in foreign.VARIABLES.items() if (text := self._text(other))]
        by_name = {name: option for option in options for name, _ in names(option)} if there else {}
        for other, name, text in there:
            if option := by_name.get(name):
                found.setdefault(option.name, Setting(_from_text(option, False, text, other), OTHER, other))
        return found

    def _text(self, name: str) -> str:
        return self.environment.get(name, "")

    def _own(self) -> list[str]:
        """Variables that begin as ours do."""
        return sorted(name for name in self.environment if name.startswith("KV_"))

    def unread(self, known: Collection[str]) -> Iterator[str]:
        """A line for each variable that is almost one of ours, or another program's, and for a config file that is
        named and not there. `known`: names of options.
        """
        yield from self.mistaken(known)
        for name in sorted(self.environment):
            if why := foreign.unread(name):
                yield f"{name} is not read: {why}"

    def mistaken(self, known: Collection[str]) -> Iterator[str]:
        """Those lines of `unread` that tell of mistakes: what somebody set for `kv` is not in force. Other programs
        have variables that begin with KV_, too: of those that are not almost one of ours nothing is said."""
        if self.environment.get("KV_CONFIG") and self.path and not os.path.lexists(self.path):
            yield f"KV_CONFIG is not read: there is no file {self.path}"
        if not (there := self._own()):
            return
        ours = {variable(name) for name in (*known, "config", "cpu-isa", "no-history")}
        strange = [name for name in there if name not in ours]
        if any(near(name, ours, alike=_ALIKE) for name in strange):
            ours |= {variable(name) for name in self._known()}  # it may be an option's of another command
        for name in strange:
            if name not in ours and (hint := meant(near(name, ours, alike=_ALIKE))):
                yield f"{name} is not read: {hint}"


def without(found: dict[str, Setting], given: Iterable[str]) -> dict[str, Setting]:
    """Settings less those that count for nothing where the options `given` are set from higher up."""
    gone = {name for each in given for name in (each, *_REPLACES.get(each, ()))}
    return {name: setting for name, setting in found.items() if name not in gone}


def _from_text(option: Any, no: bool, text: str, called: str) -> Any:
    """The value of a variable as the option takes it. Raises UsageError."""
    if not option.is_flag or option.count:
        return [text] if option.multiple else text
    if text.lower() not in (*TRUE, *FALSE):
        raise UsageError(f"{called} must be 1 or 0, not '{text}'")
    return (text.lower() in TRUE) is not no


def _from_toml(option: Any, no: bool, value: Any, called: str) -> Any:
    """A value of the file as the option takes it, which is as it would be typed. Raises UsageError."""
    if option.is_flag and not option.count:
        if not isinstance(value, bool):
            raise UsageError(f"{called} must be true or false, not {_shown(value)}")
        return value is not no
    entries = value if isinstance(value, list) and option.multiple else [value]
    if not all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in entries):
        many = ", or a list of them" if option.multiple else ""
        raise UsageError(f"{called} must be a string or a number{many}, not {_shown(value)}")
    return [str(each) for each in entries] if option.multiple else str(value)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
