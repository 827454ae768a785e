"""The store: prompts are found by their tokens, kills leave whole files or none, and it stays within its limits."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import promptkills
import pytest
from promptfiles import IDENTITY, blocks
from promptkills import LIMITS, segment, store_at

import kvcli
from kvcli.errors import CacheFileError
from kvcli.runtime.promptcache.file import PART, PromptCacheFile
from kvcli.runtime.promptcache.found import Found, files_of
from kvcli.runtime.promptcache.store import Limits, PromptStore, entries, prune


def _add(store: PromptStore, tokens: list[int], start: int = 0) -> Path:
    part = segment(store, tokens, start)
    return store.add(part, blocks(part))


def _file(found: Found, number: int) -> Path:
    return found.pieces([(1, number)])[1, number][0].file.path


def _valid(store: PromptStore, tokens: list[int]) -> dict[tuple[int, int], int]:
    found = store.find(tokens)
    found.close()
    return found.valid


def test_a_prompt_is_found_as_far_as_it_agrees(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(100))
    assert _valid(store, tokens) == {}
    _add(store, tokens)
    assert _valid(store, tokens) == {(a, n): 100 for a in (0, 1) for n in range(7)}
    other = [*range(70), *range(500, 540)]
    found = store.find(other)
    assert set(found.valid.values()) == {70} and (found.closest, found.closest_next) == (70, 70)
    found.close()
    assert _valid(store, [7, *tokens]) == {(a, n): 0 for a in (0, 1) for n in range(7)}
    assert _valid(store_at(tmp_path, weights="other"), tokens) == {}


def test_a_longer_prompt_adds_only_its_pages_and_branches_stay_apart(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(100))
    first = _add(store, tokens)
    longer, branch = [*tokens, *range(100, 200)], [*tokens[:90], *range(900, 930)]
    second, third = _add(store, longer, 96), _add(store, branch, 80)
    assert second.stat().st_size < first.stat().st_size + 2 * 5100
    assert _valid(store, longer) == {(a, n): 100 if n < 6 else 200 for a in (0, 1) for n in range(13)}
    found = store.find(branch)
    assert {n: found.valid[1, n] for n in range(8)} == {**dict.fromkeys(range(5), 90), 5: 120, 6: 120, 7: 120}
    assert _file(found, 5) == third
    found.close()


def test_the_same_prompt_is_written_once(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(50))
    path = _add(store, tokens)
    before = path.stat().st_ino
    assert _add(store, tokens) == path and path.stat().st_ino == before
    assert len(list(entries(store.folder))) == 1


def test_a_prompt_that_comes_back_after_its_time_is_stored_again(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(50))
    path = _add(store, tokens)
    os.utime(path, (time.time() - 2 * LIMITS.ttl_s,) * 2)
    assert _valid(store, tokens) == {}
    assert _add(store, tokens) == path and path.exists() and max(_valid(store, tokens).values()) == 50


def test_a_damaged_file_is_removed_and_never_found_again(tmp_path: Path) -> None:
    told: list[str] = []
    store, tokens = store_at(tmp_path, warn=told.append), list(range(50))
    path = _add(store, tokens)
    whole = path.read_bytes()
    for broken in (whole[:100], b"", b"x" * 5000, whole.replace(b'"start":"0"', b'"start":"5"')):
        path.write_bytes(broken)
        assert store.find(tokens).valid == {} and not path.exists()
        assert str(path) in told.pop() and not told
    path.symlink_to(path)
    assert store.find(tokens).valid == {} and not path.is_symlink()
    os.mkfifo(path)
    assert store.find(tokens).valid == {} and not path.exists()
    path.mkdir()
    assert store.find(tokens).valid == {} and path.exists()


def test_a_file_under_the_name_of_another_is_not_taken(tmp_path: Path) -> None:
    """What stands before a segment is judged by the whole hash that it holds, not by its name."""
    store, tokens = store_at(tmp_path), list(range(100))
    wrong = segment(store, [5, *range(1, 100)], 96)
    _add(store, tokens)
    (store.path_of(segment(store, tokens, 96))).write_bytes(store.add(wrong, blocks(wrong)).read_bytes())
    assert _valid(store, tokens)[1, 6] == 100
    found = store.find(tokens)
    assert found.pieces([(1, 6)])[1, 6][0].file.contents.start == 0
    found.close()


def test_folders_are_private_and_marked(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    _add(store, [1, 2, 3])
    assert {p.stat().st_mode & 0o777 for p in (store.root, store.folder)} == {0o700}
    assert (store.root / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")


def test_limits(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    paths = [_add(store, [n] * 40) for n in range(4)]
    for age, path in zip((40, 30, 20, 4000), paths, strict=True):
        os.utime(path, (time.time() - age,) * 2)
    assert max(_valid(store, [3] * 40).values()) == 0, "older than its limit"
    one = paths[0].stat().st_size
    assert [e.path for e in prune(store.root, Limits(2 * one, 3600), dry_run=True)] == [paths[3], paths[0]]
    assert all(p.exists() for p in paths)
    found = store.find([0] * 40)
    store.touch(files_of(found.pieces(found.valid)))
    found.close()
    prune(store.root, Limits(2 * one, 3600))
    assert [p.exists() for p in paths] == [True, False, True, False]
    small = store_at(tmp_path, Limits(100, 3600))
    with pytest.raises(CacheFileError, match=r"takes .* KiB, more than the 100 B of the store"):
        _add(small, [9] * 40)


def _aged(store: PromptStore, tokens: list[int], start: int, age: float) -> Path:
    path = _add(store, tokens, start)
    os.utime(path, (time.time() - age,) * 2)
    return path


def _pruned(store: PromptStore, max_bytes: int, ttl_s: float = 3600) -> list[Path]:
    """What goes, in this order; what would go is the same."""
    limits = Limits(max_bytes, ttl_s)
    would = [entry.path for entry in prune(store.root, limits, dry_run=True)]
    assert [entry.path for entry in prune(store.root, limits)] == would
    return would


def test_ends_of_prompts_go_before_their_beginnings(tmp_path: Path) -> None:
    """Nothing stays that nothing can use, however old what it goes on from is."""
    store, tokens = store_at(tmp_path), list(range(200))
    head = _aged(store, tokens[:100], 0, 40)
    tail = _aged(store, tokens, 96, 30)
    branch = _aged(store, [*tokens[:35], 7], 32, 20)
    end = _aged(store, [*tokens, 5], 192, 10)
    other = _aged(store, [9] * 40, 0, 35)
    total = sum(path.stat().st_size for path in (head, tail, branch, end, other))
    assert _pruned(store, total - 1) == [other], "used before any other end"
    sizes = {path: path.stat().st_size for path in (head, tail, branch, end)}
    assert _pruned(store, sum(sizes.values()) - 1) == [branch]
    assert _pruned(store, sizes[head] + sizes[tail]) == [end]
    assert _pruned(store, sizes[head]) == [tail] and head.exists()
    assert _pruned(store, sizes[head] - 1) == [head]


def test_a_beginning_stays_as_long_as_an_end_is_used(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(100))
    head, tail = _aged(store, tokens[:40], 0, 50), _aged(store, tokens, 32, 20)
    assert _pruned(store, 1 << 30, ttl_s=40) == []
    found = store_at(tmp_path, Limits(1 << 30, 40)).find(tokens)
    assert found.expired == 0 and {_file(found, n) for n in range(7)} == {head, tail}
    found.close()
    assert max(_valid(store_at(tmp_path, Limits(1 << 30, 10)), tokens).values(), default=0) == 0
    assert _pruned(store, 1 << 30, ttl_s=10) == [tail, head]


def test_what_cannot_be_read_goes_like_others(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(100))
    head, tail = _aged(store, tokens[:80], 0, 50), _aged(store, tokens, 64, 20)
    head.write_bytes(b"x" * 5000)
    os.utime(head, (time.time() - 50,) * 2)
    assert _pruned(store, tail.stat().st_size) == [head]


def test_what_has_expired_is_counted_apart(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(50))
    path = _aged(store, tokens, 0, 2 * LIMITS.ttl_s)
    found = store.find([*tokens[:40], 7])
    assert (found.expired, found.closest, found.valid) == (40, 0, {})
    path.write_bytes(b"x")
    os.utime(path, (0, 0))
    assert store.find(tokens).expired == 0


def test_a_folder_in_place_of_a_file_is_left_and_said(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(50))
    path = store.path_of(segment(store, tokens))
    path.mkdir(parents=True)
    with pytest.raises(CacheFileError, match="is a directory, which kv does not remove"):
        _add(store, tokens)
    assert path.is_dir()


def test_a_folder_that_cannot_be_made_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("in the way")
    with pytest.raises(OSError):
        _add(store_at(tmp_path), [1, 2, 3])
    assert _valid(store_at(tmp_path), [1, 2, 3]) == {}


def _verified(root: Path) -> int:
    """Every file of the store is whole; how many there are."""
    count = 0
    for entry in entries(store_at(root).folder):
        with PromptCacheFile(entry.path, IDENTITY) as file:
            for key in file.contents.pages:
                file.read(key, memoryview(bytearray(file.contents.page_bytes[key[0]])))
        count += 1
    return count


@pytest.mark.slow
def test_500_kills_leave_whole_files_or_none(tmp_path: Path) -> None:
    paths = f"{Path(promptkills.__file__).parent}:{Path(kvcli.__file__).parents[1]}"
    command = [sys.executable, promptkills.__file__, paths, str(tmp_path), "500"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 350
    assert sum(_verified(tmp_path / str(n)) for n in range(10)) > 20
    parts = list(tmp_path.glob(f"*/prompts/*/.*{PART}*"))
    assert len(parts) > 50
    for part in parts:
        os.utime(part, (time.time() - 100,) * 2)
    for n in range(10):
        prune(tmp_path / str(n) / "prompts", LIMITS)
    assert list(tmp_path.glob(f"*/prompts/*/.*{PART}*")) == []


def test_what_is_being_written_is_not_cleaned_up(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    part = segment(store, list(range(40)))

    def long_ago(point: str) -> None:
        if point == "written":
            for part in store.folder.glob(f".*{PART}*"):
                os.utime(part, (time.time() - 100,) * 2)
            prune(store.root, LIMITS)

    assert store.add(part, blocks(part), long_ago).exists()


def test_two_writers_of_the_same_prompt(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path), list(range(90))
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for n in range(20):
                    _add(store_at(tmp_path), [n, *tokens])
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    assert _verified(tmp_path) == 20
    assert set(_valid(store, [3, *tokens]).values()) == {91}
    assert [p.name for p in store.folder.iterdir() if PART in p.name] == []
