"""What this machine is: system, processor, compiler, packages, GPU driver. Nothing is measured; no torch.

Every function returns values for JSON, or raises ProbeFailed with the reason in words.
"""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvcli.runtime.host.cores import usable_cpus
from kvcli.runtime.host.memory import gpus

FP8_CAPABILITY = (8, 9)  # the first compute capability whose tensor cores multiply fp8
_COMMAND_S = 10  # seconds until a program must have answered
_COMPILERS = ("cc", "gcc", "clang")


class ProbeFailed(Exception):
    """A fact that could not be found out; the message says why."""


def system() -> dict[str, Any]:
    """Operating system, machine type and Python."""
    name = f"{platform.system()} {platform.release()}"
    return {"os": name, "machine": platform.machine(), "python": platform.python_version()}


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, Any]:
    """Name of the processor, and the CPUs that this process may run on."""
    try:
        found = re.search(r"^(?:model name|Model|cpu model)\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        found = None
    name = found[1].strip() if found else platform.processor() or "unknown processor"
    return {"name": " ".join(name.split()), "cpus": os.cpu_count() or 1, "usable_cpus": len(usable_cpus())}


def compiler() -> dict[str, Any]:
    """The C compiler that an installation would use."""
    names = [*os.environ.get("CC", "").split()[:1], *_COMPILERS]
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        raise ProbeFailed(f"none found ({', '.join(dict.fromkeys(names))}): only a new installation needs one")
    lines = _output([path, "--version"]).splitlines()
    return {"path": path, "version": lines[0].strip() if lines else "unknown version"}


def graphics() -> list[dict[str, Any]]:
    """Every NVIDIA GPU that this process sees: memory, driver, compute capability, fp8; [] where there are none."""
    found = gpus()
    if not found:
        return []
    facts = _driver_facts()
    cards = []
    for index, memory in enumerate(found):
        driver, capability = facts.get(memory.name, (None, None))
        card = {"index": index, "name": memory.name, "total_bytes": memory.total, "free_bytes": memory.free}
        card |= {"source": memory.source, "driver": driver, "compute_capability": None, "fp8": None}
        if capability is not None:
            card |= {"compute_capability": "{}.{}".format(*capability), "fp8": capability >= FP8_CAPABILITY}
        cards.append(card)
    return cards


def _driver_facts() -> dict[str, tuple[str, tuple[int, int] | None]]:
    """(driver version, compute capability) by the name of a GPU, from NVML, else from nvidia-smi; {} = neither."""
    try:
        return _facts_by_nvml()
    except ProbeFailed:
        pass
    try:
        text = _output(["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"])
        return {name: (driver, _capability(cap)) for name, driver, cap in _rows(text)}
    except (ProbeFailed, ValueError):  # an old driver does not know compute_cap
        return {}


def _facts_by_nvml() -> dict[str, tuple[str, tuple[int, int] | None]]:
    try:
        import pynvml
    except ImportError:
        raise ProbeFailed("NVML's Python module is not installed") from None
    try:
        pynvml.nvmlInit()
        try:
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            found: dict[str, tuple[str, tuple[int, int] | None]] = {}
            for i in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(i)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                found[_text(pynvml.nvmlDeviceGetName(handle))] = driver, (int(major), int(minor))
            return found
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ProbeFailed(f"NVML: {error}") from None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _capability(text: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def _rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _output(command: list[str]) -> str:
    """What a program prints. Raises ProbeFailed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, errors="replace")
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeFailed(f"{command[0]} does not answer: {error}") from None
    if done.returncode:
        raise ProbeFailed(f"{command[0]} failed with exit code {done.returncode}")
    return done.stdout
