"""What was measured on this machine: memory of the runtime and its libraries, memory bandwidth.

One JSON file in the state folder: {"kv_schema": 1, "devices": {"cpu": {"runtime_bytes": ..., "torch": ...,
"bandwidth": ..., "measured_at": ..., "machine": ...}}}, a device by the name that its driver gives it, or "cpu". Until
something is measured, and where another torch was installed since ("torch" is its version), defaults stand in.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kvcli import paths
from kvcli.runtime.host.memory import CUDA
from kvcli.runtime.host.processmemory import GROWTH_BYTES

SCHEMA = 1
# The interpreter, torch and its libraries: of a build for CPUs alone; of one for GPUs, whose libraries come with it.
# In a program that imports kvcli, 70 MiB more, most of which is code that the system may forget (startup.release_code).
_CPU_BUILD_BYTES, _GPU_BUILD_BYTES = (146 << 20) + GROWTH_BYTES, 490 << 20
_CONTEXT_BYTES = 450 << 20  # on a GPU: the CUDA context with the libraries' modules
_GPU_LIBRARIES = ("libtorch_cuda.so", "libtorch_hip.so", "libtorch_xpu.so")


@dataclass(frozen=True)
class Overheads:
    """`runtime_bytes` and `bandwidth` (10^9 bytes/s) of one device; None = not measured. `measured_at`: when the
    bandwidth was (ISO 8601, UTC)."""

    runtime_bytes: int | None = None
    bandwidth: float | None = None
    measured_at: str | None = field(default=None, compare=False)


def assumed_bytes(kind: str) -> int:
    """The `runtime_bytes` of a device that was not measured. Looks at which build of torch is installed."""
    if kind == CUDA:
        return _CONTEXT_BYTES
    return _GPU_BUILD_BYTES if _built_for_gpus() else _CPU_BUILD_BYTES


@functools.cache
def _built_for_gpus() -> bool:
    """Told by the files of torch: its version need not say so. It is not imported."""
    found = importlib.util.find_spec("torch")
    folders = list(found.submodule_search_locations or ()) if found else []
    return any(Path(folder, "lib", name).exists() for folder in folders for name in _GPU_LIBRARIES)


def state_file() -> Path:
    return paths.state_dir() / "overheads.json"


def load(device: str) -> tuple[Overheads, str]:
    """What is stored of a device, and a warning ("" = none) where the file cannot be used."""
    path = state_file()
    try:
        entry = _devices(path).get(device, {})
        runtime = _positive(entry, "runtime_bytes")
        if entry.get("torch", _torch()) != _torch():
            runtime = None
        when = entry.get("measured_at")
        bandwidth = _positive(entry, "bandwidth")
        return Overheads(None if runtime is None else int(runtime), bandwidth, when if _is_moment(when) else None), ""
    except FileNotFoundError:
        return Overheads(), ""
    except (OSError, ValueError) as error:
        return Overheads(), f"the measurements in {path} cannot be used ({error}): kv doctor renews them"


def store(device: str, measured: Overheads, machine: str = "") -> Path:
    """Keep what was measured of a device; what is None stays as it was. Raises OSError.

    The best bandwidth that a machine reached is kept: a lower one was measured while something else read memory, too.
    `machine`: what the device is part of, such as the processor's name; another machine's bandwidth is replaced.
    """
    path = state_file()
    try:
        devices = _devices(path)
    except (FileNotFoundError, ValueError):
        devices = {}
    entry = devices.setdefault(device, {})
    if measured.runtime_bytes is not None:
        entry |= {"runtime_bytes": measured.runtime_bytes, "torch": _torch()}
    if measured.bandwidth is not None and measured.bandwidth > _reached(entry, machine):
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        entry |= {"bandwidth": measured.bandwidth, "measured_at": now, "machine": machine}
    paths.make_private(path.parent)
    part = path.with_suffix(f".tmp-{os.getpid()}")
    part.write_text(json.dumps({"kv_schema": SCHEMA, "devices": devices}, indent=1) + "\n", encoding="utf-8")
    part.chmod(0o600)
    part.replace(path)
    return path


def _reached(entry: dict[str, Any], machine: str) -> float:
    """The bandwidth that an entry has of this machine; 0 = none, or one that cannot be."""
    try:
        return (_positive(entry, "bandwidth") or 0) if entry.get("machine", machine) == machine else 0
    except ValueError:
        return 0


def _is_moment(text: object) -> bool:
    try:
        return bool(datetime.fromisoformat(text)) if isinstance(text, str) else False
    except ValueError:
        return False


def _torch() -> str:
    """Which torch is installed; one for GPUs may have another version than one for CPUs, such as 2.13.0+cpu."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices(path: Path) -> dict[str, dict[str, Any]]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("kv_schema") != SCHEMA or not isinstance(data.get("devices"), dict):
        raise ValueError("it has another form")
    if not all(isinstance(entry, dict) for entry in data["devices"].values()):
        raise ValueError("it has another form")
    return data["devices"]


def _positive(entry: dict[str, Any], key: str) -> float | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1 << 50:
        raise ValueError(f"{key} is {value!r}")
    return value
