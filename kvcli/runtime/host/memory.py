"""How much memory there is: main memory as far as control groups allow, GPUs through NVML or nvidia-smi.

Nothing here creates a CUDA context: that would change the number being measured. No torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvcli import startup
from kvcli.errors import UsageError

CPU, CUDA = "cpu", "cuda"
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?b)?", re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NO_LIMIT = 1 << 60  # version 1 of control groups writes "unlimited" as a number near 2^63
_SMI_S = 10  # seconds until nvidia-smi must have answered


@dataclass(frozen=True)
class Memory:
    """The memory of one device, in bytes, and where the numbers are from ("nvml", "MemAvailable", ...). `uuid`: of a
    GPU of this machine, whatever its number is."""

    kind: str  # CPU or CUDA
    name: str
    total: int
    free: int
    source: str
    uuid: str = ""


def parse_size(text: str, flag: str, whole: int | None = None) -> int:
    """'6G', '512MiB', '1.5g' or '6442450944' -> bytes; '0.9' -> that share of `whole`. G and GiB are 2^30, GB is 10^9.

    Raises UsageError for anything else, and for a share where there is nothing to take it of.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or len(match[1]) > 20:
        share = "" if whole is None else ", or a fraction such as 0.9"
        raise UsageError(f"{flag} must be a size, not '{text}'", f"write 6G or 512MiB{share}")
    number, unit = float(match[1]), match[2]
    if not unit and not match[3] and 0 < number <= 1 and match[1] != "1":
        if whole is None:
            raise UsageError(f"{flag} must be a size, not '{text}' of memory of unknown size", "write 6G or 512MiB")
        return int(number * whole)
    size = int(number * (1000 ** _POWERS[unit] if match[3] == "b" else 1024 ** _POWERS[unit]))
    if size < 1 << 20 and not unit and not match[3] and size:
        raise UsageError(f"{flag} must be a MiB or more, not '{text}'", "write the unit too, such as 6G")
    return size


def main_memory(root: Path = Path("/")) -> Memory:
    """What this process may still use of main memory. `root`: where /proc and /sys are looked for.

    The smallest of MemAvailable and what each control group above this process leaves; files that a group
    merely caches count as free. Raises UsageError on a system that tells neither.
    """
    total, free, source = _meminfo(root / "proc/meminfo")
    for limit, left in _group_limits(root):
        if left < free:
            free, source = left, "cgroup"
        total = min(total, limit)
    return Memory(CPU, "main memory", total, max(0, free), source)


def process_bytes() -> int:
    """What this process holds of main memory now; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _meminfo(path: Path) -> tuple[int, int, str]:
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", path.read_text(), re.MULTILINE))
        total, available = int(found["MemTotal"]) << 10, int(found["MemAvailable"]) << 10
        return total, available, "MemAvailable"
    except (OSError, KeyError):
        pass
    try:  # macOS and others: the installed memory is all that is told without a library
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        raise UsageError("this system does not tell how much memory it has", "give `memory`") from None
    return total, total, "installed"


def _group_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes left below it) of every memory control group that holds this process, both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's: then the mount's own root is this process's group.
        folder = base / path.lstrip("/")
        while True:
            found = _group_limit(folder, *names)
            if found:
                yield found
            if folder == base or base not in folder.parents:
                break
            folder = folder.parent


def _group_limit(folder: Path, limit_name: str, usage_name: str, cached_name: str) -> tuple[int, int] | None:
    try:
        text = (folder / limit_name).read_text().strip()
        if not text.isdigit() or int(text) >= _NO_LIMIT:  # "max"
            return None
        usage = int((folder / usage_name).read_text())
        cached = re.search(rf"^{cached_name} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    except (OSError, ValueError):  # not a group, or one that this user may not read
        return None
    limit = int(text)
    return limit, limit - max(0, usage - (int(cached[1]) if cached else 0))


def gpus() -> list[Memory]:
    """The NVIDIA GPUs that this process would see, in its order; [] where there are none."""
    if os.name == "posix" and not any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/dxg")):
        return []
    found = _by_nvml()
    if found is None:
        found = _by_nvidia_smi()
    return _visible(found or [])


def _visible(found: list[tuple[str, Memory]]) -> list[Memory]:
    """Pairs of (UUID, memory) cut and ordered as CUDA_VISIBLE_DEVICES says."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return [memory for _, memory in found]
    chosen = []
    for word in filter(None, (w.strip() for w in wanted.split(","))):
        matches = [memory for i, (uuid, memory) in enumerate(found) if word == str(i) or uuid.startswith(word)]
        if not matches:
            break  # CUDA, too, ignores what follows an unknown device
        chosen.append(matches[0])
    return chosen


def _by_nvml() -> list[tuple[str, Memory]] | None:
    """None where NVML is not installed or cannot be asked."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        found = []
        for i in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(i)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name, uuid = _text(pynvml.nvmlDeviceGetName(handle)), _text(pynvml.nvmlDeviceGetUUID(handle))
            found.append((uuid, Memory(CUDA, name, int(memory.total), int(memory.free), "nvml", uuid)))
        return found
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _by_nvidia_smi() -> list[tuple[str, Memory]] | None:
    import csv
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=True)
        rows = [[cell.strip() for cell in row] for row in csv.reader(done.stdout.splitlines())]
        return [
            (uuid, Memory(CUDA, name, int(total) << 20, int(free) << 20, "nvidia-smi", uuid))
            for uuid, name, total, free in rows
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def peak_on_card(index: int, free_before: int) -> int:
    """Most bytes of a GPU that were taken since `free_before` were free; other programs count too."""
    import torch

    given_back = torch.cuda.max_memory_reserved(index) - torch.cuda.memory_reserved(index)
    return max(0, free_before - gpus()[index].free) + given_back


def release() -> None:
    """Give the memory of models that are gone back to the system."""
    startup.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
