"""What begins before it is needed changes nothing but when it is done."""

from __future__ import annotations

import _thread
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from conftest import PACKAGE_ROOT

from kvcli.runtime.host import preload

BEGIN = f"import sys; sys.path.insert(0, {str(PACKAGE_ROOT)!r})\n"


def _run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a process are told by Linux")
def test_libraries_of_torch_are_loaded_without_torch() -> None:
    code = """
import time
from kvcli.runtime.host import preload
preload.load_torch()
until = time.monotonic() + 60
while "libtorch_cpu" not in open("/proc/self/maps").read() and time.monotonic() < until:
    time.sleep(0.01)
print("torch" in sys.modules, "libtorch_cpu" in open("/proc/self/maps").read())
import torch
print((torch.ones(2, 3) @ torch.ones(3, 1)).tolist())
"""
    assert _run(code).split("\n")[:2] == ["False True", "[[3.0], [3.0]]"]


def test_a_model_is_opened_without_torch() -> None:
    code = f"""
from pathlib import Path
from kvcli.options import LoadOptions
from kvcli.runtime.engine.opened import Opened
opened = Opened(Path({str(tiny.make("llama").path)!r}), LoadOptions("tiny"))
print("torch" in sys.modules, len(opened.text.tokenizer.encode("hi")) > 0)
"""
    assert _run(code).strip() == "False True"


def test_what_cannot_be_loaded_is_left_to_torch(tmp_path: Path) -> None:
    done = _thread.allocate_lock()
    done.acquire()
    preload._load([(bytes(tmp_path / "libnone.so"), 2), (bytes(tmp_path / "libother.so"), 2)], done)
    assert not done.locked()


def test_a_process_may_end_while_libraries_are_loaded() -> None:
    _run("from kvcli.runtime.host import preload; preload.load_torch()")


def test_libraries_of_another_cuda_are_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'none'}:{tmp_path}")
    assert not preload._has_other_cuda()
    (tmp_path / "libnvJitLink.so.12").touch()
    assert preload._has_other_cuda()
