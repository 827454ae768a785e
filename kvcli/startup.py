"""What makes the start of `kv` short and small: parts of torch that are imported when they are used, no search for
garbage while modules are imported, and no memory for code that has run. A program that imports `kvcli` has none of
that."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Parts of torch that `import torch` imports for its users and that nothing of ours uses: a third of its time, for
# export, quantization, training and shapes without data. Each is a leaf: torch itself needs no name of it until then.
DEFERRED = frozenset(
    {
        "torch._meta_registrations",
        "torch.distributions",
        "torch.masked",
        "torch.nested",
        "torch.nn.intrinsic",
        "torch.nn.qat",
        "torch.nn.quantizable",
        "torch.nn.quantized",
        "torch.optim",
        "torch.profiler",
        "torch.quantization",
        "torch.testing",
        "torch.utils.data",
        "pynvml",
    }
)
SINCE, BEFORE = (2, 11), (2, 15)  # versions of torch that this was tried with; others are imported whole

_PAGE_BYTES = 8  # that /proc/self/pagemap has of each page, the highest ones last
_TORCH = re.compile(rb"/lib(torch|c10)\w*\.so$", re.MULTILINE)

_alone: Deferring | None = None


class Deferring:
    """Finds the modules of DEFERRED where Python does, and runs them later than it would.

    They are the real ones from the start, with `__file__`, `__path__` and `__spec__`. What they contain comes when a
    name of one is asked for, or when anything else of torch is imported behind `import torch`: then all of them are
    run, in the order in which torch wanted them, so that what follows finds torch as it would have been.
    """

    def __init__(self) -> None:
        self.waiting: dict[ModuleType, Any] = {}  # and what runs them
        self._running_all = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As every finder in `sys.meta_path`."""
        if name in DEFERRED and _known_torch():
            spec = PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Later(spec.loader, self)  # type: ignore[assignment]
            return spec
        if self.waiting and not self._running_all and name.startswith("torch.") and _is_imported():
            self._run_all()
        return None

    def add(self, module: ModuleType, loader: Any) -> None:
        """Let a module wait until it is asked for a name."""

        def first_asked(name: str) -> Any:
            if self._running_all or not _is_imported():
                self._run(module)
            else:
                self._run_all()
            return getattr(module, name)

        module.__dict__["__getattr__"] = first_asked
        self.waiting[module] = loader

    def _run_all(self) -> None:
        self._running_all = True
        for module in list(self.waiting):
            if module in self.waiting:  # else one before it wanted it
                self._run(module)
        self._running_all = False

    def _run(self, module: ModuleType) -> None:
        del module.__dict__["__getattr__"]  # from here on it is a module like others
        self.waiting.pop(module).exec_module(module)


class _Later:
    """A loader that hands its module to `deferring`, in place of `loader`, which would run it."""

    def __init__(self, loader: Any, deferring: Deferring) -> None:
        self._loader, self._deferring = loader, deferring

    def __getattr__(self, name: str) -> Any:  # what else loaders are asked for: their source, their files
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._deferring.add(module, self._loader)


def take_process() -> Deferring:
    """Begin a process that is this program's alone: from now on `import torch` leaves out what is in DEFERRED until it
    is used, and `uncollected` means what it says."""
    global _alone
    if _alone is not None:  # it was taken before this process was forked
        return _alone
    # Of numpy's BLAS nothing is asked. It would start a thread for each core, each with memory of its own.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    _alone = Deferring()
    sys.meta_path.insert(0, _alone)
    return _alone


def _known_torch() -> bool:
    """Whether the torch that is being imported is one that this was tried with."""
    version = getattr(sys.modules.get("torch.version"), "__version__", "")  # that module comes before all others
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and SINCE <= (int(found[1]), int(found[2])) < BEFORE


def _is_imported() -> bool:
    """Whether `import torch` is done."""
    return not getattr(sys.modules["torch"].__spec__, "_initializing", False)


def release_code() -> None:
    """Give back the memory of code of torch's libraries, most of which ran once, when they were loaded: tens of MiB.
    What runs again is mapped again, from the system's cache of files. Nothing of this in a process that is not ours
    alone, nor where the system does not say what is mapped, nor of code that was changed in memory: by relocations, by
    a debugger or by a tracer."""
    if not _alone or not hasattr(mmap, "MADV_DONTNEED"):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with suppress(OSError), open("/proc/self/pagemap", "rb") as pages:
        for first, end in _code_of_torch():
            pages.seek(first // mmap.PAGESIZE * _PAGE_BYTES)
            if not _changed(pages.read((end - first) // mmap.PAGESIZE * _PAGE_BYTES)):
                advise(first, end - first, mmap.MADV_DONTNEED)


def _changed(pages: bytes) -> bool:
    """Whether one of these pages, as /proc/self/pagemap has them, is not that of its file: it is present (bit 63) or
    swapped (bit 62), and not of a file (bit 61)."""
    return not {entry >> 5 for entry in set(pages[_PAGE_BYTES - 1 :: _PAGE_BYTES])}.isdisjoint({0b100, 0b010})


def _code_of_torch() -> Iterator[tuple[int, int]]:
    """Addresses of what is mapped to be run, and cannot be written: other parts that look read-only were relocated."""
    with suppress(OSError), open("/proc/self/maps", "rb") as maps:
        for line in maps:
            words = line.split(None, 5)
            if words[1] == b"r-xp" and len(words) == 6 and _TORCH.search(words[5]):
                first, end = words[0].split(b"-")
                yield int(first, 16), int(end, 16)


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, no garbage is sought: what imports and a model make stays. Nor is any sought among it later. Nothing of
    this in a process that is not ours alone."""
    if not _alone:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def collect() -> None:
    """Free what refers to itself and is of no use any more, of what was made `uncollected`, too."""
    gc.unfreeze()
    gc.collect()
