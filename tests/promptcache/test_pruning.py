"""What leaves the store first: what is worth least, never what is pinned."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path

import pytest
from promptfiles import blocks
from promptkills import segment, store_at

from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.store import (
    Entry,
    Limits,
    PromptStore,
    _ends_first,
    entries,
    is_pinned,
    pin,
    prune,
    remove,
)
from kvcli.runtime.promptcache.worth import FileWorth, Worth, key_of

TRACE = Path(__file__).parent.parent / "data" / "cache_trace.csv"
LONG = Limits(1 << 30, 1e6)


def _add(store: PromptStore, tokens: list[int], start: int = 0, age: float = 0) -> Path:
    part = segment(store, tokens, start)
    path = store.add(part, blocks(part))
    os.utime(path, (time.time() - age,) * 2)
    return path


def _gone(store: PromptStore, max_bytes: int) -> list[Path]:
    return [entry.path for entry in prune(store.root, Limits(max_bytes, LONG.ttl_s), dry_run=True)]


def test_what_takes_long_to_compute_stays(tmp_path: Path) -> None:
    store = store_at(tmp_path, LONG)
    old, new, middle = (_add(store, [n] * 40, age=age) for n, age in ((1, 4000), (2, 10), (3, 3000)))
    assert _gone(store, 1) == [old, middle, new], "nothing is known: the one used longest ago first"

    def know(record: Worth) -> None:
        record.files[key_of(old)] = FileWorth(cost_s=90.0)
        record.files[key_of(new)] = FileWorth(cost_s=1.0)
        record.files[key_of(middle)] = FileWorth(cost_s=1.0)

    worth.change(store.root, know)
    assert _gone(store, 1) == [middle, new, old]
    assert _gone(store, 2 * old.stat().st_size) == [middle]


def test_a_file_of_unknown_cost_counts_as_a_mean_one(tmp_path: Path) -> None:
    record = Worth(files={"a": FileWorth(cost_s=8.0), "b": FileWorth(cost_s=2.0)})
    files = [(Path(f"x-x-{name}.safetensors"), 100) for name in "abc"]
    value = worth.ranking(record, files, 0.0)
    a, b, c = (value(path, size, 0.0) for path, size in files)
    assert a > c > b and c == pytest.approx((a + b) / 2)


def test_empty_files_have_a_worth() -> None:
    """Such as a crash leaves."""
    path = Path("x-x-a.safetensors")
    value = worth.ranking(Worth(files={"a": FileWorth(cost_s=8.0)}), [(path, 0)], 0.0)
    assert value(path, 0, 0.0) > 0


def test_pinned_files_and_what_they_go_on_from_stay(tmp_path: Path) -> None:
    store, tokens = store_at(tmp_path, LONG), list(range(100))
    head, tail = _add(store, tokens[:40], age=5000), _add(store, tokens, 32, 5000)
    other = _add(store, [9] * 40, age=10)
    assert pin(tail, True) and not pin(tail, True) and is_pinned(tail)
    assert [entry.pinned for entry in entries(store.folder) if entry.path == tail] == [True]
    assert _gone(store, 1) == [other]
    assert prune(store.root, Limits(1 << 30, 1.0)) != [] and head.exists() and tail.exists() and not other.exists()
    found = store_at(tmp_path, Limits(1 << 30, 1.0)).find(tokens)
    assert found.closest == 100, "a pinned prompt does not expire"
    found.close()
    longer = [*tokens, *range(100, 200)]
    part = segment(store, longer, 96)
    store.add(part, blocks(part), replaced=[tail])
    assert tail.exists(), "a chat goes on, and its pinned file stays"
    assert pin(tail, False) and not pin(tail, False) and not is_pinned(tail)
    pin(head, True)
    remove(head)
    assert not head.exists() and not is_pinned(head)
    prune(store.root, LONG)


@pytest.mark.parametrize("room", [0.1, 0.2, 0.4])
def test_a_recorded_trace(room: float) -> None:
    """Prompts that two models computed, with their sizes and seconds (benchmarks/cache_trace.py): of a store with room
    for a part of them all, the rule saves more seconds than removing what was used longest ago."""
    rows = [
        (float(r["at_s"]), r["prompt"], int(r["bytes"]), float(r["compute_s"])) for r in csv.DictReader(TRACE.open())
    ]
    capacity = int(room * sum({prompt: size for _, prompt, size, _ in rows}.values()))
    assert _saved(rows, capacity, by_worth=True) > 1.03 * _saved(rows, capacity, by_worth=False)


def _saved(rows: list[tuple[float, str, int, float]], capacity: int, by_worth: bool) -> float:
    """The seconds that a store of `capacity` bytes saves."""
    record, kept, saved = Worth(), dict[str, Entry](), 0.0
    for at, prompt, size, seconds in rows:
        path = Path(f"folder/x-x-{prompt}.safetensors")
        record.file(key_of(path)).cost_s = seconds
        saved += seconds if prompt in kept else 0.0
        kept[prompt] = Entry(path, "folder", prompt, size, at)
        excess = sum(entry.size for entry in kept.values()) - capacity
        value = worth.ranking(record, [(entry.path, entry.size) for entry in kept.values()], at)
        of_worth = {entry: value(entry.path, entry.size, entry.used_at) for entry in kept.values()}
        for entry in _ends_first(list(kept.values()), of_worth.__getitem__ if by_worth else lambda e: e.used_at):
            if excess <= 0:
                break
            excess -= entry.size
            del kept[entry.first]
    return saved
