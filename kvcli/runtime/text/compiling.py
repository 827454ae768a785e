"""Schemas of others, compiled beside the process that serves, with an end to the time and memory that one may take.

The compiler is native code, which nothing can interrupt, and which some schemas keep busy for hours. `Compiler` has a
process of its own for it, which it ends where it takes too long; `main` is that process. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kvcli.errors import UsageError

SECONDS = 5.0  # that a schema, or a grammar of several, may take
_BYTES = 2 << 30  # of memory, beyond which it fails
_KEPT, _KEPT_BYTES = 512, 64 << 10  # answers that are kept, and the longest of them
_COMMAND = "from kvcli.runtime.text.compiling import main; main()"


class Compiler:
    """Does what `grammar.compiled` does, in its process. It may be called from several threads."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._known: dict[
            bytes, bytes | None
        ] = {}  # by hashes of what was asked: calls of one conversation ask the same
        self._lock = threading.Lock()

    def __call__(self, kind: str, *given: Any) -> str:
        """Raises UsageError, also where it takes too long."""
        line = (json.dumps([kind, *given]) + "\n").encode()
        key = hashlib.sha256(line).digest()
        with self._lock:
            answer = self._known.pop(key) if key in self._known else self._answer(line)
            if answer is None or len(answer) <= _KEPT_BYTES:
                self._known[key] = answer
                while len(self._known) > _KEPT:
                    del self._known[next(iter(self._known))]
        if answer is None:
            what = given[1] if len(given) > 1 else "the grammar"
            raise UsageError(f"{what} cannot be followed: compiling it takes too long", "a simpler one can be")
        found = json.loads(answer)
        if "error" in found:
            raise UsageError(found["error"])
        return str(found["source"])

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _answer(self, line: bytes) -> bytes | None:
        """None where there is none in time."""
        process = self._process or self._begin()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            found, until = bytearray(), time.monotonic() + self.seconds
            while not found.endswith(b"\n"):
                if not select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                    break
                if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                    break
                found += piece
            else:
                return bytes(found)
        except OSError:
            pass
        self._end()
        return None

    def _begin(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", _COMMAND]
        package = str(Path(__file__).resolve().parents[3])
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # Ctrl-C is for the server, which ends it
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
                    pipe.close()
        self._process = None


def main() -> None:
    """Answer lines of stdin until it ends."""
    from kvcli.runtime.text import grammar

    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        try:
            answer = {"source": grammar.compiled(*json.loads(line))}
        except UsageError as error:
            answer = {"error": error.message}
        except (RecursionError, MemoryError):
            answer = {"error": "the schema cannot be followed: it is too large"}
        print(json.dumps(answer), flush=True)
