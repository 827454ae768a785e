"""Hostile calls of `benchmarks/abuse.py`, a few of each kind: all are answered or ended, and nobody else notices."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chattemplates import TEMPLATES
from serving import open_engine, running

from kvcli.runtime.text import grammar
from kvcli.runtime.text.schemacompiler import Compiler
from kvcli.serve import app, server

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


def test_hostile_calls_are_answered_and_nobody_else_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import abuse

    compiler = Compiler(0.5)
    monkeypatch.setattr(grammar, "COMPILER", compiler)
    monkeypatch.setattr(app, "BODY_S", 0.5)
    monkeypatch.setattr(server, "HEADERS_S", 0.5)
    try:
        with running(open_engine(template=TEMPLATES["qwen3"])) as found:
            monkeypatch.setattr(abuse, "KINDS", [each for each in abuse.KINDS if each[0] is not abuse.schema])
            findings, statuses, _, bystander = abuse.storm(found.address, 40, 7, 8)
            assert findings == [] and {200, 400} <= set(statuses) and bystander.times
            assert found.get("/health").status_code == 200
    finally:
        compiler.close()


def test_values_of_wrong_types_at_every_key(server: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number in every place of every body: an answer or an error in the words of its interface."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import abuse

    draw = random.Random(1)
    url = server.url  # type: ignore[attr-defined]
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    for path, body in abuse.BODIES.items():
        for place in abuse.places(body):
            value = draw.choice([7, "x", [], {}, [[3]], True])
            data = abuse.json.dumps(abuse.put(body, place, value)).encode()
            status, _, wrong = abuse.attempt(address, abuse.call(path, data, f"{path} {place} {value!r}"))
            assert not wrong and status in (200, 400, 404, 429), (path, place, value, status, wrong)
