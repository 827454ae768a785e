"""Schemas compiled in a process of their own: as here, refused as here, and ended where they take too long."""

from __future__ import annotations

import json
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcli.errors import UsageError
from kvcli.runtime.text import grammar
from kvcli.runtime.text.schemacompiler import Compiler, main

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


def test_nothing_of_the_working_folder_is_run(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hashlib.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert grammar.json_schema(GOOD)
    assert not (tmp_path / "seen").exists()


def test_a_process_that_ends_is_begun_again_and_nothing_of_it_is_kept(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar.json_schema(GOOD)
    assert compiler._process is not None
    compiler._process.kill()
    assert grammar.json_schema({"type": "integer"})
    compiler._end()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UsageError, match="the process that compiles it ended"):
        grammar.json_schema({"type": "number"})
    monkeypatch.undo()
    monkeypatch.setattr(grammar, "COMPILER", compiler)
    assert grammar.json_schema({"type": "number"})


def test_what_took_too_long_is_tried_again_later(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(select, "select", lambda *_: ([], [], []))  # no answer comes in time
        with pytest.raises(UsageError, match="takes too long"):
            grammar.json_schema(GOOD)
    with pytest.raises(UsageError, match="takes too long"):
        grammar.json_schema(GOOD)
    compiler._late = dict.fromkeys(compiler._late, 0.0)
    assert grammar.json_schema(GOOD)


def test_it_is_ended_while_it_is_at_work() -> None:
    busy = Compiler(60.0)
    busy("json_schema", GOOD, "x", False)
    with ThreadPoolExecutor() as pool:
        found = pool.submit(busy, "json_schema", SLOW, "x", False)
        time.sleep(0.1)
        busy.close()
        with pytest.raises(UsageError, match="ended"):
            found.result(5)


def test_the_process_ends_by_itself_where_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server may have been killed, and native code does not see that."""
    alarms: list[int] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(signal, "alarm", alarms.append)
    monkeypatch.setattr(sys, "stdin", [json.dumps(["json_schema", GOOD, "x", False]), json.dumps(["json_schema", "{"])])
    main()
    assert alarms == [7, 0] * 2
