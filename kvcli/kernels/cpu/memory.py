"""Memory in pages of 2 MiB where the system has them: with small ones, a token waits for addresses."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

CHUNK = 32 << 20
ALIGNED = 64


class Room:
    """Memory for many tensors, in chunks that the system is asked to map by huge pages. A chunk takes memory where it
    is written to, 2 MiB at a time."""

    def __init__(self) -> None:
        self._chunk, self._used = torch.empty(0, dtype=torch.uint8), 0

    def take(self, n_bytes: int) -> torch.Tensor:
        """uint8 [n_bytes], which begins at a multiple of 64."""
        if n_bytes > CHUNK // 2:
            return _memory(n_bytes)
        if self._used + n_bytes > self._chunk.numel():
            self._chunk, self._used = _memory(CHUNK), 0
        found = self._chunk[self._used : self._used + n_bytes]
        self._used += -(-n_bytes // ALIGNED) * ALIGNED
        return found


def _memory(n_bytes: int) -> torch.Tensor:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(n_bytes, dtype=torch.uint8)
    mapped = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)
