"""What a prompt cache is worth: the time to the first token of prompts that begin with the same tokens and end with
new ones, with the rows of the beginning computed, read from disk, or still in memory."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli import paths
from kvcli.errors import OutputError
from kvcli.notices import Tell
from kvcli.options import PromptCacheOptions, SampleOptions
from kvcli.runtime.engine.events import End
from kvcli.runtime.host.diskspeed import put_out
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.promptcache.store import entries, folders

if TYPE_CHECKING:
    from kvcli.runtime.engine.engine import Engine
    from kvcli.runtime.promptcache.lookup import PromptCaches

COMPUTED, DISK, MEMORY = "computed", "disk", "memory"
ARMS = (COMPUTED, DISK, MEMORY)


@dataclass(frozen=True)
class Arm:
    """Prompts of one arm: the time to the first token of each, and its tokens that were reused."""

    name: str
    ttft_s: tuple[float, ...]
    reused: tuple[int, ...]

    def share(self, share: float) -> float:
        """The time to the first token, in seconds, that this share of the prompts does not exceed."""
        ordered = sorted(self.ttft_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    @property
    def hits(self) -> int:
        """Prompts of which something was reused."""
        return sum(count > 0 for count in self.reused)


@dataclass(frozen=True)
class Reuse:
    """Prompts of `prefix` tokens that they share, and `suffix` of their own. `stored_bytes`: files of the first one.

    `cold`: why the files could not be put out of the system's page cache, "" = the disk was read each time.
    """

    prefix: int
    suffix: int
    stored_bytes: int
    cold: str
    arms: tuple[Arm, ...]


def rows(prefix: int, suffix: int) -> int:
    """Tokens of a prompt and its answer, as a context must hold them."""
    return prefix + suffix + 1


def run(
    engine: Engine, prefixes: list[int], suffix: int, repetitions: int, warmup: bool, tell: Callable[[str], None]
) -> Iterator[Reuse]:
    """Measure one prefix after the other, in a store of their own that is gone afterwards. What is computed and what is
    read from disk take turns, so that what else the machine does falls upon both.

    Raises OutputError where there is no room for the store, and where a file could not be written.
    """
    for prefix in prefixes:
        tell(f"{prefix} + {suffix} tokens")
        with _Folder() as folder:
            yield _Prompts(engine, prefix, suffix, folder).run(repetitions, warmup)


class _Folder:
    """A folder for files on the disk that the store is on; its name says what it is if a killed process leaves it."""

    def __enter__(self) -> Path:
        try:
            paths.make_private(paths.cache_dir())
            self.path = Path(tempfile.mkdtemp(prefix="bench-", dir=paths.cache_dir()))
        except OSError as error:
            raise OutputError(f"cannot make a folder in {paths.cache_dir()}: {error.strerror or error}") from None
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class _Prompts:
    """Prompts that begin alike, through an engine."""

    def __init__(self, engine: Engine, prefix: int, suffix: int, folder: Path) -> None:
        self.engine, self.prefix, self.suffix, self.folder = engine, prefix, suffix, folder
        self._chance = random.Random(f"{prefix} {suffix}")
        self._begin = self._tokens(prefix)

    def _tokens(self, count: int) -> list[int]:
        return self._chance.choices(range(self.engine.config.vocab_size), k=count)

    def run(self, repetitions: int, warmup: bool) -> Reuse:
        on_disk = PromptCacheOptions(store=self.folder, min_tokens=1, ttl_s=float("inf"), max_bytes=1 << 62)
        self._ask_once(on_disk)  # stores the prefix
        files = [entry.path for folder in folders(self.folder) for entry in entries(folder)]
        stored_bytes, cold = sum(path.stat().st_size for path in files), ""
        found: dict[str, list[End]] = {name: [] for name in ARMS}
        for _ in range(warmup + repetitions):
            found[COMPUTED].append(self._ask_once(PromptCacheOptions()))
            cold = cold or _put_out(files)
            found[DISK].append(self._ask_once(on_disk))
        with closing(self._caches(PromptCacheOptions(memory=True))) as caches:
            self._ask(caches)  # leaves the prefix there
            found[MEMORY] = [self._ask(caches) for _ in range(warmup + repetitions)]
        arms = (_arm(name, ends[warmup:]) for name, ends in found.items())
        return Reuse(self.prefix, self.suffix, stored_bytes, cold, tuple(arms))

    def _caches(self, options: PromptCacheOptions) -> PromptCaches:
        def failed(message: str) -> None:
            raise OutputError(message)

        return self.engine.prompt_caches(options, Tell(failed, lambda message: None, lambda message: None))

    def _ask_once(self, options: PromptCacheOptions) -> End:
        """As a process of its own would; all is written when it is over."""
        with closing(self._caches(options)) as caches:
            return self._ask(caches)

    def _ask(self, caches: PromptCaches) -> End:
        """One prompt with a new end, and one token."""
        seq = self.engine.new_sequence()
        try:
            options = SampleOptions(temperature=0.0, max_tokens=1, ignore_eos=True)
            *_, end = self.engine.generate(seq, self._begin + self._tokens(self.suffix), options, caches=caches)
        finally:
            seq.close()
        assert isinstance(end, End)
        return end


def _arm(name: str, ends: list[End]) -> Arm:
    times, counts = [end.timings.ttft_s for end in ends], [end.usage.cache_read_tokens for end in ends]
    return Arm(name, tuple(times), tuple(counts))


def _put_out(files: list[Path]) -> str:
    """Have these files read from the disk; why that cannot be had, "" = it can."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            put_out(handle, os.fstat(handle).st_size)
        except ProbeFailed as error:
            return str(error)
        finally:
            os.close(handle)
    return ""
