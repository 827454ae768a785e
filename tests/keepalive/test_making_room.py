"""Memory that models hold which nobody uses: when it is wanted by others, and who makes room."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from conftest import KvHere

from kvcli.cli import keeping
from kvcli.cli.invocation import Invocation
from kvcli.errors import DoesNotFit
from kvcli.keepalive import pressure, thisprocess
from kvcli.runtime.engine import loaded
from kvcli.runtime.engine.held import HeldModel
from kvcli.runtime.host.device import Device
from kvcli.runtime.host.memory import Memory
from kvcli.runtime.plan.overheads import assumed_bytes


def test_memory_that_others_need(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()

    def tell(available: int, stalled: float = 0.0) -> bool:
        (tmp_path / "proc/meminfo").write_text(f"MemTotal:       1000000 kB\nMemAvailable:   {available} kB\n")
        (tmp_path / "proc/pressure").mkdir(exist_ok=True)
        line = f"avg10={stalled:.2f} avg60=0.00 avg300=0.00 total=0"
        (tmp_path / "proc/pressure/memory").write_text(f"some avg10=99.00\nfull {line}\n")
        return pressure.is_high(tmp_path)

    assert [tell(900_000), tell(60_000), tell(40_000), tell(900_000, 20.0)] == [False, False, True, True]


@pytest.mark.parametrize(("missing", "asked"), [(1, ["a", "c"]), (300, ["a", "c"]), (301, [])])
def test_idle_processes_make_room_where_it_is_enough(
    missing: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    found = [
        (name, {"commands": n, "memory_bytes": size}) for name, n, size in (("a", 0, 100), ("b", 1, 50), ("c", 0, 200))
    ]
    monkeypatch.setattr(keeping, "processes", lambda: found)
    monkeypatch.setattr(keeping, "stop", lambda name: stopped.append(name) or {"commands": 0})
    assert keeping.make_room(missing) == bool(asked) and stopped == asked


@pytest.mark.parametrize(("missing", "asked"), [(1, ["a", "d"]), (120, ["a", "d"]), (121, [])])
def test_they_make_room_on_the_gpu_that_lacks_it(
    missing: int, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version tells nothing of GPUs."""
    stopped: list[str] = []
    there = {"a": (0, "GPU-1", 100), "b": (0, "GPU-2", 500), "c": (1, "GPU-1", 500), "d": (0, "GPU-1", 20)}
    found = [
        (name, {"commands": n, "memory_bytes": 900, "gpu_uuid": uuid, "gpu_bytes": size})
        for name, (n, uuid, size) in there.items()
    ]
    old = ("e", {"commands": 0, "memory_bytes": 900})
    monkeypatch.setattr(keeping, "processes", lambda: [*found, old])
    monkeypatch.setattr(keeping, "stop", lambda name: stopped.append(name) or {"commands": 0})
    assert keeping.make_room(missing, "GPU-1") == bool(asked) and stopped == asked


class Settling(loaded.LoadedModel):
    """A model on a GPU of which `taken` bytes are somebody's that makes room, and `own` this process's by now."""

    def __init__(self, needed: int, shortened: bool = False) -> None:
        self.device, self.needed, self.asked = Device("cuda", 1), needed, list[tuple[int, str]]()
        self.taken, self.own, self.shortened = 600, 0, shortened
        self.opened: Any = SimpleNamespace(cards=self.cards())
        self._room = self.make_room

    def cards(self) -> list[Memory]:
        free = 1000 - self.taken - self.own
        return [Memory("cuda", "a card", 1000, each, "nvml", f"GPU-{i}") for i, each in enumerate((1000, free))]

    def make_room(self, missing: int, uuid: str) -> bool:
        self.asked.append((missing, uuid))
        made, self.taken = self.taken > 0, 0
        return made

    def _settled(self, *_: object) -> Any:
        free = self.opened.cards[1].free
        if free < self.needed:
            raise DoesNotFit("too large", "", self.needed - free)
        return SimpleNamespace(shortened=self.shortened and "so", budget=SimpleNamespace(grows=True), free=free)


@pytest.mark.parametrize(("needed", "shortened", "asked"), [(300, False, []), (700, False, [300]), (300, True, [1])])
def test_what_others_free_of_a_gpu_is_planned_with(
    needed: int, shortened: bool, asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process has taken of it meanwhile, for its own context, is in the plan already."""
    made = Settling(needed, shortened)
    monkeypatch.setattr(loaded, "gpus", made.cards)
    made.own = 50
    found: Any = made._with_room(*[None] * 4)  # type: ignore[arg-type]
    assert made.asked == [(each, "GPU-1") for each in asked] and found.free == (1000 if asked else 400)


def test_a_model_that_never_fits_is_refused_when_room_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Settling(2000)
    monkeypatch.setattr(loaded, "gpus", made.cards)
    for _ in range(2):
        with pytest.raises(DoesNotFit):
            made._with_room(*[None] * 4)  # type: ignore[arg-type]
    assert made.asked == [(1600, "GPU-1"), (1000, "GPU-1")]


@pytest.mark.parametrize(
    ("free", "least", "short"),
    [
        (60, "", False),
        (40, "", True),
        (190, "0.2", True),
        (210, "0.2", False),
        (300, "512M", True),
        (600, "512M", False),
    ],
)
def test_memory_of_a_gpu_that_others_need(free: int, least: str, short: bool) -> None:
    card = Memory("cuda", "a card", 1000 << 20, free << 20, "nvml")
    assert pressure.is_short(card, least) == short


@pytest.mark.parametrize("text", ["", "x", "4 G of it", "-1", "0.5.1"])
def test_sizes_to_be_free_that_make_no_sense(text: str, kv_here: KvHere) -> None:
    code, _, err = kv_here("run", "--keep-alive", "5m", f"--yield-vram={text}", "x")
    assert code == 2 and "--yield-vram must be a size" in err


@pytest.mark.parametrize(
    ("how", "helps"),
    [(("--vram-limit", str(assumed_bytes("cpu") + (250 << 20)), "-c", "10000000"), False), (("-c", "400000000"), True)],
)
def test_nobody_makes_room_below_a_limit(
    how: tuple[str, ...], helps: bool, kv_here: KvHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(keeping, "make_room", lambda missing, uuid: asked.append(missing))
    code, _, err = kv_here(
        "run", "-m", str(tiny.make("gemma3").path), "--raw", "--no-stdin", "--device", "cpu", *how, "x"
    )
    assert code == 4 and "a context of" in err
    assert len(asked) == helps and min(asked, default=1) > 0


@pytest.mark.parametrize(
    ("missing", "commands", "ends"), [(300, 1, True), (301, 1, False), (0, 1, False), (300, 2, False)]
)
def test_what_holds_a_model_is_ended_where_it_is_enough(
    missing: int, commands: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are in the plan of a command that takes them."""
    there, conn = {"commands": commands, "gpu_bytes": 1000}, socket.socket()
    monkeypatch.setattr(keeping, "ask", lambda name, kind: (there, conn))
    with subprocess.Popen(["sleep", "60"]) as process:
        held: Any = HeldModel(None, process.pid, "cuda:0", b"", 700)  # type: ignore[arg-type]
        monkeypatch.setattr(thisprocess, "forked", thisprocess.Forked("key", held, None, None, thisprocess.NOBODY, 1))
        found = keeping.let_go(DoesNotFit("too large", "", missing), Invocation())
        assert (found, thisprocess.forked.kept is None, process.poll() is not None) == (ends,) * 3
        process.kill()
    assert conn.fileno() == -1
