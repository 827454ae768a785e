"""The kernels for aarch64 against scalar ones: neon.c, run on such a processor or in an emulator of some. On aarch64
all other tests of kernels look at them, too."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcli.kernels.cpu import backend

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KERNELS = Path(backend.__file__).parent
HERE = os.uname().machine == "aarch64"
COMPILER = shutil.which("cc" if HERE else "aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64")
SETS = ["neoni8mm", "neondot", "neon"]

pytestmark = [pytest.mark.thorough, pytest.mark.skipif(COMPILER is None, reason="needs a compiler for aarch64")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """neon.c with the flags of the package."""
    program = tmp_path_factory.mktemp("neon") / "neon"
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["tool"]["setuptools"]
    flags = next(m for m in settings["ext-modules"] if m["name"].endswith("._cpu"))["extra-compile-args"]
    source = Path(__file__).with_name("neon.c")
    words = [str(COMPILER), *flags, "-static", f"-I{KERNELS}", str(source), "-o", str(program), "-lm"]
    subprocess.run(words, check=True)
    return program


def run(*words: str | Path) -> list[str]:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.skipif(EMULATOR is None, reason="needs qemu-aarch64")
@pytest.mark.parametrize("cpu, best", (("max", 0), ("cortex-a76", 1), ("cortex-a72", 2)))
def test_kernels_of_processors(compiled: Path, cpu: str, best: int):
    """The best instruction set is chosen, and all that the processor has give what scalar kernels do."""
    assert run(str(EMULATOR), "-cpu", cpu, compiled) == [SETS[best], *SETS[best:]]


@pytest.mark.skipif(not HERE, reason="needs an aarch64 processor")
def test_kernels_here(compiled: Path):
    best, *checked = run(compiled)
    assert checked == SETS[SETS.index(best) :]
