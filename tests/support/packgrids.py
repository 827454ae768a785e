"""Writes what stands in `kvcli/kernels/grids.py`: python tests/support/packgrids.py

The grids are those of the `gguf` package. Each entry is a number, its first element's index in the lowest bits; they
ascend, so their differences compress well.
"""

from __future__ import annotations

import base64
import textwrap
import zlib

import gguf
import numpy as np

from kvcli.kernels.grids import GRIDS


def packed() -> str:
    """All grids, in the order of `GRIDS`, as base85 of compressed differences."""
    parts = []
    for name, grid in GRIDS.items():
        theirs = getattr(gguf.quants, name)
        theirs.init_grid()
        entries = theirs.grid.reshape(grid.entries, grid.size)
        bits = (len(grid.values) - 1).bit_length()
        numbers = (np.searchsorted(grid.values, entries) << bits * np.arange(grid.size)).sum(1)
        assert (np.diff(numbers) > 0).all() and numbers[-1] < 1 << 16
        parts.append(np.diff(numbers, prepend=0).astype("<u2").tobytes())
    return base64.b85encode(zlib.compress(b"".join(parts), 9)).decode()


if __name__ == "__main__":
    print("\n".join(f'    "{line}"' for line in textwrap.wrap(packed(), 114)))
