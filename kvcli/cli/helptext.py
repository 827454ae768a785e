"""The help page of a command: one layout in a terminal of any width, in a pipe and for a bare `kv`.

A page is a usage line, what the command does, a section for each group of options in one order for all commands, and
examples. Long lines are wrapped, never cut.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Sections of options in the order in which they are shown; what an option without a section gets is OPTIONS.
ARGUMENTS, OPTIONS, OUTPUT, GLOBAL = "Arguments", "Options", "Output", "Global options"
PROMPT, MODEL, GENERATION, KV_CACHE = "Prompt", "Model and context", "Generation", "KV cache"
FULL, PROMPT_CACHE, CHAT, SERVER = "When the context is full", "Prompt cache", "Conversation", "Server"
PLAN, SHAPE, DEVICE, MEASURE = "What to plan", "Shape by hand", "Device", "What to measure"
ORDER = (
    *(ARGUMENTS, PROMPT, CHAT, SERVER, PLAN, MEASURE, MODEL, GENERATION, KV_CACHE, FULL, PROMPT_CACHE),
    *(DEVICE, SHAPE, OPTIONS, OUTPUT, GLOBAL),
)

# Sections of commands.
GENERATE, PLANNING, STORES, SETUP = "Generate text", "Plan and measure", "Models and caches", "Setup"

WIDEST, LEFT, NARROW = 100, 28, 60  # of a line; of the names before a text; below it, texts stand under the names


def page(context: Any, bold: bool = False) -> str:
    """The page of the command of a Typer context; `bold`: its titles are."""
    width = min(max(_columns(), 20), WIDEST)
    sections = [*_commands(context), *_options(context)]
    left = min(LEFT, max(len(names) for _, rows in sections for names, _ in rows))
    blocks = [_usage(context, width), *_paragraphs(context.command.help or "", width)]
    blocks += ["\n".join([_title(title, bold), *_lines(rows, left, width)]) for title, rows in sections]
    if lines := _examples(context):
        blocks.append("\n".join([_title("Examples", bold), *(_wrapped(line, width, "  ", " " * 6) for line in lines)]))
    return "\n\n".join(blocks) + "\n"


def _columns() -> int:
    """The width of the terminal, where the page goes there or through a pager; 80 where there is none."""
    width = 80
    with suppress(OSError):
        width = os.get_terminal_size(2).columns  # stderr, for a pager reads stdout
    return shutil.get_terminal_size((width, 24)).columns


def _title(title: str, bold: bool) -> str:
    return f"\x1b[1m{title}\x1b[0m" if bold else title


def _usage(context: Any, width: int) -> str:
    command = context.command
    words = [context.command_path, "[OPTIONS]"]
    if hasattr(command, "commands"):
        words.append("[COMMAND ...]" if command.alone else "COMMAND ...")
    words += [_argument(param) for param in command.params if param.param_type_name == "argument"]
    return _wrapped(" ".join(words), width, "usage: ", " " * 4)


def _argument(param: Any) -> str:
    """MODEL, [PROMPT], [FILE|ID]...: brackets where it may be left out."""
    name = _metavar(param).removesuffix("...").strip("[]")
    name = name if param.required else f"[{name}]"
    return f"{name}..." if param.nargs != 1 else name


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph:
            yield _wrapped(" ".join(paragraph.split()), width)


def _commands(context: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles, and a row for each command that is shown."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for name, command in getattr(context.command, "commands", {}).items():
        if not command.hidden:
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, summary(command)))
    yield from sections.items()


def summary(command: Any) -> str:
    """What a command does, in its first sentence."""
    text = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0]


def _options(context: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles in order, and a row for each option or argument."""
    sections: dict[str, list[Any]] = {}
    for param in context.command.get_params(context):
        if not getattr(param, "hidden", False):
            sections.setdefault(section(param), []).append(param)
    for title in sorted(sections, key=rank):
        yield title, [(_names(param), _text(param)) for param in sorted(sections[title], key=_place)]


def _place(param: Any) -> int:
    """Arguments stand before options with a short name, and these before others."""
    if param.param_type_name == "argument":
        return 0
    return 2 if all(name.startswith("--") for name in param.opts) else 1


def rank(title: str) -> int:
    """Where a section stands among others."""
    return ORDER.index(title if title in ORDER else OPTIONS)


def section(param: Any) -> str:
    """The title under which an option or argument stands."""
    if "--help" in param.opts:
        return GLOBAL
    fallback = ARGUMENTS if param.param_type_name == "argument" else OPTIONS
    return getattr(param, "rich_help_panel", None) or fallback


def _names(param: Any) -> str:
    """-c, --ctx-size N: short names, the first long one, and what its value is called."""
    if param.param_type_name == "argument":
        return _argument(param).strip("[]") if param.nargs == 1 else _argument(param)
    short = [name for name in param.opts if not name.startswith("--")]
    names = [*short, *_long(param)[:1], *param.secondary_opts[:1]]
    return ", ".join(names) + ("" if param.is_flag or param.count else f" {_metavar(param)}")


def _long(param: Any) -> list[str]:
    return [name for name in param.opts if name.startswith("--")]


def _text(param: Any) -> str:
    """What an option does, its default, and its other names."""
    notes = []
    if default := default_text(param):
        notes.append(f"default: {default}")
    if param.param_type_name == "option" and param.required:
        notes.append("required")
    if param.param_type_name == "option" and (others := _long(param)[1:]):
        notes.append(f"also {', '.join(others)}")
    return (param.help or "") + (f" ({'; '.join(notes)})" if notes else "")


def default_text(param: Any) -> str:
    """Its default in words, "" where there is none to speak of."""
    shown = param.show_default
    if isinstance(shown, str):
        return shown
    value = param.default
    if not shown or param.required or value is None or isinstance(value, bool) or value in ("", []) or callable(value):
        return ""
    return "" if param.param_type_name == "option" and param.count else str(value)


def _lines(rows: list[tuple[str, str]], left: int, width: int) -> Iterator[str]:
    """Names and text side by side, or one under the other where there is no room."""
    for names, text in rows:
        gap = " " * (2 + left + 2) if width >= NARROW else " " * 6
        if len(names) <= left and text and width >= NARROW:
            yield _wrapped(text, width, f"  {names:<{left}}  ", gap)
        else:
            yield _wrapped(names, width, "  ", "    ")
            if text:
                yield _wrapped(text, width, gap)


def _examples(context: Any) -> list[str]:
    """Those of a command, else those of its group that call it."""
    if context.command.epilog or context.parent is None:
        return inspect.cleandoc(context.command.epilog or "").splitlines()
    lines = inspect.cleandoc(context.parent.command.epilog or "").splitlines()
    return [line for line in lines if f"{context.command_path} " in f"{line} "]


class _Wrapper(textwrap.TextWrapper):
    """Breaks between words and after the | of a choice."""

    wordsep_simple_re = re.compile(r"(\s+|(?<=\|)(?=\w))")


def _wrapped(text: str, width: int, first: str = "", other: str | None = None) -> str:
    """The text in lines that are `width` wide at most."""
    indent = first if other is None else other
    return _Wrapper(width, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False).fill(text)
