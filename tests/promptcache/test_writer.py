"""`CacheWriter`: files in their order, whoever waits for them."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

from kvcli.runtime.promptcache.writer import CacheWriter

POOL = SimpleNamespace(device=SimpleNamespace(type="cpu"))


def _nothing() -> Any:
    """Contents without pages, or what holds these."""
    return cast(Any, SimpleNamespace(pages=[], payload_bytes=1, pool=POOL, close=lambda: None))


def test_what_was_handed_over_is_written_while_nothing_is_called() -> None:
    """The thread that computes may be in a step that takes long."""
    writer, gate, written = CacheWriter(print), threading.Event(), threading.Event()
    jobs = [
        writer.start(_nothing(), _nothing(), lambda *_: gate.wait(60), "first"),
        writer.start(_nothing(), _nothing(), lambda *_: written.set(), "second"),
    ]
    assert writer.waiting_bytes == 2 and not written.wait(0.01)
    gate.set()
    assert written.wait(60)
    writer.finish(60.0, print)
    assert [job.problem for job in jobs] == ["", ""] and writer.waiting_bytes == 0
    writer.start(_nothing(), _nothing(), lambda *_: written.clear(), "third")  # its thread may have ended
    writer.finish(60.0, print)
    assert not written.is_set()
