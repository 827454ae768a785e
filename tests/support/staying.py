"""A process that keeps a tiny model, and commands that it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATIENCE_S = 60


def until(condition: Callable[[], Any]) -> Any:
    """What the condition comes to, once it is true."""
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
    return found


class Staying:
    """Runs `kv` in an environment of its own, with a folder for sockets that nobody else has."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.command, self.folder = [*command], folder
        runtime = folder / "run"
        runtime.mkdir(mode=0o700)
        homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
        self.environment = environment | homes | {"XDG_RUNTIME_DIR": str(runtime), "KV_CONFIG": "none"}
        self.places = runtime / "kv"

    def start(self, *args: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[bytes]:
        piped = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE) | {"stdin": subprocess.DEVNULL, "cwd": self.folder}
        return subprocess.Popen([*self.command, *args], env=self.environment | (env or {}), **(piped | options))

    def run(self, *args: str, stdin: bytes | None = None, **options: Any) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr."""
        process = self.start(*args, **(options if stdin is None else options | {"stdin": subprocess.PIPE}))
        out, err = process.communicate(stdin, timeout=PATIENCE_S)
        return process.returncode, out, err

    @property
    def about(self) -> dict[str, Any]:
        """What the only process says of itself."""
        found = self.processes()
        there = [each.name for each in self.places.iterdir()], (self.folder / "state/kv/keep-alive.log").read_text()
        assert len(found) == 1, there
        return found[0]

    def processes(self) -> list[dict[str, Any]]:
        code, out, err = self.run("ps", "--json")
        assert code == 0, err
        return json.loads(out)["processes"]

    def keep(self, model: Path, time: str = "10m") -> int:
        """Let the model stay behind a command; the process that keeps it."""
        code, _, err = self.run("run", "-m", str(model), "--raw", "-n", "1", "--keep-alive", time, "a")
        assert code == 0, err
        until(lambda: [each for each in self.processes() if each["state"] == "ready"])
        return self.about["pid"]

    def end(self) -> None:
        """Whatever still stays is killed: no test leaves a process."""
        for found in self.processes():
            os.kill(found["pid"], signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes that this one has forked and that are not over, the first one first."""
    return sorted(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
