"""`CacheWriter`: writes prompt-cache files in a thread while tokens are generated.

The thread hashes and writes. Pages are handed to it by the thread that computes, in `pump`: on a CPU their own memory,
which does not change as long as it is held; on a GPU copies, only as far ahead as LEAD_BYTES.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvcli.errors import CacheFileError
from kvcli.runtime.promptcache.file import Contents
from kvcli.runtime.promptcache.held import HeldPages

LEAD_BYTES = 128 << 20
Write = Callable[[Contents, Iterator[Any]], Any]


@dataclass
class Job:
    """One file. `write(contents, blocks)` writes it; `held` has the pages until it is done. `problem`: why it could not
    be written, "" = it could, or is not done yet."""

    contents: Contents
    held: HeldPages
    write: Write
    name: str
    blocks: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    handed: int = 0
    taken_bytes: int = 0
    handed_bytes: int = 0
    done: bool = False
    problem: str = ""

    @property
    def failure(self) -> str:
        return f"{self.name} was not written: {self.problem}" if self.problem else ""


class CacheWriter:
    """One file at a time, in the order they came. All methods are for the thread that computes; what they have
    handed over is written even where none is called any more."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._problems: list[str] = []  # told between answers, not in the middle of one
        self._jobs: list[Job] = []
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # for whether there is one
        self._gave_up = threading.Event()

    def start(self, contents: Contents, held: HeldPages, write: Write, name: str) -> Job:
        """Write a file from the pages in `held`, which is closed when that is done. `name` is what the
        message calls it if it fails."""
        job = Job(contents, held, write, name)
        self._jobs.append(job)
        self.pump()
        return job

    def pump(self) -> None:
        """Hand over pages, let go of those that are written; returns at once."""
        while self._jobs and self._jobs[0].done:
            job = self._jobs.pop(0)
            job.held.close()
            if job.problem:
                self._problems.append(job.failure)
        ahead = sum(job.handed_bytes - job.taken_bytes for job in self._jobs)
        for job in self._jobs:
            pages, on_cpu = job.contents.pages, job.held.pool.device.type == "cpu"
            while job.handed < len(pages) and ahead < LEAD_BYTES:
                key = pages[job.handed]
                job.blocks.put(job.held.buffer(key))
                job.handed += 1
                size = 0 if on_cpu else job.contents.page_bytes[key[0]]
                job.handed_bytes += size
                ahead += size
        with self._lock:
            if self._thread is None and self._jobs:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def later(self, problem: str) -> None:
        """Have `tell` say this, too."""
        self._problems.append(problem)

    def tell(self) -> None:
        """Say what was not written."""
        while self._problems:
            self._warn(self._problems.pop(0))

    def _run(self) -> None:
        while job := self._next():
            self._write(job)

    def _next(self) -> Job | None:
        """What the thread writes now; None = it ends."""
        with self._lock:
            job = next((job for job in self._jobs if not job.done), None)
            if job is None:
                self._thread = None
            return job

    def _write(self, job: Job) -> None:
        """`done` at last, whatever becomes of it."""
        try:
            job.write(job.contents, self._blocks(job))
        except CacheFileError as error:
            job.problem = error.message
        except OSError as error:
            job.problem = error.strerror or str(error)
        except _GaveUp:
            job.problem = "interrupted"
        except Exception as error:  # told by `pump`: a thread has nobody else to tell
            job.problem = f"{type(error).__name__}: {error}"
        finally:
            job.done = True

    def _blocks(self, job: Job) -> Iterator[Any]:
        for _ in job.contents.pages:
            while True:
                if self._gave_up.is_set():
                    raise _GaveUp
                try:
                    block = job.blocks.get(timeout=0.1)
                    break
                except queue.Empty:
                    continue
            job.taken_bytes += 0 if job.held.pool.device.type == "cpu" else block.nbytes
            yield block

    @property
    def waiting_bytes(self) -> int:
        """Bytes of pages of the files that are not finished."""
        return sum(job.contents.payload_bytes for job in self._jobs)

    def finish(self, patience_s: float, tell: Callable[[int], None]) -> None:
        """Wait until all is written; after `patience_s` `tell` is called once with the bytes of what is at work."""
        began, told = time.monotonic(), False
        while self._jobs:
            if not told and time.monotonic() - began > patience_s:
                told = True
                tell(self.waiting_bytes)
            if (thread := self._thread) is not None:
                thread.join(0.005)
            self.pump()

    def give_up(self) -> None:
        """Leave nothing behind of what is not finished."""
        self._gave_up.set()
        while self._jobs:
            if (thread := self._thread) is not None:
                thread.join()
            self.pump()
        self.tell()


class _GaveUp(Exception):
    """Ends the writing thread."""
