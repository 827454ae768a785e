"""What begins before it is needed, in threads that leave Python to the others. Nothing here fails: what does not work
ahead is done when it is needed, and told then. No torch."""

from __future__ import annotations

import _thread
import atexit
import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from pathlib import Path

_SUFFIX = {"linux": ".so", "darwin": ".dylib"}.get(sys.platform)
# As `import torch` does: what others are to find among all symbols, then all that its Python part rests on.
_LIBRARIES = (("torch_global_deps", os.RTLD_NOW | os.RTLD_GLOBAL), ("torch", os.RTLD_NOW)) if _SUFFIX else ()


def load_torch() -> None:
    """Begin to load torch's libraries, which is a third of its import and, where it is built for CUDA, up to a second.

    Meanwhile Python runs on, but any library that it loads waits for these.
    """
    spec = importlib.util.find_spec("torch") if "torch" not in sys.modules else None
    if spec is None or not spec.submodule_search_locations or not _LIBRARIES or _has_other_cuda():
        return
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    paths = [(bytes(folder / f"lib{name}{_SUFFIX}"), mode) for name, mode in _LIBRARIES]
    done = _thread.allocate_lock()
    done.acquire()
    atexit.register(done.acquire)  # a process that ends while constructors of libraries run would crash
    _thread.start_new_thread(_load, (paths, done))  # `threading` would wait until it runs


def _has_other_cuda() -> bool:
    """Whether libraries of CUDA would be found that are not torch's own: it alone knows which of its to load first."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    return any(next(Path(folder).glob(f"lib{kind}*.so*"), None) for folder in folders for kind in ("cu", "nv", "nccl"))


def _load(libraries: list[tuple[bytes, int]], done: _thread.LockType) -> None:
    try:
        with suppress(AttributeError, OSError):
            dlopen = ctypes.CDLL(None).dlopen  # unlike `ctypes.CDLL` of a path, a call of it holds no lock of Python
            dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
            all(dlopen(path, mode) for path, mode in libraries)
    finally:
        done.release()  # else the process would never end
