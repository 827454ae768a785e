"""Schemas compiled in a process of their own: as here, refused as here, and ended where they take too long."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvcli.errors import UsageError
from kvcli.runtime.text import grammar
from kvcli.runtime.text.compiling import Compiler

SLOW = {"allOf": [{"type": "string", "pattern": f".{{{number}}}"} for number in range(50)]}
GOOD = {"type": "object", "properties": {"größe": {"type": "integer"}}}


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found = Compiler(1.0)
    monkeypatch.setattr(grammar, "COMPILER", found)
    yield found
    found.close()


def test_what_it_makes_is_what_is_made_here(compiler: Compiler) -> None:
    for schema in (GOOD, '{"type": "string"}', b'{"enum": ["\xc3\xa9"]}'):
        here = grammar.compiled("json_schema", schema.decode() if isinstance(schema, bytes) else schema, "x", False)
        assert grammar.json_schema(schema, "x") == here
        assert compiler("source", here) == here
    with pytest.raises(UsageError, match=r"`x` cannot be followed at \$.properties.a: Invalid type: odd"):
        grammar.json_schema({"properties": {"a": {"type": "odd"}}}, "`x`")


def test_what_takes_too_long_is_ended_and_others_are_not(compiler: Compiler) -> None:
    grammar.json_schema(GOOD)
    began = time.monotonic()
    with pytest.raises(UsageError, match="`y` cannot be followed: compiling it takes too long"):
        grammar.json_schema(SLOW, "`y`")
    assert time.monotonic() - began < 20
    with pytest.raises(UsageError, match="takes too long"):  # which is known now
        grammar.json_schema(SLOW, "`y`")
    assert compiler._process is None
    assert grammar.json_schema(GOOD)


def test_a_schema_that_is_nested_too_deeply(compiler: Compiler) -> None:
    deep: dict[str, object] = {"type": "integer"}
    for _ in range(300):
        deep = {"type": "array", "items": deep}
    try:
        grammar.json_schema(deep)
    except UsageError as error:
        assert "cannot be followed" in error.message
    assert grammar.json_schema(GOOD)
