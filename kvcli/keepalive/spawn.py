"""A process that is to keep a model: what it is told, and how it is started."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import kvcli
from kvcli import paths
from kvcli.errors import UsageError
from kvcli.keepalive import socketfolder, thisprocess
from kvcli.options import MODELS_OWN, LoadOptions

FOREVER = -1.0
LOG_BYTES = 1 << 20  # of the log, from which on it begins anew
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_time(text: str) -> float:
    """'5m', '30s', '1h', '1d', '90' -> seconds; '-1' -> FOREVER. Raises UsageError."""
    if text.strip() == "-1":
        return FOREVER
    digits = text.strip().rstrip("smhd")
    unit = text.strip()[len(digits) :]
    if not digits.isascii() or not digits.isdigit() or len(digits) > 9 or unit not in _UNITS:
        raise UsageError(
            f"--keep-alive must be a time, not '{text}'", "write 30s, 5m, 1h or 1d; 0 = not at all, -1 = until kv stop"
        )
    return float(digits) * _UNITS[unit]


def weights_of(load: LoadOptions) -> LoadOptions:
    """The options less those that change nothing of what is kept."""
    return replace(
        load, threads=0, offline=False, memory_limit=None, chat_anyway=False, chat=MODELS_OWN, strict_repeat=False,
        draft="", mtp=False,
    )  # fmt: skip


def key(load: LoadOptions) -> str:
    """Of a model and how it is loaded: the same for a name, or for a file whichever way it is written."""
    there = os.path.exists(load.model)
    model = os.path.realpath(load.model) if there else f"{paths.data_dir()} {load.model}"
    adapters = [(os.path.realpath(each.path), each.scale) for each in load.lora]
    options = replace(weights_of(load), model=model, lora=())
    return sha256(repr((options, adapters)).encode("utf-8", "surrogateescape")).hexdigest()[:16]


@dataclass(frozen=True)
class Wanted:
    """`path` of the model that `load` means, whose `key` that is; `keep_s` from the end of a command on. `device`: as
    `Device` is written; `yield_vram`: what must be free of a GPU (see `pressure.is_short`)."""

    path: Path
    load: LoadOptions
    key: str
    keep_s: float
    device: str
    yield_vram: str = ""


def about(wanted: Wanted, pid: int, state: str) -> dict[str, object]:
    """What `kv ps` shows of process `pid` before it was asked anything, less its memory."""
    return {
        "model": wanted.load.model,
        "path": str(wanted.path),
        "pid": pid,
        "state": state,
        "device": wanted.device,
        "memory_bytes": 0,
        "gpu_bytes": 0,
        "gpu_uuid": "",
        "commands": 0,
        "answered": 0,
        "keep_alive_s": None if wanted.keep_s == FOREVER else wanted.keep_s,
        "left_s": None,
        "version": kvcli.__version__,
    }


def start(wanted: Wanted) -> None:
    """Start the process, if there is none yet, and wait for nothing. What it has to say goes into the log. OSError.

    It gets its lock from here, so that it can be found, and ended, from its beginning on.
    """
    lock = socketfolder.only_one(wanted.key)
    if lock is None:
        return
    try:
        os.pwrite(lock, json.dumps(about(wanted, _started(wanted, lock), socketfolder.STARTING)).encode(), 0)
    finally:
        os.close(lock)


def _started(wanted: Wanted, lock: int) -> int:
    """The process, which has the lock, too. Raises OSError."""
    environment = thisprocess.started_with or dict(os.environ)
    root = str(Path(kvcli.__file__).resolve().parent.parent)
    code = (
        f"import sys; sys.path[: not sys.flags.safe_path] = [{root!r}];"
        f"from kvcli.keepalive.host import main; main({lock})"
    )
    with open(log_file(), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *_options(), "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/",
            env=environment, start_new_session=True, pass_fds=(lock,),
        )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(pickle.dumps(wanted))
    process.returncode = 0  # nobody waits for it: no warning that it still runs
    return process.pid


def _options() -> list[str]:
    """Those of this process's Python, which `places.kind` tells apart."""
    given = [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    return [*subprocess._args_from_interpreter_flags(), *given]  # type: ignore[attr-defined]


def log_file() -> Path:
    """Where a process without a terminal writes. Raises OSError."""
    path = paths.state_dir() / "keep-alive.log"
    paths.make_private(path.parent)
    with suppress(OSError):
        if path.stat().st_size > LOG_BYTES:
            path.unlink()
    return path
