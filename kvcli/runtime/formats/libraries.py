"""The C libraries of this folder, without which everything works, too. No torch."""

from __future__ import annotations

import ctypes
from pathlib import Path


def compiled(name: str) -> ctypes.CDLL | None:
    """The library that was compiled under this name when kv was installed; None where it was not, or does not load."""
    built = sorted(Path(__file__).parent.glob(f"{name}*.so"))
    try:
        return ctypes.CDLL(str(built[0])) if built else None
    except OSError:
        return None
