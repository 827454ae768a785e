"""Kernels compiled by processes beside this one.

Most of what compiling a kernel takes holds Python's lock, so threads gain little. A process that is forked has all
modules and what is to be compiled, and leaves it where Triton looks for it: on disk.
"""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NoReturn

from triton.runtime import driver

from kvcli.kernels.gpu.launching import Variant

MOST_S = 120.0  # behind which what is not compiled is compiled here
PROCESSES = 16  # at most: each takes a while to fork, and the longest kernel takes a tenth of all
INDEX_BYTES = 2  # of a place in the list of kernels: pipes hold 32,768 of these, more than any engine has kernels


class Elsewhere:
    """Triton's driver for a process that must not ask the card anything: a fork has no part in what its parent uses."""

    def __init__(self, real: Any) -> None:
        self._real, self._device, self._target = real, real.get_current_device(), real.get_current_target()

    def get_current_device(self) -> int:
        return self._device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def compile_all(variants: Iterable[Variant], processes: int) -> None:
    """Compile them in so many processes, those with most arguments first, which take longest.

    With what launches each: Triton (before 3.7) has a C compiler make it when a kernel is first launched. What a
    process fails at is compiled here, which raises what the compiler says.
    """
    distinct = {_facts(each): each for each in variants}
    ordered = sorted(distinct.values(), key=lambda each: -len(each.arguments))
    count = min(processes, len(ordered), PROCESSES)
    if count > 1 and _in_processes(ordered, count):
        return
    for each in ordered:
        _compile(each)


def _facts(variant: Variant) -> tuple[Any, ...]:
    """What a compiler wants to know: of a number that is no constant whether it is 1, a multiple of 16, or long."""
    given = zip(variant.kernel.params, variant.arguments, strict=False)
    facts = [
        (value == 1, value % 16 == 0, abs(value) >> 31 == 0) if type(value) is int and not param.is_constexpr else value
        for param, value in given
    ]
    return variant.kernel, *facts, variant.options


def _compile(variant: Variant) -> None:
    kernel = variant.kernel.warmup(*variant.arguments, grid=(1,), **dict(variant.options))
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _in_processes(ordered: list[Variant], count: int) -> bool:
    """Whether all of it was compiled. The processes take one kernel after the other from a pipe."""
    there = Elsewhere(driver.active)
    todo, writes = os.pipe()
    os.write(writes, b"".join(i.to_bytes(INDEX_BYTES, "little") for i in range(len(ordered))))
    os.close(writes)
    children: list[int] = []
    try:
        with warnings.catch_warnings(), suppress(OSError):  # as many as there are; none: all is compiled here
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads: see `_child`
            for _ in range(count):
                if child := os.fork():
                    children.append(child)
                else:
                    _child(ordered, todo, there)
        until = time.monotonic() + MOST_S
        done = [bool(children)]
        while children:
            done.append(_succeeded(children[0], until))
            children.pop(0)
        return all(done)
    except BaseException:
        _end(children)
        raise
    finally:
        os.close(todo)


def _child(ordered: list[Variant], todo: int, there: Elsewhere) -> NoReturn:
    """Compile what is left and leave, without anything that would be done at the end of the parent. Threads of the
    parent are not here, and nothing is used that they could have held: no card, no numbers, no output."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        driver.set_active(there)
        while index := os.read(todo, INDEX_BYTES):
            _compile(ordered[int.from_bytes(index, "little")])
        code = 0
    finally:
        os._exit(code)


def _succeeded(child: int, until: float) -> bool:
    """Whether it did what it was for. One that waits for what a thread of the parent held as it was forked is ended."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        if time.monotonic() > until:
            _end([child])
            return False
        time.sleep(0.005)


def _end(children: list[int]) -> None:
    for child in children:
        with suppress(OSError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
