"""What is to be known of a JSON schema to write its values in other forms than JSON. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
ANY: Schema = {}
_DEPTH = 16  # of references to references


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that local references lead to; one that leads nowhere allows anything."""
    for _ in range(_DEPTH):
        if not (name := reference(schema)):
            break
        path, found = name.removeprefix("#").split("/"), root
        for name in path[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~"), ANY) if isinstance(found, Mapping) else ANY
        schema = found
    return schema if isinstance(schema, Mapping) else ANY


def alone(schema: Any, root: Schema) -> dict[str, Any]:
    """A part of `root` as a schema of its own."""
    shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**shared, **schema} if isinstance(schema, Mapping) else dict(shared)


_ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def kinds(schema: Any, root: Schema) -> frozenset[str]:
    """The types that its values may have; all of them where it says nothing. Each reference is followed once."""
    types, waiting, seen = set[str](), [schema], set[str]()
    while waiting:
        schema = waiting.pop()
        if (name := reference(schema)) in seen:
            continue
        seen |= {name} - {""}
        found = resolved(schema, root)
        said = found.get("type")
        if isinstance(said, (str, list)):
            types |= {said} if isinstance(said, str) else set(map(str, said))
        elif isinstance(values := choices(found), list):
            types |= set(map(_kind, values))
        elif several := [found[key] for key in ("anyOf", "oneOf") if isinstance(found.get(key), list) and found[key]]:
            waiting += several[0]
        else:
            return _ALL
    return frozenset(types) or _ALL


def reference(schema: Any) -> str:
    """What it leads to; "" = it stands for itself."""
    name = schema.get("$ref") if isinstance(schema, Mapping) else None
    return name if isinstance(name, str) else ""


def choices(schema: Schema) -> list[Any] | None:
    """The values of which it allows one; None = it does not list them."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _kind(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def properties(schema: Schema, root: Schema) -> dict[str, Schema] | None:
    """The properties that its objects may have and no others; None = any."""
    found = resolved(schema, root)
    listed, more = found.get("properties"), found.get("additionalProperties", False)
    if not isinstance(listed, Mapping) or more not in (False, None):
        return None
    return {str(key): value if isinstance(value, Mapping) else ANY for key, value in listed.items()}


_PLAIN = frozenset({"type", "properties", "required", "title", "description", "$schema", "$defs", "definitions"})


def closed(schema: Schema) -> Schema:
    """The schema of an object without other properties than those it lists, where it says nothing of others."""
    return {**schema, "additionalProperties": False} if "properties" in schema and set(schema) <= _PLAIN else schema


def required(schema: Schema, root: Schema) -> set[str]:
    found = resolved(schema, root).get("required")
    return set(map(str, found)) if isinstance(found, list) else set()


def value_of(text: str, allowed: frozenset[str]) -> Any:
    """The value that a text without quotes stands for: JSON where that is allowed, else the text itself."""
    if allowed == {"string"}:
        return text
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return text
    fits = _kind(value) in allowed or (_kind(value) == "integer" and "number" in allowed)
    return value if fits or "string" not in allowed else text


def loads(text: str) -> Any:
    """The value of a JSON text. A number that no float can have, such as 1e999, is the largest one, since JSON has no
    infinity; what only Python takes for a number stays a text. Raises ValueError, RecursionError."""
    return json.loads(text, parse_float=_number, parse_constant=str)


def _number(text: str) -> float:
    return min(max(float(text), -sys.float_info.max), sys.float_info.max)


def dumped(value: Any) -> str:
    """JSON as grammars and templates write it. Raises ValueError for a number that it cannot have."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
