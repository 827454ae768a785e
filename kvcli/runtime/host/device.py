"""Which device computes: what `--device` names, and whether this machine's GPUs can be used. torch comes in late.

A GPU is used where everything it takes is there: the driver, a torch built for CUDA, Triton, and the C compiler that
Triton calls when it first launches a kernel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcli.errors import DeviceError, UsageError
from kvcli.runtime.host import machine
from kvcli.runtime.host.memory import CPU, CUDA

AUTO = "auto"
_NAME = re.compile(r"(auto|cpu)|cuda(?::(\d{1,4}))?", re.ASCII)
LEAST_CAPABILITY = (8, 0)
_DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")


@dataclass(frozen=True)
class Device:
    """`index`: as torch counts, 0 for the CPU. `notice`: why "auto" leaves a GPU unused, "" = nothing to say."""

    kind: str  # CPU or CUDA
    index: int = 0
    name: str = CPU  # as the driver calls it
    notice: str = ""

    def __str__(self) -> str:
        """As torch and --device write it."""
        return CPU if self.kind == CPU else f"{CUDA}:{self.index}"


def parse_device(name: str) -> tuple[str, int]:
    """ "auto", "cpu", "cuda" or "cuda:1" -> kind (AUTO, CPU, CUDA) and index. Raises UsageError."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"`device` must be auto, cpu, cuda or cuda:N, not '{name}'")
    return match[1] or CUDA, int(match[2] or 0)


def choose(name: str) -> Device:
    """The device of that name; "auto" is the first GPU that can be used, else the CPU.

    Raises UsageError for a name that is none, DeviceError where a GPU is asked for and cannot be used.
    """
    kind, index = parse_device(name)
    if kind == CPU:
        return Device(CPU)
    cards = machine.graphics()
    if cards:  # torch must count as NVML does
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if kind == AUTO:
        return _first_usable(cards)
    check_there(name, index, len(cards))
    reason = why_not(cards[index])
    if reason:
        raise DeviceError(f"{cards[index]['name']} cannot be used: {reason}", "`device=cpu` runs without it")
    return _device(cards[index])


def check_there(name: str, index: int, count: int) -> None:
    """Raises DeviceError unless GPU `index`, which --device calls `name`, is one of `count`."""
    if not count:
        raise DeviceError(f"`device={name}`: {why_no_gpu()}", "`device=cpu` needs none")
    if index >= count:
        known = ", ".join([CPU, *(f"{CUDA}:{i}" for i in range(count))])
        raise DeviceError(f"`device={name}`: there is no such GPU", f"devices: {known}")


def promising(name: str) -> int | None:
    """The GPU that `choose` will probably take, found without torch; None = none, or no GPU is asked for."""
    kind, index = parse_device(name)
    cards = machine.graphics() if kind != CPU else []
    for card in cards if kind == AUTO else cards[index : index + 1]:
        capability = _capability(card)
        if capability is not None and capability >= LEAST_CAPABILITY and not _triton_reason():
            return int(card["index"])
    return None


def _first_usable(cards: list[dict[str, Any]]) -> Device:
    reasons = []
    for card in cards:
        reason = why_not(card)
        if not reason:
            return _device(card)
        reasons.append(f"{card['name']} cannot be used: {reason}")
    return Device(CPU, notice=f"runs on the CPU; {reasons[0]}" if reasons else "")


def _device(card: dict[str, Any]) -> Device:
    return Device(CUDA, card["index"], card["name"])


def why_no_gpu() -> str:
    """Why `machine.graphics` is empty."""
    if not any(Path(path).exists() for path in _DEVICE_FILES):
        return "there is no NVIDIA GPU, or its driver is not loaded"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is '{hidden}', which leaves no GPU"
    return "the NVIDIA driver does not answer"


def why_not(card: dict[str, Any]) -> str:
    """Why this card (of `machine.graphics`) cannot be used, "" = it can. Imports torch where all else is there."""
    capability = _capability(card)
    if capability is not None and capability < LEAST_CAPABILITY:
        return _too_old(capability)
    return _triton_reason() or _torch_reason(card["index"], capability)


def _capability(card: dict[str, Any]) -> tuple[int, int] | None:
    text = card["compute_capability"]
    if text is None:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


def _too_old(capability: tuple[int, int]) -> str:
    return "compute capability {}.{} is below {}.{}".format(*capability, *LEAST_CAPABILITY)


def _triton_reason() -> str:
    """What Triton lacks. It takes $CC, else gcc, else clang, and compiles against Python's headers."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    named = os.environ.get("CC")
    if named is not None:
        if shutil.which(named) is None:
            return f"Triton needs a C compiler, and CC names none that is here: '{named}'"
    elif shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler: neither CC nor gcc nor clang is here"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"Triton needs Python's C headers (python3-dev): {header} is missing"
    return ""


def _torch_reason(index: int, capability: tuple[int, int] | None) -> str:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    try:
        if torch.cuda.device_count() <= index:
            torch.cuda.init()  # says why
            return f"torch {torch.__version__} sees {torch.cuda.device_count()} GPUs"
        if capability is None:
            capability = torch.cuda.get_device_capability(index)
    except (RuntimeError, AssertionError) as error:  # torch raises either
        return f"torch {torch.__version__}: {error}".partition("\n")[0]
    return "" if capability >= LEAST_CAPABILITY else _too_old(capability)
