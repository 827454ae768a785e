"""Changes one value, or removes a table, in the text of a config file and leaves the rest as it is, comments too."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any


def changed(text: str, words: Sequence[str], value: Any) -> str:
    """The text with a value (None = without one) for the key that these words name, tables first: bench, repetitions.

    It is one line of its own: who needs it to be right compares what both texts hold.
    """
    *table, key = words
    lines = text.splitlines()
    start, end = _table(lines, table)
    found = next((i for i in range(start, end) if _key(lines[i]) == _key(f"{key} =")), None)
    new = [] if value is None else [f"{key} = {toml(value)}"]
    if found is not None:
        lines[found : found + 1] = new
    elif new:
        if start > len(lines):  # a table that is not there yet
            new = ["", f"[{'.'.join(table)}]", *new] if lines else [f"[{'.'.join(table)}]", *new]
        while 0 < end <= len(lines) and not lines[end - 1].strip():
            end -= 1
        lines[end:end] = new
    return "".join(f"{line}\n" for line in lines)


def without_table(text: str, words: Sequence[str]) -> str:
    """The text without the table that these words name, and those in it. Who needs it to be right compares what both
    texts hold."""
    lines, name = text.splitlines(), ".".join(words)
    kept, inside = list[str](), False
    for line in lines:
        if _is_heading(line):
            inside = f"{_name(line).replace('_', '-')}.".startswith(f"{name}.")
        if not inside:
            kept.append(line)
    return "".join(f"{line}\n" for line in kept)


def _is_heading(line: str) -> bool:
    return line.lstrip().startswith("[") and "=" not in line.partition("#")[0]


def _table(lines: list[str], words: Sequence[str]) -> tuple[int, int]:
    """The lines of a table, [start, end), less its heading; behind the last line for one that is not there."""
    headings = [i for i, line in enumerate(lines) if _is_heading(line)]
    start = 0
    if words:
        named = (i for i in headings if _name(lines[i]) == ".".join(words))
        start = next(named, len(lines)) + 1
    return start, min((i for i in headings if i >= start), default=len(lines))


def _name(heading: str) -> str:
    return re.sub(r"[\s\"']", "", heading.partition("#")[0]).strip("[]")


def _key(line: str) -> str:
    """The key of a line, as option names are written: ctx-size; "" where there is none."""
    match = re.match(r"\s*[\"']?([\w-]+)[\"']?\s*=", line)
    return match[1].replace("_", "-") if match else ""


def toml(value: Any) -> str:
    """Strings as JSON writes them are strings of TOML, too."""
    return json.dumps(value, ensure_ascii=False)
