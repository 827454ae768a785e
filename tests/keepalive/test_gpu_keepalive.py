"""A model that stays on a GPU: commands are what they are without, and the card gets its memory back."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import staying
import tiny
from staying import Staying, children, is_alive, until

from kvcli.runtime.host.memory import gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not gpus(), reason="needs a GPU")]
MODEL = tiny.path_of("gemma3")
RUN = ("run", "-m", str(MODEL), "--raw", "--no-cache", "-s", "7")
ALONE = ("--keep-alive", "0")
BESIDE = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs a card that no other test has (-n 0)")
NEAR = 48 << 20  # bytes of a card that others may take or give back meanwhile
FILL = """
import sys, torch
torch.zeros(1, device="cuda")
left = int(sys.argv[1])
held = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Kernels are compiled by the first command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staying, "PATIENCE_S", 300)
        assert tiny.make("gemma3").path == MODEL
        yield


@pytest.fixture(scope="module")
def there(kv_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staying]:
    plain = {n: v for n, v in os.environ.items() if not n.startswith(("KV_", "NO_COLOR"))}
    made = Staying(kv_command, plain, tmp_path_factory.mktemp("gpu"))
    yield made
    made.end()


@pytest.fixture
def kept(there: Staying) -> Staying:
    """With a process that keeps the model."""
    if not there.processes():
        there.keep(MODEL)
    return there


def _log(made: Staying) -> str:
    return (made.folder / "state/kv/keep-alive.log").read_text()


CALLS = {
    "text": (*RUN, "-n", "20", "the pages of the cache"),
    "sampled": (*RUN, "-n", "20", "--temp", "1.5", "the pages"),
    "other cache and context": (*RUN, "-n", "20", "-c", "256", "-ct", "int8", "hello"),
    "evicting": (*RUN, "-n", "40", "-c", "384", "--evict", "sink", "--ignore-eos", "hello " * 90),
    "samples": (*RUN, "-n", "5", "--n-samples", "2", "--json", "hello"),
    "repeatable": (*RUN, "-n", "9", "--strict-repeat", "hello"),
    "on the cpu": (*RUN, "-n", "5", "--device", "cpu", "hello"),
    "no such value": (*RUN, "-c", "x", "hello"),
    "too long": (*RUN, "-c", "64", "hello " * 200),
}
MEASURED = re.compile(rb'"\w+_(s|tps|bytes)": [\d.e+-]+|[\d.,]+ (s|ms|tok/s|MiB|GiB|KiB|B)\b')


@pytest.mark.parametrize("name", CALLS)
def test_bytes_and_exit_codes_are_the_same(name: str, kept: Staying) -> None:
    expected, before = kept.run(*CALLS[name], *ALONE), kept.about["answered"]
    found = kept.run(*CALLS[name])
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert MEASURED.sub(b"#", ours) == MEASURED.sub(b"#", theirs), _log(kept)
    assert found[0] == expected[0]
    if name != "on the cpu":
        assert until(lambda: kept.about["answered"]) == before + 1, _log(kept)


@pytest.mark.parametrize("variant", ["llama", "deepseek2", "granitehybrid", "phi3-long"])
def test_other_families(variant: str, there: Staying) -> None:
    path = tiny.make(variant).path
    run = ("run", "-m", str(path), "--raw", "--no-cache", "-s", "7", "-n", "20", "the pages of the cache")
    there.run("stop", "--all")
    there.keep(path)
    assert there.run(*run) == there.run(*run, *ALONE)
    assert until(lambda: there.about["answered"]) == 1, _log(there)
    there.run("stop")


def test_memory_is_what_it_is_without(kept: Staying) -> None:
    """The plan counts weights that are there already once."""
    run = (*RUN, "-n", "5", "--json", "hello")
    ours, theirs = (json.loads(kept.run(*words)[1]) for words in (run, (*run, *ALONE)))
    assert ours["kv"] == theirs["kv"]
    assert ours["memory"]["predicted_bytes"] == theirs["memory"]["predicted_bytes"]


def test_several_at_once(kept: Staying) -> None:
    calls = [CALLS["text"], CALLS["other cache and context"]] * 2
    alone = [kept.run(*call, *ALONE)[1] for call in calls[:2]] * 2
    before = kept.about["answered"]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda call: kept.run(*call)[1], calls))
    assert found == alone and until(lambda: kept.about["answered"]) == before + 4


def test_the_keeper_has_no_cuda_and_one_thread(kept: Staying) -> None:
    """Beside the one that the driver's library, which is asked what is free, has for itself."""
    pid = kept.about["pid"]
    threads = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/comm")]
    assert len([name for name in threads if not name.startswith("cuda")]) == 1
    files = [os.readlink(f"/proc/{pid}/fd/{n}") for n in os.listdir(f"/proc/{pid}/fd")]
    assert not [each for each in files if "nvidia-uvm" in each]


@BESIDE
def test_what_is_held_is_told_and_given_back(there: Staying) -> None:
    there.run("stop", "--all")
    before = gpus()[0]
    keeper = there.keep(MODEL)
    holder, about = children(keeper)[0], there.about
    assert (about["device"], about["gpu_uuid"]) == ("cuda:0", before.uuid)
    taken = before.free - gpus()[0].free
    assert taken > 100 << 20 and abs(about["gpu_bytes"] - taken) < NEAR
    table = there.run("ps")[1].decode()
    assert "cuda:0" in table and f"{about['gpu_bytes'] / (1 << 20):.0f}"[:2] in table
    assert there.run("stop")[0] == 0
    assert not is_alive(keeper) and not is_alive(holder)
    assert before.free - gpus()[0].free < NEAR


def test_a_holder_that_is_killed_ends_its_keeper(kept: Staying) -> None:
    keeper, holder = kept.about["pid"], children(kept.about["pid"])[0]
    os.kill(holder, signal.SIGKILL)
    until(lambda: not is_alive(keeper))
    assert f"the process {holder} that had the weights on cuda:0 was ended" in _log(kept)
    assert kept.run(*CALLS["text"]) == kept.run(*CALLS["text"], *ALONE)


def test_a_command_goes_on_when_its_keeper_is_killed(kept: Staying) -> None:
    keeper, holder = kept.about["pid"], children(kept.about["pid"])[0]
    words = (*RUN, "--jsonl", "--ignore-eos", "-n", "300", "-c", "512", "Pack my box")
    process = kept.start(*words)
    assert process.stdout
    fcntl.fcntl(process.stdout, 1031, 4096)  # F_SETPIPE_SZ: it is not at its end before that is read
    first = process.stdout.readline()
    os.kill(keeper, signal.SIGKILL)
    until(lambda: not is_alive(keeper))
    assert is_alive(holder)
    lines = [first, *process.stdout]
    assert process.wait(60) == 0 and len(lines) == len(kept.run(*words, *ALONE)[1].splitlines())
    until(lambda: not is_alive(holder))


@BESIDE
def test_it_yields_when_too_little_is_free(kept: Staying) -> None:
    keeper = kept.about["pid"]
    assert kept.run(*RUN, "-n", "1", "--keep-alive", "10m", "--yield-vram", "0.999", "a")[0] == 0
    until(lambda: not is_alive(keeper) and not kept.processes())


@contextmanager
def filled(left: int) -> Iterator[None]:
    """Inside, all of the card but so many bytes is somebody else's."""
    with subprocess.Popen(
        [sys.executable, "-c", FILL, str(left)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == b"there\n"
        try:
            yield
        finally:
            process.stdin.close()
            process.wait()


@BESIDE
@pytest.mark.parametrize("other", [True, False])
def test_room_is_made_on_a_card_that_is_full(other: bool, kept: Staying) -> None:
    """For another model; and for the one that is kept, which a process of its own holds where there is no room for
    both that and a command."""
    keeper = kept.about["pid"]
    path = str(tiny.make("llama").path) if other else str(MODEL)
    words = ("run", "-m", path, "--raw", "--no-cache", "-s", "7", "-n", "4", "-c", "256", "hello")
    expected = kept.run(*words, *ALONE)[1]
    _, _, err = kept.run(*words, "--vram-limit", "16M", *ALONE)
    needed = re.search(r"needs ([\d,]+) MiB", err.decode())
    assert needed, err
    with filled((int(needed[1].replace(",", "")) + 512 - 100) << 20):
        code, out, err = kept.run(*words)
        assert (code, out) == (0, expected), err
    until(lambda: not is_alive(keeper))
