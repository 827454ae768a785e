"""`/set`: the sampling options of a running chat, by name."""

from __future__ import annotations

import dataclasses
from types import UnionType
from typing import Any, get_args, get_type_hints

from kvcli.cli.commands.chat import hints
from kvcli.cli.flags.shared import parse_tokens
from kvcli.errors import UsageError
from kvcli.options import SampleOptions

OTHER_NAMES = {
    "n": "max_tokens", "predict": "max_tokens", "n_predict": "max_tokens", "num_predict": "max_tokens",
    "temp": "temperature", "repetition_penalty": "repeat_penalty",
}  # fmt: skip
SHOWN_AS = {"max_tokens": "n"}
# Two follow from others, a table, of no use here, and what a schema or a grammar is made into.
NOT_SET = ("sequence", "unattended", "logit_bias", "logprobs", "grammar")
DEFAULT = "default"


def _kinds() -> dict[str, type]:
    """Every setting, and what its value is."""
    found = {}
    for name, hint in get_type_hints(SampleOptions).items():
        if name not in NOT_SET:
            found[name] = get_args(hint)[0] if isinstance(hint, UnionType) else getattr(hint, "__origin__", hint)
    return found


def name_of(word: str) -> str:
    """The field that a user means. Raises UsageError."""
    word = word.lstrip("-").replace("-", "_").lower()
    name = OTHER_NAMES.get(word, word)
    if name not in _kinds():
        hint = hints.of_setting(word, names()) or f"settings: {', '.join(names())}"
        raise UsageError(f"there is no setting '{word}'", hint)
    return name


def names() -> list[str]:
    """Every setting, as it is shown."""
    return [shown_as(name) for name in _kinds()]


def parted(argument: str) -> tuple[str, str]:
    """Name and value of KEY VALUE, or KEY=VALUE; "" where there is none."""
    word, space, value = argument.partition(" ")
    if not space and "=" in word:
        word, _, value = word.partition("=")
    return word, value


def shown_as(name: str) -> str:
    return SHOWN_AS.get(name, name)


def changed(sampling: SampleOptions, name: str, text: str) -> SampleOptions:
    """The options with another value, which `text` is. Raises UsageError for what is none."""
    value: Any
    if text == DEFAULT:
        value = next(field.default for field in dataclasses.fields(SampleOptions) if field.name == name)
    else:
        value = _parsed(shown_as(name), _kinds()[name], text)
    unattended = sampling.unattended and name != "max_tokens"
    return dataclasses.replace(sampling, **{"unattended": unattended, name: value})


def _parsed(name: str, kind: type, text: str) -> Any:
    if name == SHOWN_AS["max_tokens"]:
        return -1 if text == "-1" else parse_tokens(text, name, "; -1 = no limit")
    if kind is tuple:
        return (text,)
    if kind is bool:
        if text not in ("on", "off"):
            raise UsageError(f"{name} must be on or off, not '{text}'")
        return text == "on"
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise UsageError(f"{name} must be {what}, not '{text}'") from None


def lines(asked: SampleOptions, settled: SampleOptions) -> list[str]:
    """A line for each setting: what is in force, and where it does not come from the user."""
    width = max(len(shown_as(name)) for name in _kinds())
    return [f"{shown_as(name):<{width}}  {described(name, asked, settled)}" for name in _kinds()]


def described(name: str, asked: SampleOptions, settled: SampleOptions) -> str:
    """The value of one setting in words."""
    value = getattr(settled, name)
    if name == "seed":
        return "random" if asked.seed < 0 else str(value)
    if name == "max_tokens":
        return "no limit" if value < 0 else str(value)
    if isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return " ".join(map(repr, value)) or "none"
    said = ("on" if value else "off") if isinstance(value, bool) else f"{value:g}"
    return f"{said} (default)" if getattr(asked, name) is None else said
