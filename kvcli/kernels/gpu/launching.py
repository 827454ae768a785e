"""Launching kernels, or collecting what would be launched so that all of it can be compiled at once (`forked.py`).

Triton finds what it compiled before by the kernel's hash. Before 3.9 that depends on whether the functions that a
kernel calls were hashed before it: in another order, all is compiled again. So they always are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton


@dataclass(frozen=True)
class Pointer:
    """What a compiler wants to know of a tensor; it keeps none of its memory."""

    dtype: torch.dtype
    past_aligned: int  # bytes of the address past a multiple of 16

    def data_ptr(self) -> int:
        return self.past_aligned

    def ptr_range(self) -> int:
        return 0  # not known


class Variant(NamedTuple):
    """A kernel with everything that decides how it is compiled."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]


_collected: ContextVar[set[Variant] | None] = ContextVar("collected", default=None)  # other threads launch meanwhile


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches the kernel over the grid when it is called with the kernel's arguments."""
    if getattr(kernel, "hash", "") is None:  # kernels that are interpreted have none
        hash_kernel(kernel)
    collected = _collected.get()
    if collected is None:
        return kernel[grid]

    def collect(*arguments: Any, **options: Any) -> None:
        kept = (Pointer(x.dtype, x.data_ptr() % 16) if isinstance(x, torch.Tensor) else x for x in arguments)
        collected.add(Variant(kernel, tuple(kept), tuple(options.items())))

    return collect


def hash_kernel(kernel: Any, callers: tuple[Any, ...] = ()) -> None:
    """Hash it, and before it the functions that it calls, but not `callers`. No card is asked anything."""
    if kernel.hash is None:
        callers = *callers, kernel
        for called in map(kernel.fn.__globals__.get, kernel.fn.__code__.co_names):
            if isinstance(called, triton.JITFunction) and not any(called is each for each in callers):
                hash_kernel(called, callers)
        kernel.cache_key  # noqa: B018  # it keeps it


@contextmanager
def collecting() -> Iterator[set[Variant]]:
    """Inside, nothing is launched: the set gets what would be."""
    found: set[Variant] = set()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)
