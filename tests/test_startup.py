"""What makes the start and the end of `kv` short changes nothing else."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from typing import Any

import pytest
import tiny
from conftest import PACKAGE_ROOT

from kvcli import startup

BEGIN = f"import json, sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\nfrom kvcli import startup\n"


def _json_of(code: str) -> Any:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_this_torch_was_tried() -> None:
    import torch

    assert torch.__version__
    assert startup._known_torch(), "try the tests of this file with it, then raise BEFORE"


@pytest.mark.parametrize("version", ["2.10.1", "2.99.0", "3.0", "nightly"])
def test_other_versions_are_imported_whole(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "__version__", version)
    assert not startup._known_torch()


LOOK = "import torch\nnames = sorted(dir(torch))\n"
DEFER = "deferring = startup.take_process()\n"
WAITING = "sorted(module.__name__ for module in deferring.waiting)"


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Of a torch that is imported whole."""
    return _json_of(BEGIN + LOOK + "print(json.dumps(names))")


@pytest.mark.parametrize(
    "use",
    [
        pytest.param("torch.distributions.Normal(0.0, 1.0)", marks=pytest.mark.thorough),
        pytest.param(  # imports torch._dynamo
            "torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5).step()", marks=pytest.mark.thorough
        ),
        pytest.param("len(torch.utils.data.DataLoader([1, 2, 3], batch_size=2))", marks=pytest.mark.thorough),
        "torch._meta_registrations.meta_mm",
        pytest.param("__import__('torch._dynamo')", marks=pytest.mark.thorough),
        "torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])",
    ],
)
def test_parts_that_are_deferred_work_when_they_are_used(use: str, names: list[str]) -> None:
    code = f"{BEGIN}{DEFER}{LOOK}before = {WAITING}\n{use}\n"
    found, before, after, left = _json_of(f"{code}print(json.dumps([names, before, sorted(dir(torch)), {WAITING}]))")
    assert set(names) >= set(found) >= {name for name in names if not name.startswith("_")}
    assert set(after) >= set(names) and left == []
    assert {"torch._meta_registrations", "torch.optim", "torch.distributions", "torch.utils.data"} <= set(before)


def test_a_run_needs_no_deferred_part(kv_env: dict[str, str]) -> None:
    code = (
        f"{BEGIN}import atexit; take = startup.take_process\n"
        "def noted(): global deferring; deferring = take()\n"
        "startup.take_process = noted\n"
        f"atexit.register(lambda: print(json.dumps({WAITING}), file=sys.stderr))\n"
        f"sys.argv = ['kv', 'run', 60 * 'Hello ', '-m', {str(tiny.make('llama').path)!r}, '-n', '3', '--raw']\n"
        "sys.argv += ['-c', '512', '--page-size', '16', '--evict', 'random', '--budget', '30%']\n"
        "from kvcli.cli.main import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=kv_env)
    assert result.returncode == 0 and "torch.optim" in json.loads(result.stderr.splitlines()[-1]), result.stderr


@pytest.mark.parametrize("alone", [True, False])
def test_garbage_is_sought_behind_it(alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "_alone", alone)
    with startup.uncollected():
        assert gc.isenabled() == (not alone)
    assert gc.isenabled()
    gc.unfreeze()


def test_the_end_waits_for_threads_and_keeps_the_code_and_what_was_written(kv_env: dict[str, str]) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r}); sys.argv = ['kv', 'nonsense']\n"
        "import atexit, threading, time\n"
        "from kvcli import __main__ as kv\n"
        "from kvcli.cli import main as cli\n"
        "def run():\n"
        "    threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "    atexit.register(print, 'atexit')\n"
        "    sys.exit(7)\n"
        "cli.main = run\n"
        "kv.main()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=kv_env)
    assert (result.returncode, result.stdout.split(), result.stderr) == (7, ["thread", "atexit"], "")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is resident")
def test_code_that_ran_at_the_start_is_given_back() -> None:
    """Only in a process that is ours alone; what is used of it afterwards works."""
    found = _json_of(f"""{BEGIN}import torch
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
all = [resident()]
startup.release_code()
all.append(resident())
startup.take_process()
startup.release_code()
all.append(resident())
print(json.dumps(all + [float(torch.ones(300, 300).matmul(torch.ones(300, 2)).sum())]))""")
    whole, others, ours, product = found
    assert abs(others - whole) <= 2
    assert ours <= whole - 20
    assert product == 300 * 300 * 2


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is mapped")
def test_code_that_was_changed_in_memory_stays() -> None:
    """As a debugger changes it, or relocations would."""
    before, changed, after = _json_of(f"""{BEGIN}import ctypes, mmap, torch
startup.take_process()
first = next(first for first, _ in reversed(list(startup._code_of_torch())))
libc, there = ctypes.CDLL(None), ctypes.c_ubyte.from_address(first)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
found = [there.value]
assert libc.mprotect(first, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) == 0
there.value ^= 1
assert libc.mprotect(first, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0
found.append(there.value)
startup.release_code()
print(json.dumps([*found, there.value]))""")
    assert changed == after != before


def test_what_was_made_uncollected_is_freed_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Knot:
        itself: Knot

    monkeypatch.setattr(startup, "_alone", object())
    with startup.uncollected():
        knot = Knot()
        knot.itself = knot
    gone = weakref.ref(knot)
    del knot
    gc.collect()
    assert gone() is not None
    startup.collect()
    assert gone() is None
