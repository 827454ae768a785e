"""What is to be known of a JSON schema to write its values in other forms than JSON. No torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]
ANY: Schema = {}
_DEPTH = 16  # of references to references


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that local references lead to; one that leads nowhere allows anything."""
    for _ in range(_DEPTH):
        if not (name := reference(schema)):
            break
        schema = resolved_once(name, root)
    return schema if isinstance(schema, Mapping) else ANY


def resolved_once(name: str, root: Schema) -> Any:
    """What a reference leads to, which may be another one."""
    found: Any = root
    for key in name.removeprefix("#").split("/")[1:]:
        found = found.get(key.replace("~1", "/").replace("~0", "~"), ANY) if isinstance(found, Mapping) else ANY
    return found


def alone(schema: Any, root: Schema) -> dict[str, Any]:
    """A part of `root` as a schema of its own, in which references lead to what they led to."""
    own = schema if isinstance(schema, Mapping) else ANY
    shared = {key: root[key] for key in _SHARED if key in root}
    if not any(_leaves(name) for name in _references([own, shared])):
        return {**shared, **own}
    whole = {key: value for key, value in root.items() if key not in _SHARED}
    found = _moved({**shared, **own})
    return {**found, "$defs": {**found.get("$defs", {}), _ROOT: _moved(whole)}}


_SHARED, _ROOT = ("$defs", "definitions"), "$root"


def _leaves(name: str) -> bool:
    """Whether a reference leads to what a part does not take along."""
    return name == "#" or (name.startswith("#/") and name.split("/")[1] not in _SHARED)


def _references(value: Any) -> Iterator[str]:
    """All that are in a schema, or look so."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if name := reference(value):
            yield name
        waiting += value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()


def _moved(value: Any) -> Any:
    """The schema with references to the root leading to where that is in a part."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _moved(each) for key, each in value.items()}
    name = reference(value)
    return {**found, "$ref": f"#/$defs/{_ROOT}{name[1:]}"} if _leaves(name) else found


def endless(root: Schema) -> str:
    """A reference that leads to itself without end, so that nothing finite is of that schema; "" = there is none."""
    names, ends = {*_references(root)}, set[str]()
    while more := {name for name in names - ends if _ends(resolved_once(name, root), ends)}:
        ends |= more
    return min(names - ends, default="")


def _ends(schema: Any, ends: Collection[str]) -> bool:
    """Whether something finite is of a schema, where that is so of the references in `ends`."""
    if not isinstance(schema, Mapping):
        return True
    if name := reference(schema):
        return name in ends
    for key, over in (("anyOf", any), ("oneOf", any), ("allOf", all)):
        if isinstance(parts := schema.get(key), list) and parts and not over(_ends(part, ends) for part in parts):
            return False
    if choices(schema) is not None or kinds(schema, schema) - {"object", "array"}:
        return True
    said, must = schema.get("properties"), schema.get("required")
    if isinstance(said, Mapping) and isinstance(must, list):
        return all(_ends(said[key], ends) for key in must if isinstance(key, str) and key in said)
    return not schema.get("minItems") or _ends(schema.get("items"), ends)


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
        elif _is_object(found):
            types |= {"object"}
        elif several := [found[key] for key in ("anyOf", "oneOf") if isinstance(found.get(key), list) and found[key]]:
            waiting += several[0]
        else:
            return _ALL
    return frozenset(types) or _ALL


_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_SAID = frozenset({"type", "enum", "const", "$ref", "anyOf", "oneOf"})


def _is_object(schema: Schema) -> bool:
    """Whether it says no type, but what its objects hold: to JSON Schema values of other types are of it, too."""
    return bool(_OBJECTS & set(schema)) and not _SAID & set(schema)


_ONE, _LISTS = ("items", "additionalProperties"), ("items", "prefixItems", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", *_SHARED)


def meant(schema: Any) -> Any:
    """The schema with `"type": "object"` wherever one names properties, or which are required or allowed, and says no
    type. Values that it only lists (`enum`, `const`, `default`) stay as they are."""
    if not isinstance(schema, Mapping):
        return schema
    found = {"type": "object", **schema} if _is_object(schema) else dict(schema)
    for key, value in found.items():
        if key in _NAMED and isinstance(value, Mapping):
            found[key] = {name: meant(each) for name, each in value.items()}
        elif key in _LISTS and isinstance(value, list):
            found[key] = [meant(each) for each in value]
        elif key in _ONE:
            found[key] = meant(value)
    return found


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
