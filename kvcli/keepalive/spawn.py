"""A process that is to keep a model: what it is told, and how it is started."""

from __future__ import annotations

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
from kvcli.keepalive import socketfolder, thisprocess, wire
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


def start(wanted: Wanted) -> None:
    """Start the process, if there is none yet, and wait for nothing. What it has to say goes into the log. OSError."""
    environment = thisprocess.started_with or dict(os.environ)
    socketfolder.make()
    with suppress(OSError):
        wire.connect(f"{socketfolder.kind()}-{wanted.key}{socketfolder.SOCKET}").close()
        return
    root = str(Path(kvcli.__file__).resolve().parent.parent)
    code = (
        f"import sys; sys.path[: not sys.flags.safe_path] = [{root!r}]; from kvcli.keepalive.host import main; main()"
    )
    with open(log_file(), "ab") as log:
        process = subprocess.Popen(
            [sys.executable, *_options(), "-c", code], stdin=subprocess.PIPE, stdout=log, stderr=log, cwd="/",
            env=environment, start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(pickle.dumps(wanted))
    process.returncode = 0  # nobody waits for it: no warning that it still runs


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
