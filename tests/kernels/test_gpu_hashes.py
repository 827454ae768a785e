"""What was compiled is found again, in whatever order kernels are launched: their hashes do not depend on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcli

SCRIPT = """
import os, random, sys
from importlib import import_module
from pathlib import Path

import triton
from triton.runtime.jit import DependenciesFinder

import kvcli.kernels.gpu as package
from kvcli.kernels.gpu.launching import hash_kernel

merged = DependenciesFinder._update_hash

def before_3_9(self, called):
    known = called.used_global_vals
    called.cache_key
    found, called.used_global_vals = called.used_global_vals, known
    merged(self, called)
    called.used_global_vals = found

DependenciesFinder._update_hash = before_3_9
names = sorted(path.stem for path in Path(package.__file__).parent.glob("*.py"))
modules = [import_module(f"kvcli.kernels.gpu.{name}") for name in names if name != "__init__"]
found = {x.fn: x for module in modules for x in vars(module).values() if isinstance(x, triton.JITFunction)}

def show(seed, whose):
    kernels = list(found.values())
    random.Random(seed).shuffle(kernels)
    for kernel in kernels:
        hash_kernel(kernel) if whose == "ours" else kernel.cache_key
    print(sorted((each.fn.__module__, each.fn.__name__, each.cache_key) for each in kernels), flush=True)

for seed, whose in zip(*[iter(sys.argv[1:])] * 2):
    child = os.fork()  # nothing is hashed there
    if not child:
        show(int(seed), whose)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_any_order_gives_the_same() -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kvcli.__file__).parent.parent)

    def hashed(hashseed: str, *cases: str) -> list[bytes]:
        words = [sys.executable, "-c", SCRIPT, *cases]
        with_seed = env | {"PYTHONHASHSEED": hashseed}
        return subprocess.run(words, env=with_seed, stdout=subprocess.PIPE, timeout=200).stdout.splitlines()

    ours, theirs, other = hashed("1", "1", "ours", "1", "triton's", "2", "triton's")
    (again,) = hashed("2", "2", "ours")
    assert ours == again and ours.count(b"'kvcli.") > 100
    assert theirs != other  # what this is about
