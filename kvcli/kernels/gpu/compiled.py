"""Whether everything that an engine launches was compiled before: then kernels are loaded when they are first launched,
in place of all of them ahead.

A file beside Triton's own says so. Where some of what Triton kept is gone, a kernel is compiled when it is launched.
"""

from __future__ import annotations

import _thread
import hashlib
import sys
from contextlib import suppress
from pathlib import Path

import torch
import triton
from triton.runtime.cache import triton_key

from kvcli.kernels.gpu.chip import Chip
from kvcli.kernels.gpu.launching import hash_kernel

FOLDER = "kv"


def begin() -> None:
    """Have a thread hash the compiler, which Triton does (and keeps) before it first loads a kernel: 0.4 s."""
    _thread.start_new_thread(triton_key, ())


def hash_all() -> None:
    """Hash the compiler and every kernel that was imported, for processes that are forked from this one: each is hashed
    before it is first loaded. No card is asked anything."""
    triton_key()
    package = __name__.rpartition(".")[0]
    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    for value in [value for module in modules for value in vars(module).values()]:
        if isinstance(value, triton.JITFunction):
            hash_kernel(value)


def mark_of(device: torch.device, *facts: object) -> Path:
    """Where it would say so of an engine of which `facts` tell everything: their texts count, with the card, the
    versions and the kernels' sources."""
    digest = hashlib.sha256(repr((Chip.of(device), torch.__version__, triton.__version__, facts)).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(triton.knobs.cache.dir) / FOLDER / digest.hexdigest()


def leave(mark: Path) -> None:
    """Say so. A folder that nothing can be written to is as if it said nothing."""
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
