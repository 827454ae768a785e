"""`--device`: names, imitated machines whose GPU can and cannot be used, and how it is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from conftest import KvHere

from kvcli.errors import DeviceError, UsageError
from kvcli.runtime.host import device, machine
from kvcli.runtime.host.device import Device, choose, parse_device
from kvcli.runtime.host.memory import CPU, CUDA, Memory

NAMES = ("NVIDIA H100 80GB HBM3", "Tesla T4", "NVIDIA A100")
FACTS = {NAMES[0]: ("580.1", (9, 0)), NAMES[1]: ("580.1", (7, 5))}


class Machine:
    """A machine with every piece that a GPU takes; a test takes some away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, headers: Path) -> None:
        self.cards, self.facts, self.triton = list(NAMES[:2]), dict(FACTS), True
        self.programs, self.cuda = {"gcc"}, SimpleNamespace(capability=(8, 0), count=3, fails="")
        (headers / "Python.h").touch()
        set_ = monkeypatch.setattr
        set_(machine, "gpus", lambda: [Memory(CUDA, name, 1 << 34, 1 << 33, "nvml") for name in self.cards])
        set_(machine, "_driver_facts", lambda: self.facts)
        set_(device, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=self._find_spec)))
        set_(device, "shutil", SimpleNamespace(which=lambda name: name if name in self.programs else None))
        set_(device, "sysconfig", SimpleNamespace(get_paths=lambda: {"include": str(headers)}))
        set_(torch.version, "cuda", "13.0")
        set_(torch.cuda, "device_count", lambda: self.cuda.count)
        set_(torch.cuda, "init", self._init)
        set_(torch.cuda, "get_device_capability", lambda index: self.cuda.capability)
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)

    def _find_spec(self, name: str) -> Any:
        assert name == "triton"
        return self if self.triton else None

    def _init(self) -> None:
        if self.cuda.fails:
            raise RuntimeError(self.cuda.fails)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("name", "parsed"),
    [("auto", ("auto", 0)), ("cpu", (CPU, 0)), ("cuda", (CUDA, 0)), ("cuda:0", (CUDA, 0)), ("cuda:12", (CUDA, 12))],
)
def test_names(name: str, parsed: tuple[str, int]) -> None:
    assert parse_device(name) == parsed


@pytest.mark.parametrize("name", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:x", "cuda:99999", "cpu:0", "cuda:1 "])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="`device`"):
        choose(name)


def test_a_gpu_that_can_be_used(here: Machine) -> None:
    expected = Device(CUDA, 0, NAMES[0])
    assert choose("auto") == choose("cuda") == choose("cuda:0") == expected and str(expected) == "cuda:0"
    assert choose("cpu") == Device(CPU) and str(Device(CPU)) == "cpu"


def test_auto_takes_the_first_that_can_be_used(here: Machine) -> None:
    here.cards = [NAMES[1], NAMES[2]]
    assert choose("auto") == Device(CUDA, 1, NAMES[2])  # the driver tells no capability, torch does


def test_a_gpu_that_is_too_old(here: Machine) -> None:
    here.cards = [NAMES[1]]
    found = choose("auto")
    reason = "Tesla T4 cannot be used: compute capability 7.5 is below 8.0"
    assert (found.kind, found.notice) == (CPU, f"runs on the CPU; {reason}")
    with pytest.raises(DeviceError, match=reason) as refused:
        choose("cuda")
    assert refused.value.exit_code == 3
    here.cards, here.cuda.capability = [NAMES[2]], (7, 0)
    assert "7.0 is below 8.0" in choose("auto").notice


def test_pieces_that_are_missing(here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def reason() -> str:
        with pytest.raises(DeviceError) as refused:
            choose("cuda:0")
        assert choose("auto").kind == CPU and refused.value.message in choose("auto").notice
        return refused.value.message

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in reason()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    here.cuda.count, here.cuda.fails = 0, "the driver is too old\nfor this torch"
    assert reason().endswith(": the driver is too old")
    (tmp_path / "Python.h").unlink()
    assert "Python.h is missing" in reason()
    here.programs = set()
    assert "neither CC nor gcc nor clang" in reason()
    monkeypatch.setenv("CC", "mycc")
    assert "'mycc'" in reason()
    here.triton = False
    assert "triton is not installed" in reason()


def test_a_compiler_of_another_name(here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    here.programs = {"clang"}
    assert choose("cuda").kind == CUDA
    here.programs = {"mycc"}
    monkeypatch.setenv("CC", "mycc")
    assert choose("cuda").kind == CUDA


def test_without_a_gpu(here: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here.cards = []
    assert choose("auto") == Device(CPU)
    monkeypatch.setattr(device, "_DEVICE_FILES", (str(tmp_path / "none"),))
    with pytest.raises(DeviceError, match="driver is not loaded"):
        choose("cuda")
    monkeypatch.setattr(device, "_DEVICE_FILES", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(DeviceError, match="does not answer"):
        choose("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES is ''"):
        choose("cuda")


def test_a_number_beyond_the_last(here: Machine) -> None:
    with pytest.raises(DeviceError, match="no such GPU") as refused:
        choose("cuda:2")
    assert refused.value.hint == "devices: cpu, cuda:0, cuda:1"


@pytest.mark.slow
def test_on_the_command_line(here: Machine, kv_here: KvHere) -> None:
    flags = ("-m", str(tiny.make("llama").path), "-n", "2", "--no-stdin", "--raw", "--temp", "0", "hi")
    code, out, err = kv_here("run", "--device", "gpu", *flags)
    assert (code, out) == (2, "") and "--device must be auto, cpu, cuda or cuda:N, not 'gpu'" in err
    here.cards = [NAMES[1]]
    code, out, err = kv_here("run", "--device", "cuda", *flags)
    assert (code, out) == (3, ""), err
    assert "Tesla T4 cannot be used: compute capability 7.5 is below 8.0" in err
    code, out, err = kv_here("run", "-v", *flags)
    assert code == 0 and "runs on the CPU; Tesla T4 cannot be used" in err
    assert kv_here("run", "-v", "--device", "cpu", *flags)[:2] == (0, out)
