"""kill -9 and a full disk while the record of worth, pins, marks and converted rows are at work."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from engines import PROMPT
from promptfiles import blocks
from promptkills import segment, store_at
from reusecases import NOWHERE, Told, ask, engine_of, files_in, store_in

from kvcli import paths
from kvcli.runtime.promptcache import file as files
from kvcli.runtime.promptcache import held, store, worth
from kvcli.runtime.promptcache.marks import SYSTEM, USER, Mark
from kvcli.runtime.promptcache.store import entries, is_pinned, pin, prune, remove

LINES = tuple(module.__file__ for module in (worth, store, files, paths))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _killed_at(line: int, work: Callable[[], object]) -> bool:
    """Do this in a child that is killed before so many lines of what writes files were run; whether it was."""
    child = os.fork()
    if child == 0:
        left = iter(range(line))

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_code.co_filename not in LINES:
                return None
            if event == "line" and next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        try:
            sys.settrace(trace)
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def _at_any_line(step: int, work: Callable[[], object], check: Callable[[bool], None]) -> None:
    """`check` is told after every try whether it was killed; the last one was not."""
    line, killed = 0, True
    while killed:
        killed = _killed_at(line, work)
        check(killed)
        line += step
    assert line > 3 * step


def test_a_killed_record_is_the_old_or_the_new_one(tmp_path: Path) -> None:
    def counted(record: worth.Worth) -> None:
        record.model("m").lookups += 1

    worth.change(tmp_path, counted)
    seen = {1}

    def check(killed: bool) -> None:
        now = worth.read(tmp_path).models["m"].lookups
        assert now - max(seen) in ((0, 1) if killed else (1,))
        seen.add(now)

    _at_any_line(5, lambda: worth.change(tmp_path, counted), check)
    assert worth.change(tmp_path, counted), "no lock is left"
    assert {path.name for path in tmp_path.iterdir()} == {worth.NAME, worth.LOCK}


def test_a_kill_leaves_no_pin_alone(tmp_path: Path) -> None:
    """Pinning and removing at once; what is left is put right by the next prune."""
    root = store_at(tmp_path)

    def path_of_new() -> Path:
        part = segment(root, list(range(40)))
        return root.add(part, blocks(part))

    path = path_of_new()

    def work() -> None:
        pin(path, True)
        remove(path)

    def check(killed: bool) -> None:
        prune(root.root, root.limits)
        assert path.exists() or not is_pinned(path)
        assert killed or not path.exists()
        pin(path_of_new(), False)

    _at_any_line(1, work, check)


def test_pins_of_files_that_are_gone_are_removed(tmp_path: Path) -> None:
    root = store_at(tmp_path)
    part = segment(root, list(range(40)))
    path = root.add(part, blocks(part))
    pin(path, True)
    path.unlink()
    assert is_pinned(path)
    prune(root.root, root.limits, dry_run=True)
    assert is_pinned(path), "a dry run changes nothing"
    prune(root.root, root.limits)
    assert not is_pinned(path) and list(entries(root.folder)) == []


def test_a_damaged_file_goes_with_its_pin(tmp_path: Path) -> None:
    engine = engine_of("llama")
    ask(engine, PROMPT, store_in(tmp_path))
    (path,) = files_in(tmp_path)
    pin(path, True)
    path.write_bytes(path.read_bytes()[:100])
    assert ask(engine, PROMPT, store_in(tmp_path)).usage.disk_tokens == 0
    assert not any(is_pinned(each) for each in (path, *files_in(tmp_path)))


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_keeps_no_marks_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "REWIND_ROWS", 0)
    engine, told, marks = engine_of("gemma3"), Told(), [Mark(70, SYSTEM), Mark(90, USER, "here")]
    cold = ask(engine, PROMPT, NOWHERE).ids
    with monkeypatch.context() as patch:
        patch.setattr(store, "write", _full)
        found = ask(engine, PROMPT, store_in(tmp_path, awaited=True), told, marks)
    assert found.ids == cold and found.usage.cache_write_tokens == 0
    assert not any(point.kept for point in found.usage.breakpoints)
    assert any("No space left" in line for line in told.lines) and any("'here'" in line for line in told.lines)
    assert files_in(tmp_path) == []
    again = ask(engine, PROMPT, store_in(tmp_path, awaited=True), marks=marks)
    assert again.ids == cold and all(point.kept for point in again.usage.breakpoints)


def test_a_full_disk_costs_a_record_and_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted rows are recorded, too; what could not be is with the next look-up of the process only."""
    wide, engine = engine_of("llama"), engine_of("llama", "int8")
    ask(wide, PROMPT, store_in(tmp_path))
    before = worth.read(tmp_path / "prompts")
    with monkeypatch.context() as patch:
        patch.setattr(paths, "replace_file", _full)
        found = ask(engine, [*PROMPT, 7], store_in(tmp_path))
        assert found.usage.cache_how == "converted from f16"
    assert worth.read(tmp_path / "prompts") == before
    assert len(files_in(tmp_path)) == 1
