"""Kernels of a GPU compile for every card that kv takes, and fit it; see benchmarks/targets.py, which has the rest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import kvcli

CARDS = {80, 86, 89, 90, 100, 120}


@pytest.mark.slow
@pytest.mark.long
def test_every_kernel_fits_a_card_of_each_kind(tmp_path: Path) -> None:
    """In another process: kernels that are interpreted cannot be compiled."""
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(kvcli.__file__).parent.parent)}
    script = [sys.executable, str(ROOT / "benchmarks/targets.py"), "--sample"]
    done = subprocess.run(script, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])["launches"]
    assert {row["sm"] for row in found} == CARDS
    compiled = {row["kernel"].partition(" ")[0] for row in found}
    assert compiled == launched_kernels()
    attention = {row["sm"]: row["registers"] for row in found if row["kernel"].startswith("_attend ")}
    assert len(attention) == 2 and all(100 < each <= 255 for each in attention.values())


def launched_kernels() -> set[str]:
    """The names of all kernels that the package launches."""
    files = (Path(kvcli.__file__).parent / "kernels/gpu").glob("*.py")
    launch = re.compile(r"^(?!\s*def).*(?<!_)launch\((\w+), ", re.MULTILINE)
    return {name for file in files for name in launch.findall(file.read_text())}
