"""What prompt caches were worth: a record beside the store of look-ups, hits and seconds saved, by model and by file.
No torch.

One JSON file, ROOT/worth.json, replaced whole under a lock that nobody waits for long: what could not be recorded is
recorded with the next look-up. A process that is killed loses its last look-up at most. It holds no text, and is never
larger than MAX_FILES and MAX_MODELS allow: of files, those used longest ago are only counted together.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.runtime.promptcache.prefillspeed import PrefillSpeed

NAME, LOCK = "worth.json", ".worth.lock"
VERSION = 1
MAX_FILES, MAX_MODELS = 2000, 64
PATIENCE_S = 0.2  # for the lock
AGE_S = 600.0  # is added to the age of files
LEAST_READ = 8 << 20  # bytes: of less, opening files takes most of the time
READ_DECAY = 0.8  # of what was learned of reading, at every new prompt that is read
PRIOR_BYTES = 64 << 20  # how much reading a measured speed of the disk counts for


@dataclass
class Uses:
    """Look-ups that found something, how many tokens they read, and the seconds that this saved: those that computing
    the rows would have taken, less those of reading them."""

    hits: int = 0
    tokens: int = 0
    saved_s: float = 0.0

    def add(self, other: Uses) -> None:
        self.hits += other.hits
        self.tokens += other.tokens
        self.saved_s += other.saved_s


@dataclass
class FileWorth:
    """Of one file of the store. `cost_s`: what computing its rows takes, None = not known."""

    uses: Uses = field(default_factory=Uses)
    cost_s: float | None = None
    used_at: float = 0.0


@dataclass
class ModelWorth:
    """Of one model on one device under one pair of cache types."""

    title: str = ""
    settings: str = ""
    lookups: int = 0
    prompt_tokens: int = 0
    memory_tokens: int = 0  # that were still in memory
    disk: Uses = field(default_factory=Uses)
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)
    read_bytes: float = 0.0  # with those before counting less and less
    read_s: float = 0.0
    convert_bytes: float = 0.0  # of pages of larger types, which were converted as they were read
    convert_s: float = 0.0
    used_at: float = 0.0
    marks: dict[str, int] = field(default_factory=dict)  # prompts that went on from a mark, by its kind

    def was_read(self, nbytes: int, seconds: float, converts: bool = False) -> None:
        """Pages of so many bytes took so long to read, or to convert."""
        if converts:
            self.convert_bytes = self.convert_bytes * READ_DECAY + nbytes
            self.convert_s = self.convert_s * READ_DECAY + seconds
        else:
            self.read_bytes = self.read_bytes * READ_DECAY + nbytes
            self.read_s = self.read_s * READ_DECAY + seconds

    def was_not_read(self, converts: bool = False) -> None:
        """Rows were computed although they are stored. What was learned of reading, or of converting, counts for less
        each time, so that it is tried again: the disk may have been busy."""
        if converts:
            self.convert_bytes, self.convert_s = self.convert_bytes / 2, self.convert_s / 2
        else:
            self.read_bytes, self.read_s = self.read_bytes / 2, self.read_s / 2

    def convert_seconds(self, nbytes: int) -> float | None:
        """How long pages of larger types of so many bytes take to read and to convert; None = not known."""
        return nbytes * self.convert_s / self.convert_bytes if self.convert_bytes >= LEAST_READ else None

    def read_seconds(self, nbytes: int, prior_gb_s: float | None) -> float | None:
        """How long pages of so many bytes take to read, by what was read before and, as long as that is little, by the
        speed of the disk; None = not known."""
        known_bytes, known_s = self.read_bytes, self.read_s
        if prior_gb_s:
            known_bytes, known_s = known_bytes + PRIOR_BYTES, known_s + PRIOR_BYTES / (prior_gb_s * 1e9)
        return nbytes * known_s / known_bytes if known_bytes >= LEAST_READ else None


@dataclass
class Worth:
    """Everything that is recorded, `since` then (seconds since the epoch)."""

    since: float = 0.0
    models: dict[str, ModelWorth] = field(default_factory=dict)
    files: dict[str, FileWorth] = field(default_factory=dict)
    gone: Uses = field(default_factory=Uses)  # of files that are not listed any more

    def model(self, key: str) -> ModelWorth:
        return self.models.setdefault(key, ModelWorth())

    def file(self, name: str) -> FileWorth:
        return self.files.setdefault(name, FileWorth())

    def forget(self, names: Iterable[str]) -> None:
        """These files are gone."""
        for name in names:
            if found := self.files.pop(name, None):
                self.gone.add(found.uses)

    def bound(self) -> None:
        """Let go of what was used longest ago, where there is too much."""
        by_use = sorted(self.files, key=lambda name: -self.files[name].used_at)
        self.forget(by_use[MAX_FILES:])
        for key in sorted(self.models, key=lambda key: -self.models[key].used_at)[MAX_MODELS:]:
            del self.models[key]

    def as_object(self) -> dict[str, Any]:
        return {"kv_worth": VERSION, **asdict(self)}

    @classmethod
    def of(cls, value: dict[str, Any]) -> Worth:
        """What `as_object` gave. Raises ValueError, TypeError, LookupError, AttributeError for nonsense."""
        if value["kv_worth"] != VERSION:
            raise ValueError("another version")
        return cls(
            _moment(value["since"]),
            {key: _model(each) for key, each in value["models"].items()},
            {name: _file(each) for name, each in value["files"].items()},
            _uses(value["gone"]),
        )


def _amount(value: Any, below: float = float("inf")) -> float:
    """Raises ValueError for what is none."""
    if not 0 <= (found := float(value)) < below:
        raise ValueError("not an amount")
    return found


def _moment(value: Any) -> float:
    """Seconds since the epoch, in a year of four digits."""
    return _amount(value, 2.5e11)


def _uses(value: dict[str, Any]) -> Uses:
    return Uses(int(_amount(value["hits"])), int(_amount(value["tokens"])), _amount(value["saved_s"]))


def _file(value: dict[str, Any]) -> FileWorth:
    cost = value["cost_s"]
    return FileWorth(_uses(value["uses"]), None if cost is None else _amount(cost), _moment(value["used_at"]))


def _model(value: dict[str, Any]) -> ModelWorth:
    found = replace(ModelWorth(**value), disk=_uses(value["disk"]), prefill=PrefillSpeed.of(value["prefill"]))
    counts = found.lookups, found.prompt_tokens, found.memory_tokens, found.used_at
    numbers = *counts, *found.marks.values(), found.read_bytes, found.read_s, found.convert_bytes, found.convert_s
    if not all(isinstance(number, (int, float)) and 0 <= number < float("inf") for number in numbers):
        raise ValueError("not a count")
    return found


def read(root: Path) -> Worth:
    """What is recorded of the store at `root`; nothing where there is none, or where it cannot be read."""
    try:
        return _read(root)
    except OSError:
        return Worth(time.time())


def _read(root: Path) -> Worth:
    """The same. Raises OSError where there is a record and it cannot be read: that is no reason to begin anew."""
    try:
        return Worth.of(json.loads((root / NAME).read_text("utf-8")))
    except (FileNotFoundError, ValueError, TypeError, LookupError, AttributeError):
        return Worth(time.time())


def ranking(record: Worth, files: Iterable[tuple[Path, int]], now: float) -> Callable[[Path, int, float], float]:
    """What a file (path, bytes, time of its last use) is worth: seconds that its rows take to compute, for each byte,
    over the time since its last use.

    This is the profit of Scheuermann, Shim and Vingralek, "WATCHMAN" (VLDB 1996), with the rate of uses by the last one
    alone: by more of them it kept what once was in use too long (docs/notes.md). AGE_S is added to the age, so that of
    files that were all used just now those go that are quickly computed again. Of a file whose cost is not known that
    of a mean byte is taken: where nothing is known, what was used longest ago goes first.
    """
    known = [(each.cost_s, size) for path, size in files if (each := record.files.get(key_of(path))) and each.cost_s]
    mean = sum(cost for cost, _ in known) / max(1, sum(size for _, size in known)) if known else 1.0

    def value(path: Path, size: int, used_at: float) -> float:
        found = record.files.get(key_of(path), FileWorth())
        cost = mean if not found.cost_s else found.cost_s / max(1, size)
        return cost / (max(0.0, now - used_at) + AGE_S)

    return value


def clear(root: Path) -> None:
    """Remove the record. Raises OSError."""
    for name in (NAME, LOCK):
        (root / name).unlink(missing_ok=True)


def begin_anew(record: Worth) -> None:
    """Count from now on, keeping what was learned of speeds and costs."""
    record.since, record.gone = time.time(), Uses()
    for model in record.models.values():
        model.lookups = model.prompt_tokens = model.memory_tokens = 0
        model.disk, model.marks = Uses(), {}
    for file in record.files.values():
        file.uses = Uses()


def key_of(path: Path) -> str:
    """How the record calls a file of the store: the hash of its contents, which its name ends with."""
    return path.stem.rpartition("-")[2]


def change(root: Path, how: Callable[[Worth], object]) -> bool:
    """Read, change and write the record under its lock; False where another process has held that for PATIENCE_S.
    Raises OSError."""
    with _locked(root) as mine:
        if not mine:
            return False
        for left in root.glob(f".{NAME}.*.part"):  # by a process that was killed: nobody else writes now
            left.unlink(missing_ok=True)
        worth = _read(root)
        how(worth)
        worth.bound()
        paths.replace_file(root / NAME, json.dumps(worth.as_object()).encode())
        return True


@contextmanager
def _locked(root: Path) -> Iterator[bool]:
    """Whether the lock is ours."""
    handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    yield False
                    return
                time.sleep(0.005)
        yield True
    finally:
        os.close(handle)
