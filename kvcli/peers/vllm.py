"""vLLM as a process of ours: found, started behind a Unix socket that nobody else reaches, ended with this process."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcli.errors import KVError, ModelError
from kvcli.keepalive import thisprocess
from kvcli.peers import guardian, http1

_LOOK_S = 0.2
_SHOWN = 20  # lines of its log, where it fails
# Of its own: how much of a prompt was in the cache, and no word to anybody else.
_ALWAYS = ("--enable-prompt-tokens-details",)
_QUIET = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass
class Program:
    """`socket`: where it listens; `ctx_size`: tokens of its longest context."""

    process: subprocess.Popen[bytes]
    socket: str
    log: Path | None
    ctx_size: int = 0

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def failure(self) -> KVError:
        """What to say where it has ended by itself."""
        lines = self.log.read_text("utf-8", "replace").splitlines() if self.log else []
        told = next((line for line in reversed(lines) if "Error" in line), "")
        return Ended(f"vLLM ended with exit code {self.process.wait()}", told.strip()[:300], lines[-_SHOWN:])

    def stop(self) -> None:
        """End it and all that it has started, and wait for that."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


class Ended(ModelError):
    """It ended by itself. `lines`: the last of its log."""

    def __init__(self, message: str, hint: str, lines: Sequence[str]) -> None:
        super().__init__(message, hint or "it said nothing of why")
        self.lines = lines


def find() -> str:
    """Beside this Python, or in PATH. Raises ModelError."""
    beside = Path(sys.executable).parent / "vllm"
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise ModelError(
            "vLLM is not installed, or not in PATH",
            "pip install vllm, here or in an environment of its own that is put into PATH",
        )
    return found


@contextmanager
def running(
    words: Sequence[str], variables: Mapping[str, str], name: str, offline: bool, shown: bool
) -> Iterator[Program]:
    """vLLM with these words, beginning with `serve MODEL`. `name`: of the model in calls; `offline`: it loads nothing
    from the hub; `shown`: its log goes to stderr. Raises ModelError."""
    program = find()
    environment = {**(thisprocess.started_with or os.environ), **_QUIET, **variables} | (
        {"HF_HUB_OFFLINE": "1"} if offline else {}
    )
    with tempfile.TemporaryDirectory(prefix="kv-vllm-") as folder:
        socket, log = f"{folder}/http", None if shown else Path(folder) / "log"
        how = ["--uds", socket, "--served-model-name", name, *_ALWAYS]
        with open(log or os.devnull, "wb") as file:
            process = guardian.start([program, *words, *how], environment, file if log else None)
        found = Program(process, socket, log)
        try:
            yield found
        finally:
            found.stop()


def wait(program: Program) -> None:
    """Until it answers. Raises Ended."""
    while not asyncio.run(answers(program)):
        if program.ended:
            raise program.failure()
        time.sleep(_LOOK_S)


async def answers(program: Program) -> bool:
    try:
        status, _ = await http1.asked(program.socket, "/health")
        if status != 200:
            return False
        status, models = await http1.asked(program.socket, "/v1/models")
        if status != 200:
            return False
        program.ctx_size = int(models["data"][0]["max_model_len"])
        return True
    except http1.PeerGone:
        return False
    except (ValueError, LookupError, TypeError):
        raise ModelError(
            "vLLM does not say how long its context is (max_model_len in /v1/models)", "kv needs 0.19 or newer"
        ) from None
