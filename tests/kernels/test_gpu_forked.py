"""Kernels are compiled by processes beside this one, which leave them on disk; what one fails at is raised here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvcli

SCRIPT = """
import os, sys
from pathlib import Path

import torch, triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvcli.kernels.gpu import forked
from kvcli.kernels.gpu.launching import Pointer, Variant

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, 2 * tl.load(x + at, at < n), at < n)

@triton.jit
def wrong(x, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK == 1, "not of this size")

class Driver:
    launcher_cls = staticmethod(lambda source, metadata: None)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 86, 32)

def variants(kernel, *blocks):
    cases = ((block, n) for block in blocks for n in (32, 48, 7))
    return [Variant(kernel, (Pointer(torch.float32, 0), n), (("BLOCK", block),)) for block, n in cases]

def kept():
    return sorted(path.name for path in Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin"))

driver.set_active(Driver())
here = []
if sys.argv[1] == "refused":
    os.fork = lambda: (_ for _ in ()).throw(OSError("no process is left"))
else:
    forked._compile = lambda variant, compile=forked._compile: here.append(os.getpid()) or compile(variant)
forked.compile_all(variants(double, 64, 128), 2)
assert kept() == ["double.cubin"] * 4, kept()  # of numbers that are multiples of 16, and others
assert not here
try:
    forked.compile_all([*variants(double, 256), *variants(wrong, 64)], 2)
except triton.CompilationError as error:
    assert "not of this size" in str(error)
else:
    raise AssertionError("nothing was raised")
assert kept() == ["double.cubin"] * 6
"""


@pytest.mark.parametrize("how", ["forked", pytest.param("refused", marks=pytest.mark.thorough)])
def test_compiled_beside_this_process(tmp_path: Path, how: str) -> None:
    """In another process: kernels that are interpreted cannot be compiled."""
    pytest.importorskip("triton")
    (tmp_path / "script.py").write_text(SCRIPT)  # Triton reads the source of a kernel
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": str(Path(kvcli.__file__).parent.parent)}
    script = [sys.executable, str(tmp_path / "script.py"), how]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


HASHED = """
import triton
from triton.runtime import driver
from triton.runtime.cache import triton_key
from kvcli.kernels.gpu import backend, compiled, wide

kernels = [x for x in vars(wide).values() if isinstance(x, triton.JITFunction)]
assert len(kernels) > 2 and not any(each.hash for each in kernels)
compiled.hash_all()
assert all(each.hash for each in kernels) and triton_key.cache_info().currsize == 1
assert driver._active is None
"""


def test_hashes_are_there_before_a_card_is_asked_anything() -> None:
    """What processes are forked from must not have used one."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(Path(kvcli.__file__).parent.parent)
    done = subprocess.run([sys.executable, "-c", HASHED], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
