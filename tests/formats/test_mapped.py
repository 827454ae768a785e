"""Files that are truncated while they are mapped: what is gone reads as zeros, and is said to be gone."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny
from conftest import PACKAGE_ROOT, KvHere
from engines import PROMPT

from kvcli.errors import ModelError
from kvcli.options import CacheOptions, LoadOptions
from kvcli.runtime.engine.engine import Engine
from kvcli.runtime.formats import mapped
from kvcli.runtime.formats.localfile import LocalFile

SIZE = 100_000
FILES = 2048  # as in mapped.c
TRUNCATED = "was truncated while kv was using it"


def need_library() -> None:
    """Skip where it could not be compiled; with a compiler at hand its absence is a failure."""
    if mapped._library() is None:
        assert not shutil.which(os.environ.get("CC", "cc")), "kvcli.runtime.formats._mapped was not compiled"
        pytest.skip("mapped.c was not compiled")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "file"
    found.write_bytes(b"x" * SIZE)
    return found


@pytest.mark.parametrize("left", (0, 1, 4096, SIZE - 1))
def test_what_is_gone_is_zeros_and_the_rest_is_not(path: Path, left: int) -> None:
    need_library()
    other = path.with_name("other")
    other.write_bytes(b"y" * SIZE)
    file, whole = LocalFile(path), LocalFile(other)
    file.check()
    os.truncate(path, left)
    found = bytes(file.buffer)
    assert found == b"x" * left + bytes(SIZE - left)
    assert bytes(whole.buffer) == b"y" * SIZE
    whole.check()
    with pytest.raises(ModelError) as caught:
        file.check()
    assert caught.value.message == f"{path} {TRUNCATED}" and caught.value.exit_code == 3 and caught.value.hint


def test_a_file_that_was_written_anew_is_not_the_same(path: Path) -> None:
    need_library()
    file = LocalFile(path)
    os.truncate(path, 0)
    assert file.buffer[0] == 0
    path.write_bytes(b"x" * SIZE)
    with pytest.raises(ModelError, match=TRUNCATED):
        file.check()
    LocalFile(path).check()


def test_files_that_are_no_longer_mapped_are_forgotten(path: Path) -> None:
    """There is room for so many at a time; one for which there is none would end this process."""
    need_library()
    for _ in range(FILES + 1):
        LocalFile(path)
    file = LocalFile(path)
    os.truncate(path, 0)
    assert file.buffer[0] == 0


def test_without_the_library_the_size_tells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "_library", lambda: None)
    file = LocalFile(path)
    file.check()
    os.truncate(path, SIZE - 1)
    with pytest.raises(ModelError, match=TRUNCATED):
        file.check()


def test_more_files_than_there_is_room_for_are_judged_by_their_size(path: Path) -> None:
    need_library()
    kept = [LocalFile(path) for _ in range(FILES + 1)]
    os.truncate(path, SIZE - 1)
    with pytest.raises(ModelError, match=TRUNCATED):
        kept[-1].check()


def test_files_may_be_mapped_by_many_threads(path: Path) -> None:
    """Each gets a flag of its own, which is its own until it is let go of."""
    need_library()
    library = mapped._library()
    assert library is not None

    def watch(first: int) -> list[int]:
        flags = [library.kv_watch(1 << 40 | n, 1) for n in range(first, first + 200)]
        found = [ctypes.addressof(flag.contents) for flag in flags]
        for flag in flags:
            library.kv_forget(flag)
        return found

    with ThreadPoolExecutor(4) as threads:
        for each in threads.map(watch, range(0, 8000, 200)):
            assert len(set(each)) == 200


@pytest.mark.parametrize("bus_error", ("other[5000]", f"os.kill(os.getpid(), {signal.SIGBUS:d})"))
def test_a_bus_error_elsewhere_is_still_one(path: Path, bus_error: str) -> None:
    code = f"""
import mmap, os, sys
sys.path.insert(0, {str(PACKAGE_ROOT)!r})
from pathlib import Path
from typing import Any
from kvcli.runtime.formats.localfile import LocalFile
file = LocalFile(Path({str(path)!r}))
with open({str(path)!r}, "rb") as opened:
    other = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
os.truncate({str(path)!r}, 0)
{bus_error}
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGBUS


@pytest.mark.slow
@pytest.mark.parametrize("backend", ("native", "reference"))
def test_an_engine_computes_nothing_from_a_truncated_file(backend: str, tmp_path: Path) -> None:
    need_library()
    model = tmp_path / "model.gguf"
    shutil.copy(tiny.make("llama").path, model)
    engine = Engine.open(model, LoadOptions("model", 2, backend), CacheOptions())
    seq = engine.new_sequence()
    engine.forward(seq, PROMPT[:9])
    os.truncate(model, 4096)
    for _ in range(2):
        with pytest.raises(ModelError, match=TRUNCATED):
            engine.forward(seq, PROMPT[9:12])
        assert seq.length == 9
    engine.pool.check(seq.holds())


def test_a_run_ends_with_what_it_has(tmp_path: Path, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> None:
    need_library()
    model, answer, forward, rows = tmp_path / "model.gguf", tmp_path / "answer", Engine.forward_all, []

    def truncating(engine: Engine, parts: list[tuple[Any, list[int], bool]]) -> object:
        rows.extend(len(ids) for _, ids, _ in parts)
        if len(rows) == 6:
            os.truncate(model, 0)
        return forward(engine, parts)

    monkeypatch.setattr(Engine, "forward_all", truncating)
    words = ("run", "-m", str(model), "--raw", "--no-stdin", "--ignore-eos", "--seed", "1", "-n", "50", "hello")
    for more in ([], ["--json"], ["-o", str(answer)]):
        rows.clear()
        shutil.copy(tiny.make("llama").path, model)
        code, out, err = kv_here(*words, *more)
        assert code == 3 and len(rows) == 6
        if more == ["--json"]:
            assert TRUNCATED in json.loads(out)["error"]["message"]
        else:
            assert f"kv: error: {model} {TRUNCATED}" in err and out
    assert answer.read_text() == out
