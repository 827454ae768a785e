"""A model that a process of its own holds, as on a GPU: here on a CPU, in plain torch, and commands have copies of it.

All else is as it is there: who holds it, what is handed over, who takes it, and who ends when.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny
from conftest import PACKAGE_ROOT, KvHere
from staying import Staying, children, is_alive, until

from kvcli.runtime.plan.overheads import assumed_bytes

pytestmark = pytest.mark.slow
MODEL = tiny.path_of("gemma3")
RUN = ("run", "-m", str(MODEL), "--raw", "--no-cache", "-s", "7", "--device", "cpu")
LONG = (*RUN, "--jsonl", "--ignore-eos", "-n", "40", "Pack my box")
# What every process of `kv` begins with: models in plain torch are kept, and held. Who takes one is written down.
ALTERED = """
import os
from dataclasses import replace
from kvcli.cli import keeping
from kvcli.errors import NotTaken
from kvcli.keepalive import holder, kept
from kvcli.runtime.engine.held import HeldModel

def decoder(self, *given):
    if os.path.exists({refuses!r}):
        raise NotTaken("the weights cannot be opened: a test refuses")
    with open({taken!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{self.holder}}\\n")
    return own(self, *given)

def said(loaded):
    return replace(told(loaded), gpu_bytes=1 << 60)

own, HeldModel.decoder = HeldModel.decoder, decoder
told, holder._told = holder._told, said
keeping._reason_against = lambda loaded: ""
kept.is_held = lambda wanted: True
"""


class Holding(Staying):
    """`taken`: which processes took the model, and of which holder. `refuses`: a file where that is not possible."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self.refuses, self._taken = folder / "refuses", folder / "taken"
        (folder / "sitecustomize.py").write_text(ALTERED.format(refuses=str(self.refuses), taken=str(self._taken)))
        plain = {n: v for n, v in os.environ.items() if n == "KV_CPU_ISA" or not n.startswith(("KV_", "NO_COLOR"))}
        paths = os.pathsep.join([str(folder), str(PACKAGE_ROOT)])
        super().__init__(command, plain | {"KV_BACKEND": "reference", "PYTHONPATH": paths}, folder)

    @property
    def taken(self) -> list[tuple[int, int]]:
        lines = self._taken.read_text().splitlines() if self._taken.exists() else []
        return [(int(pid), int(holder)) for pid, holder in (line.split() for line in lines)]

    def keep(self, model: Path = MODEL, time: str = "10m") -> int:
        """Its process; nothing was taken by a command yet."""
        code, _, err = self.run(*RUN, "-n", "1", "--keep-alive", time, "a")
        assert code == 0, err
        until(lambda: [each for each in self.processes() if each["state"] == "ready"])
        self._taken.unlink()
        return self.about["pid"]

    @property
    def holder(self) -> int:
        return children(self.about["pid"])[0]

    @property
    def log(self) -> str:
        return (self.folder / "state/kv/keep-alive.log").read_text()


@pytest.fixture(autouse=True, scope="module")
def model() -> None:
    assert tiny.make("gemma3").path == MODEL


@pytest.fixture(scope="module")
def holding(kv_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Holding]:
    made = Holding(kv_command, tmp_path_factory.mktemp("holding"))
    made.keep()
    yield made
    made.end()


@pytest.fixture
def cold(kv_here: KvHere, monkeypatch: pytest.MonkeyPatch) -> Iterator[KvHere]:
    """Runs `kv` without such a process, in this one."""
    monkeypatch.setenv("KV_BACKEND", "reference")
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        yield kv_here


CALLS = {
    "text": (*RUN, "-n", "12", "the pages of the cache"),
    "other context": (*RUN, "-n", "5", "-c", "256", "-ct", "int8", "--evict", "sink", "hello"),
}


@pytest.mark.parametrize("name", CALLS)
def test_answers_are_the_same(name: str, holding: Holding, cold: KvHere) -> None:
    before = len(holding.taken)
    code, out, _ = holding.run(*CALLS[name])
    assert (code, out.decode()) == cold(*CALLS[name])[:2]
    assert [by for _, by in holding.taken[before:]] == [holding.holder]


@pytest.mark.thorough
def test_several_at_once(holding: Holding) -> None:
    prompts = ["the pages", "of the cache", "hello world"]
    alone = [holding.run(*RUN, "-n", "8", each)[1] for each in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda each: holding.run(*RUN, "-n", "8", each)[1], prompts))
    assert found == alone


def test_what_cannot_be_taken_is_loaded_once_more(holding: Holding, cold: KvHere) -> None:
    before = holding.about["answered"]
    holding.refuses.touch()
    code, out, err = holding.run(*CALLS["text"])
    holding.refuses.unlink()
    assert (code, out.decode()) == cold(*CALLS["text"])[:2]
    assert err == b"kv: the weights cannot be opened: a test refuses; the model is loaded once more\n"
    assert until(lambda: holding.about["answered"]) == before + 1 and is_alive(holding.holder)


def test_the_keeper_has_one_thread_and_the_holder_nothing_of_it(holding: Holding) -> None:
    keeper, holder = holding.about["pid"], holding.holder
    assert "\nThreads:\t1\n" in Path(f"/proc/{keeper}/status").read_text()
    held = [os.readlink(f"/proc/{holder}/fd/{n}") for n in os.listdir(f"/proc/{holder}/fd")]
    assert not [each for each in held if each.endswith(".lock") or each.startswith("socket:")]


def test_a_command_that_does_not_fit_under_its_own_limit_ends_nothing(holding: Holding) -> None:
    limit = str(assumed_bytes("cpu") + (250 << 20))
    before = holding.about["answered"]
    code, _, err = holding.run(*RUN, "--vram-limit", limit, "-c", "10000000", "a")
    assert code == 4 and b"a context of 10,000,000 needs" in err
    assert until(lambda: holding.about["answered"]) == before + 1 and is_alive(holding.holder)


# The last ones: they end the processes.


def _narrow(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
    """One whose answer does not fit into the pipe: it is not at its end before that is read."""
    assert process.stdout
    fcntl.fcntl(process.stdout, 1031, 4096)  # F_SETPIPE_SZ
    return process


def _rest(process: subprocess.Popen[bytes], first: bytes) -> int:
    """How many lines it writes, without a failure."""
    assert process.stdout
    lines = [first, *process.stdout]
    assert process.wait(60) == 0
    return len(lines)


def test_stop_waits_for_the_memory(holding: Holding) -> None:
    keeper, holder = holding.about["pid"], holding.holder
    assert holding.run("stop")[0] == 0
    assert not is_alive(keeper) and not is_alive(holder)


def test_a_holder_that_is_killed_ends_its_keeper_and_no_command(holding: Holding, cold: KvHere) -> None:
    keeper, holder = holding.keep(), holding.holder
    process = _narrow(holding.start(*LONG))
    assert process.stdout
    first = process.stdout.readline()
    os.kill(holder, signal.SIGKILL)
    until(lambda: not holding.processes())
    assert _rest(process, first) == len(cold(*LONG)[1].splitlines())
    until(lambda: not is_alive(keeper))
    assert f"{MODEL}: the process {holder} that had the weights on cpu was ended: it is not kept\n" in holding.log
    before = len(holding.taken)
    assert holding.run(*CALLS["text"])[1] == cold(*CALLS["text"])[1].encode() and len(holding.taken) == before


def test_a_holder_stays_for_commands_whose_keeper_is_killed(holding: Holding, cold: KvHere) -> None:
    keeper, holder = holding.keep(), holding.holder
    process = _narrow(holding.start(*LONG))
    assert process.stdout
    first = process.stdout.readline()
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not is_alive(keeper))
    assert is_alive(holder)
    assert _rest(process, first) == len(cold(*LONG)[1].splitlines())
    until(lambda: not is_alive(holder))


def test_a_command_that_does_not_fit_ends_the_holder_and_is_what_it_is_without(holding: Holding, cold: KvHere) -> None:
    keeper, holder = holding.keep(), holding.holder
    large = (*RUN, "-c", "400000000", "a")
    code, out, err = holding.run(*large)
    assert (code, out) == (4, b"") and b"a context of 400,000,000 needs" in err and cold(*large)[0] == 4
    until(lambda: not is_alive(keeper) and not is_alive(holder))


@pytest.mark.thorough
def test_a_model_that_cannot_be_held_does_not_stay(holding: Holding) -> None:
    broken = holding.folder / "broken.gguf"
    broken.write_bytes(MODEL.read_bytes())
    other = (*RUN[:2], str(broken), *RUN[3:])
    first = "from kvcli.keepalive import holder; from kvcli.errors import KVError\n"
    path = holding.folder / "sitecustomize.py"
    whole = path.read_text()
    path.write_text(f"{whole}\n{first}def fail(*given): raise KVError('there is no way')\nholder._loaded = fail\n")
    assert holding.run(*other, "-n", "1", "--keep-alive", "10m", "a")[0] == 0
    until(lambda: f"kv: {broken} is not kept: there is no way\n" in holding.log and not holding.processes())
    path.write_text(whole)
