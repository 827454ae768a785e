"""`Lookups`: what one engine tells the record of prompt caches (worth.py), and asks of it. No torch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcli.runtime.plan import overheads
from kvcli.runtime.promptcache import worth
from kvcli.runtime.promptcache.rowsettings import pair, types_of
from kvcli.runtime.promptcache.worth import ModelWorth, Uses, Worth, key_of

MARGIN_S = 0.1  # by which computing rows must be faster than reading them
DISK = "disk"  # among what kv doctor has measured


def link_to(card: str) -> str:
    """What the way from memory to a GPU is called among what kv doctor has measured."""
    return f"link to {card}"


def settings_of(identity: Mapping[str, str]) -> str:
    """The cache types of rows, and what computes them."""
    return f"{pair(types_of(identity))} on {identity.get('computed_on', '?')}"


def model_key(identity: Mapping[str, str]) -> str:
    """How the record calls a model on one device with one pair of cache types."""
    described = f"{identity.get('weights', '')}\n{settings_of(identity)}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def read_seconds(record: Worth, identity: Mapping[str, str], nbytes: int) -> float | None:
    """How long pages of so many bytes of these rows take to read into memory; None = not known."""
    return record.models.get(model_key(identity), ModelWorth()).read_seconds(nbytes, _rate(""))


@dataclass(frozen=True)
class Choice:
    """Rows of a prompt that are stored: the seconds that reading them and computing them would take, as predicted."""

    read_s: float
    compute_s: float
    converts: bool = False  # as they are read

    @property
    def reads(self) -> bool:
        """Whether reading is no slower, or by so little that it is not worth the work."""
        return self.read_s <= self.compute_s + MARGIN_S


@dataclass(frozen=True)
class Reading:
    """What was read of a prompt: its first `tokens` rows, from files that have rows [start, end) of it."""

    tokens: int
    nbytes: int
    seconds: float
    files: Mapping[Path, tuple[int, int]]
    converts: bool = False  # as they were read


class Lookups:
    """Of an engine whose rows are made as `identity` says, in the store at `root`. `card`: its GPU, "" = a CPU."""

    def __init__(self, root: Path, identity: Mapping[str, str], title: str, card: str = "") -> None:
        self.root, self.title, self.card = root, title, card
        self.settings, self.key = settings_of(identity), model_key(identity)
        self._waiting: list[Callable[[Worth], None]] = []

    def predict(self, start: int, end: int, nbytes: int, converts: bool = False) -> Choice | None:
        """Rows [start, end) of a prompt, `nbytes` of files, that are converted as they are read or not; None where
        nothing is known of reading or of computing."""
        model = worth.read(self.root).models.get(self.key)
        if model is None:
            return None
        read_s = model.convert_seconds(nbytes) if converts else model.read_seconds(nbytes, _rate(self.card))
        compute_s = model.prefill.seconds(start, end)
        return None if read_s is None or compute_s is None else Choice(read_s, compute_s, converts)

    def looked_up(
        self,
        n_tokens: int,
        reused: int,
        reading: Reading | None,
        compute_s: float | None,
        choice: Choice | None = None,
        elsewhere: int = 0,
        mark: str = "",
    ) -> None:
        """A prompt of `n_tokens` was looked for. `reused` of its rows were there, and the others took `compute_s`;
        None = that is not known. `choice`: what was predicted of stored rows. `elsewhere`: how many rows were neither
        in memory nor read from the store, but come from a named file. `mark`: the kind of the one that the prompt goes
        on from, "" = none."""
        now = time.time()

        def tell(record: Worth) -> None:
            model = record.model(self.key)
            model.title, model.settings, model.used_at = self.title, self.settings, now
            model.lookups += 1
            model.prompt_tokens += n_tokens
            if mark:
                model.marks[mark] = model.marks.get(mark, 0) + 1
            if compute_s is not None:
                model.prefill.learn(reused, n_tokens, compute_s)
            if choice is not None and not choice.reads:
                model.was_not_read(choice.converts)
            if reading is None:
                model.memory_tokens += reused - elsewhere
                return
            model.was_read(reading.nbytes, reading.seconds, reading.converts)
            saved_s = max(0.0, (model.prefill.seconds(0, reading.tokens) or 0.0) - reading.seconds)
            model.disk.add(Uses(1, reading.tokens, saved_s))
            parts = {path: model.prefill.seconds(*rows) or 0.0 for path, rows in reading.files.items()}
            whole = sum(parts.values())
            for path, (start, end) in reading.files.items():
                file = record.file(key_of(path))
                file.uses.add(Uses(1, end - start, saved_s * parts[path] / whole if whole else 0.0))
                file.used_at = now

        self._waiting.append(tell)

    def stored(self, path: Path, start: int, end: int, replaced: tuple[Path, ...] = ()) -> None:
        """A file has rows [start, end) of a prompt; it takes over from those that it replaces."""
        now = time.time()

        def tell(record: Worth) -> None:
            file = record.file(key_of(path))
            for old in replaced:
                if before := record.files.pop(key_of(old), None):
                    file.uses.add(before.uses)
            file.cost_s, file.used_at = record.model(self.key).prefill.seconds(start, end), now

        self._waiting.append(tell)

    def flush(self) -> bool:
        """Record what waits, if there is a store; whether nothing waits any more. A record that cannot be written is
        no reason to end anything."""
        if not self._waiting or not self.root.is_dir():
            return not self._waiting
        waiting = list(self._waiting)
        try:
            done = worth.change(self.root, lambda record: [tell(record) for tell in waiting])
        except OSError:
            return False
        if done:
            del self._waiting[: len(waiting)]
        return done


def _rate(card: str) -> float | None:
    """10^9 bytes/s from the disk into memory, or through it to a GPU, as kv doctor measured; None = not measured."""
    ways = [overheads.load(name)[0].bandwidth for name in (DISK, *([link_to(card)] if card else []))]
    known = [way for way in ways if way]
    return 1 / sum(1 / way for way in known) if known else None
