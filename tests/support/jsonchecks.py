"""What is printed with --json, held against the schema."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema

from kvcli.cli import jsonobjects, oldnames

SCHEMA: dict[str, Any] = json.loads(jsonobjects.schema())


def nodes(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for each in node.values():
            yield from nodes(each)
    elif isinstance(node, list):
        for each in node:
            yield from nodes(each)


def _closed() -> dict[str, Any]:
    """The schema with nothing beyond what it describes."""
    closed = copy.deepcopy(SCHEMA)
    for node in nodes(closed):
        if isinstance(node.get("properties"), dict) and node.get("type") in ("object", ["object", "null"]):
            node.setdefault("additionalProperties", False)
    return closed


CLOSED = _closed()


def check(kind: str, value: dict[str, Any]) -> None:
    """All of it is described, it has all that is promised, and old names have the values of new ones."""
    name = kind if kind == jsonobjects.FAILURE else f"kv {kind}"
    assert next(iter(value)) == "kv_schema" and value["kv_schema"] == jsonobjects.VERSION
    _validate(name, value, SCHEMA)
    new = copy.deepcopy(value)
    for old, meant in oldnames.OLD_NAMES.get(kind, {}).items():
        if old != "params":  # in which there is an old name, too
            assert _at(value, old) == _at(value, meant), (kind, old)
        _remove(new, old.split("."))
    _validate(name, new, CLOSED)


def _validate(name: str, value: Any, schema: dict[str, Any]) -> None:
    target = {key: each for key, each in schema.items() if key != "anyOf"}
    target["$ref"] = f"#/$defs/{name.replace(' ', '%20')}"
    jsonschema.Draft202012Validator(target).validate(value)


def _at(value: Any, path: str) -> list[Any]:
    """All that is there, in order."""
    found = [value]
    for word in path.split("."):
        name = word.removesuffix("[]")
        found = [each[name] for each in found if isinstance(each, dict) and name in each]
        found = [entry for each in found for entry in each] if word.endswith("[]") else found
    return found


def _remove(value: Any, path: list[str]) -> None:
    name, *rest = path
    if not isinstance(value, dict) or name.removesuffix("[]") not in value:
        return
    if not rest:
        del value[name]
    elif name.endswith("[]"):
        for each in value[name.removesuffix("[]")]:
            _remove(each, rest)
    else:
        _remove(value[name], rest)
