"""Measurements that need torch or a CUDA context, each in a process of its own: this one stays as small as it was.

`measure` starts the process and reads its one line of JSON; the functions below it run there.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvcli import startup
from kvcli.errors import KVError
from kvcli.runtime.host import machine
from kvcli.runtime.host.machine import ProbeFailed
from kvcli.runtime.host.memory import gpus, main_memory, process_bytes
from kvcli.runtime.host.processmemory import GROWTH_BYTES

BUFFER_BYTES = 320 << 20  # more than any processor caches
GPU_BUFFER_BYTES = 1 << 30
LINK_BYTES = 256 << 20
REPEATS = 7
TIMEOUT_S = 180
_ROOT = str(Path(__file__).resolve().parents[3])
_IMPORTS_OF_A_RUN = (
    "kvcli.cli.main",
    "kvcli.cli.commands.run",
    "kvcli.runtime.engine.engine",
    "tokenizers",
    "jinja2.sandbox",
)
# The working folder is taken off the path before anything is imported: a torch.py there is not torch.
_CODE = "import sys; sys.path[0] = sys.argv[1]; from kvcli.runtime.host.measuring import main; main(sys.argv[2:])"


def measure(what: str, *arguments: str) -> dict[str, Any]:
    """The result of the function `what` (see WHAT) in a new process. Raises ProbeFailed with its reason."""
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}  # the order in which NVML counts
    command = [sys.executable, "-c", _CODE, _ROOT, what, *arguments]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeFailed(str(error) if isinstance(error, OSError) else f"no answer in {TIMEOUT_S} s") from None
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ProbeFailed(f"the measuring process ended with exit code {done.returncode}: {last}") from None
    if "error" in answer:
        raise ProbeFailed(answer["error"])
    return answer


def main(arguments: list[str]) -> None:
    """The measuring process: one JSON object on stdout, {"error": reason} if it fails."""
    try:
        answer = WHAT[arguments[0]](*arguments[1:])
    except (ProbeFailed, KVError) as error:
        answer = {"error": str(error)}
    except Exception as error:  # the parent prints one line for whatever a driver or a library comes up with
        answer = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
    print(json.dumps(answer))


def program() -> dict[str, Any]:
    """Memory of `kv run` beside its model, its threads, and the state of the native kernels."""
    startup.take_process()
    for name in _IMPORTS_OF_A_RUN:
        importlib.import_module(name)
    import torch

    from kvcli import kernels
    from kvcli.runtime.host.cores import physical_cores

    threads = physical_cores()
    torch.set_num_threads(1)
    backend, reason = kernels.backend("auto", threads)
    values = {"threads": threads, "isa": getattr(backend, "isa", None), "reason": reason}
    startup.release_code()
    return values | {"runtime_bytes": process_bytes() + GROWTH_BYTES}


def memory_speed() -> dict[str, Any]:
    """GB/s at which main memory is read (sum) and copied (bytes read and written), with the engine's threads."""
    import torch

    from kvcli.runtime.host.cores import physical_cores

    free = main_memory().free
    if free < 3 * BUFFER_BYTES:
        raise ProbeFailed(f"only {free >> 20:,} MiB of memory are free")
    torch.set_num_threads(physical_cores())
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.zeros_like(source)
    read, copy = _seconds(lambda: source.sum()), _seconds(lambda: target.copy_(source))
    return {"bandwidth_gb_s": BUFFER_BYTES / read / 1e9, "copy_gb_s": 2 * BUFFER_BYTES / copy / 1e9}


def cuda(index: str) -> dict[str, Any]:
    """Of GPU `index`: bytes that a context with cuBLAS takes, and GB/s of reading, of copying, and of the link from
    main memory (pinned) to it."""
    import torch

    number = int(index)
    before = gpus()[number].free
    if not torch.cuda.is_available():
        raise ProbeFailed(
            f"torch {torch.__version__} is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA"
        )
    torch.cuda.set_device(number)
    small = torch.ones(256, 256, device="cuda", dtype=torch.float16)
    torch.cuda.synchronize((small @ small).device)
    taken = before - gpus()[number].free - torch.cuda.memory_reserved()
    size = min(GPU_BUFFER_BYTES, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(size // 4, device="cuda")
    target = torch.zeros_like(source)

    def finished(work: Callable[[], Any]) -> None:
        work()
        torch.cuda.synchronize()

    read = _seconds(lambda: finished(source.sum))
    copy = _seconds(lambda: finished(lambda: target.copy_(source)))
    answer = {"bandwidth_gb_s": size / read / 1e9, "copy_gb_s": 2 * size / copy / 1e9}
    part = min(size, LINK_BYTES) // 4
    pinned = torch.ones(part, pin_memory=True)
    link = _seconds(lambda: finished(lambda: target[:part].copy_(pinned)))
    answer["link_gb_s"] = 4 * part / link / 1e9
    return answer | {"runtime_bytes": taken if taken > 0 else None}  # None: others freed memory meanwhile


def device() -> dict[str, Any]:
    """Why `kv` cannot use each GPU, in the driver's order; "" = it can."""
    from kvcli.runtime.host.device import why_not

    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return {"reasons": [why_not(card) for card in machine.graphics()]}


def ways(index: str) -> dict[str, Any]:
    """What launches on GPU `index` follow: its multiprocessors, the shared memory of one program, whether kernels are
    launched ahead of each other, and whether the vendor's library reads the past of long prompts (head dim 128)."""
    import torch

    from kvcli.kernels.gpu import past
    from kvcli.kernels.gpu.chip import Chip

    card = torch.device("cuda", int(index))
    torch.cuda.set_device(card)
    chip = Chip.of(card)
    return {
        "multiprocessors": chip.multiprocessors,
        "shared_memory_bytes": chip.shared_bytes,
        "launches_ahead": chip.ahead,
        "past_by_library": past.library_takes(card, 128, 128),
    }


def _seconds(work: Callable[[], Any]) -> float:
    """Shortest time of `work` after one call that does not count: other programs take of a memory what it could do."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


WHAT: dict[str, Callable[..., dict[str, Any]]] = {
    "program": program,
    "memory": memory_speed,
    "cuda": cuda,
    "device": device,
    "ways": ways,
}
