"""Every JSON object that a command prints is finished here; schema.json says what is in each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcli.cli import oldnames
from kvcli.cli.wording import as_flags

VERSION = 2  # of the names and what they mean: `kv_schema` in every object
FAILURE = "failure"  # the kind of the object that tells an error, of any command
_SCHEMA = Path(__file__).with_name("schema.json")


def finished(kind: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """An object of a kind: a command such as "cache ls", or FAILURE. Its version comes first, old names come last. Its
    error names flags."""
    if told := value.get("error"):
        worded = {name: as_flags(text) if isinstance(text, str) else text for name, text in told.items()}
        value = {**value, "error": worded}
    return {"kv_schema": VERSION, **oldnames.add(kind, value)}


def line(kind: str, value: Mapping[str, Any]) -> str:
    """The object on one line."""
    return json.dumps(finished(kind, value), ensure_ascii=False) + "\n"


def failure(error: Mapping[str, Any], text: str = "") -> str:
    """The line that tells an error; `text`: of an answer that was not printed, as far as it had come."""
    return line(FAILURE, {"error": error, **({"text": text} if text else {})})


def schema() -> str:
    """The JSON Schema of all objects."""
    return _SCHEMA.read_text("utf-8")


def is_json(text: str) -> bool:
    """Whether it is a whole JSON text."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
