"""Schemas of others, compiled beside the process that serves, with an end to the time and memory that one may take.

The compiler is native code, which nothing can interrupt, and which some schemas keep busy for hours. `Compiler` has a
process of its own for it, which it ends where it takes too long; `main` is that process. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from kvcli.errors import UsageError

Kept = TypeVar("Kept")
SECONDS = 5.0  # that a schema, or a grammar of several, may take
_BYTES = 2 << 30  # of memory, beyond which it fails
_KEPT, _KEPT_BYTES = 512, 64 << 10  # answers that are kept, and the longest of them
_LATE_S = 60.0  # for which what took too long is not tried again
_TRIES = 2  # where the process ends by itself


class Compiler:
    """Does what `grammar.compiled` does, in its process. It may be called from several threads."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        # By hashes of what was asked: calls of one conversation ask the same.
        self._known: dict[bytes, bytes] = {}
        self._late: dict[bytes, float] = {}  # until when it is not tried again
        self._lock = threading.Lock()
        self._closed = False

    def __call__(self, kind: str, *given: Any) -> str:
        """Raises UsageError, also where it takes too long."""
        line = (json.dumps([kind, *given]) + "\n").encode()
        key = hashlib.sha256(line).digest()
        what = given[1] if len(given) > 1 else "the grammar"
        with self._lock:
            try:
                answer = self._known.pop(key, None) or self._answer(line, key)
            except TimeoutError:
                raise UsageError(
                    f"{what} cannot be followed: compiling it takes too long", "a simpler one can be"
                ) from None
            except OSError as error:
                raise UsageError(f"{what} cannot be followed: {error}", "a simpler one can be") from None
            if len(answer) <= _KEPT_BYTES:
                _keep(self._known, key, answer)
        found = json.loads(answer)
        if "error" in found:
            raise UsageError(found["error"])
        return str(found["source"])

    def close(self) -> None:
        """End the process, also while it is at work. What is asked later begins another one."""
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()
            self._closed = False

    def _answer(self, line: bytes, key: bytes) -> bytes:
        """Raises TimeoutError where there is none in time, OSError where the process ends by itself again and again."""
        if time.monotonic() < self._late.pop(key, 0.0):
            _keep(self._late, key, time.monotonic() + _LATE_S)
            raise TimeoutError
        for _ in range(_TRIES):
            if self._closed:
                break
            try:
                if answer := self._asked(self._process or self._begin(), line):
                    return answer
            except BrokenPipeError:
                pass
            except TimeoutError:
                self._end()
                _keep(self._late, key, time.monotonic() + _LATE_S)
                raise
            self._end()
        raise OSError("the process that compiles it ended")

    def _asked(self, process: subprocess.Popen[bytes], line: bytes) -> bytes:
        """b"" where it ends before its answer does. Raises TimeoutError, BrokenPipeError."""
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(line)
        process.stdin.flush()
        found, until = bytearray(), time.monotonic() + self.seconds
        while not found.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError
            if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                return b""
            found += piece
        return bytes(found)

    def _begin(self) -> subprocess.Popen[bytes]:
        """Raises OSError. Nothing of the folder that kv was started in is imported."""
        root = str(Path(__file__).resolve().parents[3])
        code = f"import sys; sys.path[0] = {root!r}; from kvcli.runtime.text.schemacompiler import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd="/", start_new_session=True,  # Ctrl-C is for the server, which ends it
        )  # fmt: skip
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it is ready: importing takes no time of a schema's
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):  # of what it was not sent yet
                        pipe.close()
        self._process = None


def _keep(kept: dict[bytes, Kept], key: bytes, value: Kept) -> None:
    """As the newest; the oldest ones go."""
    kept[key] = value
    while len(kept) > _KEPT:
        del kept[next(iter(kept))]


def main() -> None:
    """Answer lines of stdin until it ends. What takes too long ends the process, which may be nobody's any more."""
    import resource

    from kvcli.runtime.text import grammar

    resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        signal.alarm(int(SECONDS) + 2)
        try:
            answer = {"source": grammar.compiled(*json.loads(line))}
        except UsageError as error:
            answer = {"error": error.message}
        except (RecursionError, MemoryError):
            answer = {"error": "the schema cannot be followed: it is too large"}
        except (ValueError, TypeError) as error:
            answer = {"error": f"the schema cannot be followed: {error}"}
        signal.alarm(0)
        print(json.dumps(answer), flush=True)
