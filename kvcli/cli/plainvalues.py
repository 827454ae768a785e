"""Values of options that stand for themselves, or are plain numbers: they are read here.

Newer Typers convert every value by pydantic, those that nobody typed, too; its import takes longer than all else of a
command line. Whatever is not plain is left to Typer, and so is what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

_NUMBERS = {int: re.compile(r"-?\d{1,18}", re.ASCII), float: re.compile(r"-?\d{1,15}(\.\d{1,15})?", re.ASCII)}


def read_plainly(params: Iterable[Any]) -> None:
    """Let these options and arguments of a command read plain values themselves."""
    for param in params:
        if hasattr(param, "type_descriptor") and "process_value" not in vars(param):  # older Typers: no pydantic
            param.process_value = partial(_process, param, param.process_value)


def _process(param: Any, convert: Callable[[Any, Any], Any], ctx: Any, value: Any) -> Any:
    plain = _plain(param, value)
    if plain is NotImplemented:
        return convert(ctx, value)
    return param.callback(ctx, param, plain) if param.callback else plain


def _plain(param: Any, value: Any) -> Any:
    """What a value is for a function; NotImplemented: that is for Typer to say."""
    several, kind = param.multiple or param.nargs != 1, param.type_descriptor.annotation
    if value is None and not param.required:
        return () if several else None
    if kind == list[str] and type(value) in (list, tuple) and all(type(each) is str for each in value):
        return list(value) if value or not param.required else NotImplemented
    if several or kind not in (str, int, float, bool) or param.type_descriptor.is_ranged:
        return NotImplemented
    if type(value) is kind:
        return value
    if kind in _NUMBERS and type(value) is str and _NUMBERS[kind].fullmatch(value):
        return kind(value)
    return NotImplemented
