"""Launching kernels, or collecting what would be launched so that all of it can be compiled at once, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime._async_compile import AsyncCompileMode


@dataclass(frozen=True)
class Pointer:
    """What a compiler wants to know of a tensor; it keeps none of its memory."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0  # not known


class Launch(NamedTuple):
    """A kernel with everything that decides which variant of it is compiled."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


_collected: list[Launch] | None = None


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches the kernel over the grid when it is called with the kernel's arguments."""
    if _collected is None:
        return kernel[grid]
    collected = _collected

    def collect(*arguments: Any, **options: Any) -> None:
        kept = (Pointer(x.dtype, x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments)
        collected.append(Launch(kernel, grid, tuple(kept), options))

    return collect


@contextmanager
def collecting() -> Iterator[list[Launch]]:
    """Inside, nothing is launched: the list gets what would be."""
    global _collected
    found: list[Launch] = []
    _collected = found
    try:
        yield found
    finally:
        _collected = None


def compile_all(launches: list[Launch]) -> None:
    """Compile (or load from the cache on disk) every variant among the launches, in as many threads as there are
    processors."""
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as executor, AsyncCompileMode(executor):
        for kernel, grid, arguments, options in launches:
            kernel.warmup(*arguments, grid=grid, **options)
