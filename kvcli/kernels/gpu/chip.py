"""`Chip`: what launches depend on of the card that they are for. The one place that asks a card what it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from triton.runtime import driver

AHEAD = (9, 0)  # the first compute capability whose kernels can be launched ahead of those before them


@dataclass(frozen=True)
class Chip:
    """`multiprocessors` of a compute capability; one program may have `shared_bytes` of shared memory."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """That of a GPU. Elsewhere (in Triton's interpreter) the one that is `assumed`."""
        return _assumed if device.type != "cuda" else _there(device)

    @property
    def ahead(self) -> bool:
        """Whether kernels are launched ahead; see `language.SERIAL`."""
        return self.capability >= AHEAD

    @property
    def sm(self) -> int:
        """The capability as compilers write it: 86."""
        return 10 * self.capability[0] + self.capability[1]


@cache
def _there(device: torch.device) -> Chip:
    index = torch.cuda.current_device() if device.index is None else device.index
    capability = torch.cuda.get_device_capability(index)  # opens the driver, which Triton takes for granted
    found = driver.active.utils.get_device_properties(index)
    return Chip(capability, found["multiprocessor_count"], found["max_shared_mem"])


H100 = Chip((9, 0), 132, 227 << 10)
_assumed = H100


@contextmanager
def assumed(chip: Chip) -> Iterator[None]:
    """Inside, whatever is not a GPU counts as that one: launches are as they would be there."""
    global _assumed
    before, _assumed = _assumed, chip
    try:
        yield
    finally:
        _assumed = before
