"""How many threads compute: the tuner of the compiled kernels in a world of its own, without a clock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
from kernelcases import need_native

from kvcli.kernels.cpu.library import library
from kvcli.runtime.host import cores


class Tuner(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("limit", "active", "before", "next", "pause", "calls")),
        *((name, ctypes.c_double) for name in ("alone", "passed", "speed")),
        ("up", ctypes.c_int64),
    ]


class World:
    """Calls that take 0.4 ms; `speed` of n threads against one that is undisturbed, as far as the tuner can see it."""

    def __init__(self, limit: int) -> None:
        need_native()
        lib = library()
        lib.kv_tuner_reset.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        lib.kv_tuner_add.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double]
        self.add, self.tuner, self.now = lib.kv_tuner_add, Tuner(), 0
        lib.kv_tuner_reset(ctypes.byref(self.tuner), limit)

    def run(self, ms: int, speed: Callable[[int], float]) -> dict[int, float]:
        """The share of the time that each number of threads was in use."""
        calls: dict[int, int] = {}
        for _ in range(ms * 10 // 4):
            n = self.tuner.active
            calls[n] = calls.get(n, 0) + 1
            self.now += 400_000
            self.add(ctypes.byref(self.tuner), self.now, speed(n) * 400_000, 400_000)
        return {n: count / sum(calls.values()) for n, count in calls.items()}


def free(n: int) -> float:
    return 0.85 * n


def one_core_taken(n: int) -> float:
    """Of two cores: two threads wait for each other."""
    return {1: 0.95, 2: 0.5}[n]


def half_taken(n: int) -> float:
    """Of 16 cores, 8 are free."""
    return 0.85 * n if n <= 8 else 0.85 * 8 * (8 / n)


def test_where_threads_pay_nothing_is_tried():
    for limit in (1, 2, 16):
        assert World(limit).run(5000, free) == {limit: 1.0}


def test_two_threads_that_wait_for_each_other_become_one_and_two_again():
    world = World(2)
    world.run(50, one_core_taken)
    assert world.tuner.active == 1
    assert world.run(20_000, one_core_taken)[1] > 0.98
    world.run(2100, free)
    assert world.tuner.active == 2
    assert world.run(5000, free) == {2: 1.0}


def test_a_programs_half_of_the_cores_is_left_to_it():
    world = World(16)
    world.run(200, half_taken)
    shares = world.run(20_000, half_taken)
    assert sum(share for n, share in shares.items() if 7 <= n <= 9) > 0.9, shares
    world.run(3000, free)
    assert world.tuner.active == 16


@pytest.mark.parametrize(("seen", "taken"), [(0.8, half_taken), (0.6, half_taken), (0.6, lambda n: 1 - 0.02 * n)])
def test_all_threads_come_back_where_all_numbers_look_poor(seen: float, taken: Callable[[int], float]):
    """Tasks differ in length, so that the speed of even undisturbed threads looks low."""
    world = World(16)
    world.run(5000, lambda n: seen * taken(n))
    assert world.tuner.active < 12
    world.run(5000, lambda n: seen * free(n))
    assert world.tuner.active == 16


def test_threads_that_pay_little_stay_where_fewer_pay_less():
    """Short calls on many cores: each thread does less than it could, and they are still the fastest."""
    shares = World(8).run(60_000, lambda n: n**0.7)
    assert shares[8] > 0.98, shares


@pytest.mark.parametrize("limit", (2, 8))
def test_a_machine_without_a_free_core_keeps_at_least_one(limit: int):
    world = World(limit)
    world.run(10_000, lambda n: 0.3 / n)
    assert 1 <= world.tuner.active <= 2


@pytest.mark.parametrize(("cpus", "have"), [(1, "there is 1 CPU"), (2, "there are 2 CPUs")])
def test_more_threads_than_cpus_are_said_to_be_pointless(cpus: int, have: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cores, "usable_cpus", lambda: list(range(cpus)))
    assert cores.too_many(cpus) == ""
    assert cores.too_many(100) == f"`threads=100` is no faster than {cpus}: {have} for it"
