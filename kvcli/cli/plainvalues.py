"""Values of options that stand for themselves, or are plain numbers: they are read here.

Newer Typers convert every value by pydantic, those that nobody typed, too; its import takes longer than all else of a
command line. Whatever is not plain is left to Typer, and so is what is wrong.

What an option is that nobody gave is found once: a process that keeps a model has it ready for all of its commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any

_NUMBERS = {int: re.compile(r"-?\d{1,18}", re.ASCII), float: re.compile(r"-?\d{1,15}(\.\d{1,15})?", re.ASCII)}


def read_plainly(params: Iterable[Any]) -> None:
    """Let these options and arguments of a command read plain values themselves, and what they are that nobody gave
    once."""
    for param in params:
        if "handle_parse_result" not in vars(param):
            param.handle_parse_result = _Remembering(param, param.handle_parse_result)
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


class _Remembering:
    """What `handle` makes of words for one option or argument; where they say nothing of it, what it was when they did
    not before. A default is checked then, and says nothing to anybody."""

    def __init__(
        self, param: Any, handle: Callable[[Any, Mapping[str, Any], list[str]], tuple[Any, list[str]]]
    ) -> None:
        self._param, self._handle = param, handle
        self._known: tuple[Any, Any] | None = None  # the value, and what it is from

    def __call__(self, ctx: Any, opts: Mapping[str, Any], args: list[str]) -> tuple[Any, list[str]]:
        name = self._param.name
        if ctx.resilient_parsing or opts.get(name) is not None or name in (ctx.default_map or ()):
            return self._handle(ctx, opts, args)
        if self._known is None:
            value, rest = self._handle(ctx, opts, args)
            if _stays(self._param, value):
                self._known = value, ctx.get_parameter_source(name)
            return value, rest
        value, source = self._known
        ctx.set_parameter_source(name, source)
        if self._param.expose_value:
            ctx.params[name] = value
        return value, args


def _stays(param: Any, value: Any) -> bool:
    """Whether an option that nobody gave is this value every time: nothing is asked for it, and nobody changes it."""
    asked = param.envvar or getattr(param, "prompt", None) or callable(param.default)
    return not asked and (value is None or value == () or isinstance(value, str | int | float | Enum))
