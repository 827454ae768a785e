"""Whether values are of the kind that an argument wants: a wrong one is refused by its name. No torch."""

from __future__ import annotations

import dataclasses
import operator
import reprlib
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from kvcli.errors import UsageError
from kvcli.options import ChatOptions, SampleOptions
from kvcli.words import meant, near

Options = TypeVar("Options")

_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", dict: "a dict"}
# What fields of options are called where they are arguments.
_CALLED = {"ctx_size": "ctx", "type_k": "cache_type", "type_v": "cache_type", "policy": "evict"}


def text(value: Any, called: str) -> str:
    """The value. Raises UsageError for what is no text."""
    if not isinstance(value, str):
        raise UsageError(f"`{called}` must be a text, not {reprlib.repr(value)}")
    return value


def several(given: Any, called: str) -> list[str]:
    """The texts of a list. Raises UsageError."""
    if not isinstance(given, Iterable):
        raise UsageError(f"`{called}` must be a text or a list of texts, not {reprlib.repr(given)}")
    return [text(each, called) for each in given]


def options(value: Any, kind: type[Options], called: str) -> Options:
    """The value. Raises UsageError where it is no dataclass of that kind, or one of its texts, numbers and so on is
    something else."""
    if not isinstance(value, kind):
        raise UsageError(f"`{called}` must be of kvcli.{kind.__name__}, not {reprlib.repr(value)}")
    for name, wanted in get_type_hints(kind).items():
        found, origin = getattr(value, name), get_origin(wanted)
        allowed = get_args(wanted) if origin is UnionType else (origin or wanted,)
        if set(allowed) <= {*_KINDS, type(None)} and not _is_one(found, allowed):
            told = " or ".join(_KINDS[each] for each in allowed if each in _KINDS)
            raise UsageError(f"`{_CALLED.get(name, name)}` must be {told}, not {reprlib.repr(found)}")
    return value


def _is_one(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Whether a value is of one of these types: a number may be whole, and True is no number."""
    if isinstance(value, bool):
        return bool in allowed
    return isinstance(value, allowed) or (float in allowed and isinstance(value, int))


def ids(given: Any, called: str) -> list[int]:
    """Token ids of any whole numbers. Raises UsageError."""
    try:
        if isinstance(given, (str, bytes)):
            raise TypeError
        return [operator.index(token) for token in given]
    except TypeError:
        wanted = "a text or token ids" if called == "prompt" else "token ids"
        raise UsageError(f"`{called}` must be {wanted}, not {reprlib.repr(given)}") from None


def messages(given: Any) -> list[Mapping[str, Any]]:
    """Those of a chat; a text is one of a user. What they hold is for the template to judge. Raises UsageError."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    found = [] if isinstance(given, Mapping) or not isinstance(given, Iterable) else list(given)
    if not found or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in found):
        raise UsageError('`messages` must be a text, or a list of {"role": "user", "content": "..."}')
    return found


def chat(reasoning: Any, budget: Any, variables: Any) -> ChatOptions:
    """How a chat template is used. Raises UsageError."""
    if reasoning not in ("on", "off", "auto"):
        raise UsageError(f"`reasoning` must be on, off or auto, not {reprlib.repr(reasoning)}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < -1:
        raise UsageError(f"`reasoning_budget` must be -1 (no limit), 0 or more, not {reprlib.repr(budget)}")
    if not isinstance(variables, Mapping | None) or not all(isinstance(name, str) for name in variables or ()):
        raise UsageError(f"`template_vars` must be a dict with names, not {reprlib.repr(variables)}")
    return ChatOptions(None, variables or {}, reasoning, budget)


def sampling(base: Any, fields: Mapping[str, Any]) -> SampleOptions:
    """The options with these fields in place of theirs. `stop`: one text, or a list. Raises UsageError."""
    options(base, SampleOptions, "sampling")
    names = [field.name for field in dataclasses.fields(SampleOptions)]
    if unknown := [name for name in fields if name not in names]:
        likely = meant(f"`{each}`" for each in near(unknown[0], names, alike=0.5))
        raise UsageError(f"there is no option `{unknown[0]}`", likely or "kvcli.SampleOptions has them")
    stops = fields.get("stop", base.stop)
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(each, str) and each for each in stops):
        raise UsageError("`stop` must be a text or a list of texts, none of them empty")
    return options(dataclasses.replace(base, **{**fields, "stop": tuple(stops)}), SampleOptions, "sampling")
