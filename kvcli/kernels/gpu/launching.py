"""Launching kernels, or collecting what would be launched so that all of it can be compiled at once, in parallel."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from triton.runtime._async_compile import AsyncCompileMode


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
    return lambda *arguments, **options: collected.append(Launch(kernel, grid, arguments, options))


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
