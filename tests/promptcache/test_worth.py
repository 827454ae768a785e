"""The record of what prompt caches were worth: what is learned, who may write it, and how large it gets."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcli.runtime.plan import overheads
from kvcli.runtime.plan.overheads import Overheads
from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.lookuprecord import Choice, Lookups, Reading, link_to
from kvcli.runtime.promptcache.prefillspeed import PrefillSpeed
from kvcli.runtime.promptcache.worth import Uses, Worth

IDENTITY = {"weights": "abc", "cache_type_k": "f16", "cache_type_v": "int8", "computed_on": "cpu native"}
FILE = Path("a-b-c0ffee.safetensors")


def lookups(root: Path, **more: str) -> Lookups:
    return Lookups(root, IDENTITY | more, "A model")


@given(a=st.floats(1e-5, 1e-1), b=st.floats(0, 1e-6), starts=st.lists(st.integers(0, 9000), min_size=3, max_size=6))
def test_seconds_of_a_prompt_are_learned(a: float, b: float, starts: list[int]) -> None:
    """Rows cost the same, and what they look back on: prompts that look back differently far tell the two apart."""
    middles = [start + (64 + 700 * at) / 2 for at, start in enumerate(starts)]
    assume(max(middles) > 1.2 * min(middles))

    def truth(start: int, end: int) -> float:
        return a * (end - start) + b * sum(range(start, end))

    speed = PrefillSpeed()
    assert speed.seconds(0, 100) is None
    for at, start in enumerate(starts):
        speed.learn(start, start + 64 + 700 * at, truth(start, start + 64 + 700 * at))
    for start, end in ((0, 64), (0, 3000), (4000, 4001)):
        assert speed.seconds(start, end) == pytest.approx(truth(start, end), rel=0.02)
    assert PrefillSpeed.of(json.loads(json.dumps(speed.as_object()))) == speed


def test_one_length_and_odd_times() -> None:
    speed = PrefillSpeed()
    speed.learn(0, 63, 1.0)  # too short
    speed.learn(0, 100, 0.0)
    assert speed.seconds(0, 100) is None
    for _ in range(3):
        speed.learn(0, 100, 2.0)
    assert speed.seconds(0, 200) == pytest.approx(4.0)
    speed.learn(5000, 5100, 0.5)  # faster behind many rows: no reason to take time back
    assert min(filter(None, [speed.seconds(0, 64), speed.seconds(9000, 9064)])) > 0
    for nonsense in ({"rows2": -1.0}, {"rows": float("nan")}, {"what": 1.0}):
        with pytest.raises((ValueError, TypeError)):
            PrefillSpeed.of(nonsense)


def test_what_is_recorded(tmp_path: Path) -> None:
    ours = lookups(tmp_path)
    ours.looked_up(1000, 0, None, 10.0)
    ours.stored(FILE, 0, 1000)
    ours.looked_up(1000, 400, None, None)  # from memory
    ours.looked_up(1200, 1000, Reading(1000, 5_000_000, 0.5, {FILE: (0, 1000)}), 2.0)
    assert worth.read(tmp_path).models == {} and ours.flush() and ours.flush()
    found = worth.read(tmp_path)
    (model,) = found.models.values()
    assert (model.title, model.settings) == ("A model", "f16/int8 on cpu native")
    assert (model.lookups, model.prompt_tokens, model.memory_tokens) == (3, 3200, 400)
    assert (model.disk.hits, model.disk.tokens) == (1, 1000) and model.disk.saved_s == pytest.approx(9.5, rel=0.05)
    file = found.files["c0ffee"]
    assert file.uses == model.disk and file.cost_s == pytest.approx(10.0)
    assert oct((tmp_path / worth.NAME).stat().st_mode & 0o777) == "0o600"
    assert lookups(tmp_path, weights="other").predict(0, 9, 9) is None
    assert worth.change(tmp_path, worth.begin_anew)
    again = worth.read(tmp_path)
    assert again.since >= found.since and [m.lookups for m in again.models.values()] == [0]
    assert again.files["c0ffee"].uses == Uses() and again.files["c0ffee"].cost_s == file.cost_s


def test_a_file_takes_over_from_those_it_replaces(tmp_path: Path) -> None:
    ours, new = lookups(tmp_path), Path("a-b-beef.safetensors")
    ours.looked_up(500, 300, Reading(300, 9, 0.0, {FILE: (0, 300)}), 1.0)
    ours.stored(new, 0, 500, (FILE,))
    assert ours.flush()
    found = worth.read(tmp_path).files
    assert list(found) == ["beef"] and found["beef"].uses.tokens == 300


def test_reading_or_computing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what was read before, and by the disk and the link that kv doctor measured as long as that is little."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ours = lookups(tmp_path)
    ours.looked_up(1000, 0, None, 10.0)
    ours.flush()
    assert ours.predict(0, 500, 1 << 30) is None  # nothing is known of the disk
    overheads.store("disk", Overheads(bandwidth=0.5))
    assert ours.predict(0, 500, 10**9) == Choice(pytest.approx(2.0), pytest.approx(5.0))
    overheads.store(link_to("a card"), Overheads(bandwidth=0.5))
    on_card = Lookups(tmp_path, IDENTITY, "A model", "a card")
    choice = on_card.predict(0, 300, 10**9)
    assert choice == Choice(pytest.approx(4.0), pytest.approx(3.0)) and not choice.reads
    ours.looked_up(600, 500, Reading(500, 10**9, 20.0, {}), None)
    ours.flush()
    slow = ours.predict(0, 500, 10**9)
    assert slow is not None and 15 < slow.read_s < 20 and not slow.reads
    for _ in range(12):
        ours.looked_up(600, 0, None, None, slow)
    ours.flush()
    again = ours.predict(0, 500, 10**9)
    assert again is not None and again.reads, "a disk that was busy once is tried again"


NEVER = '{"kv_worth": 1, "since": 1e999, "models": {}, "files": {}, "gone": {"hits": 1, "tokens": 1, "saved_s": 1}}'


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"kv_worth": 2}', '{"kv_worth": 1, "since": "x"}', "\xff", NEVER]
)
def test_a_damaged_record_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / worth.NAME).write_bytes(text.encode("latin-1"))
    found = worth.read(tmp_path)
    assert found.models == {} and found.since < 1e11
    ours = lookups(tmp_path)
    ours.looked_up(100, 0, None, 1.0)
    assert ours.flush() and len(worth.read(tmp_path).models) == 1


def test_a_record_that_cannot_be_read_now_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, encoding: str) -> str:
        raise OSError(24, "Too many open files")

    ours = lookups(tmp_path)
    ours.looked_up(100, 0, None, 1.0)
    assert ours.flush()
    ours.looked_up(100, 0, None, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", fails)
        assert not ours.flush() and worth.read(tmp_path).models == {}
    assert ours.flush() and [each.lookups for each in worth.read(tmp_path).models.values()] == [2]


def test_it_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "MAX_FILES", 3)
    monkeypatch.setattr(worth, "MAX_MODELS", 2)

    def fill(record: Worth) -> None:
        for number in range(5):
            record.file(str(number)).uses, record.file(str(number)).used_at = Uses(1, 10, 1.0), number
            record.model(str(number)).used_at = number

    assert worth.change(tmp_path, fill)
    found = worth.read(tmp_path)
    assert sorted(found.files) == ["2", "3", "4"] and found.gone == Uses(2, 20, 2.0)
    assert sorted(found.models) == ["3", "4"]


def test_nobody_waits_long_for_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "PATIENCE_S", 0.01)
    ours = lookups(tmp_path)
    ours.looked_up(100, 0, None, 1.0)
    with (tmp_path / worth.LOCK).open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not ours.flush() and not (tmp_path / worth.NAME).exists()
    ours.looked_up(100, 0, None, 1.0)
    assert ours.flush() and next(iter(worth.read(tmp_path).models.values())).lookups == 2


def test_a_full_disk_is_no_reason_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    ours = lookups(tmp_path)
    ours.looked_up(100, 0, None, 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(worth.paths, "replace_file", full)
        assert not ours.flush()
    assert ours.flush() and next(iter(worth.read(tmp_path).models.values())).lookups == 1


def test_no_store_no_record(tmp_path: Path) -> None:
    ours = lookups(tmp_path / "none")
    ours.looked_up(100, 0, None, 1.0)
    assert not ours.flush() and not (tmp_path / "none").exists()


def _count(root: Path, times: int) -> None:
    for _ in range(times):
        while not worth.change(root, lambda record: record.gone.add(Uses(1))):
            pass


def test_processes_count_together_and_may_be_killed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(tmp_path, 40)) for _ in range(3)]
    victim = context.Process(target=_count, args=(tmp_path, 10**9))
    for process in (*processes, victim):
        process.start()
    time.sleep(0.05)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for process in (*processes, victim):
        process.join()
    before = worth.read(tmp_path).gone.hits
    assert before >= 120
    _count(tmp_path, 1)
    assert worth.read(tmp_path).gone.hits == before + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [worth.LOCK, worth.NAME]
