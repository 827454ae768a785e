"""A decoder that another process takes is the one that was loaded, with its weights where they are."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from archcases import IDS
from gpucases import DEVICE, OPS

from kvcli.errors import NotTaken
from kvcli.kernels import Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.options import LoadOptions
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.pool import PagePool
from kvcli.runtime.cache.sequence import Sequence, Step
from kvcli.runtime.config import ModelConfig
from kvcli.runtime.engine import held
from kvcli.runtime.engine.held import HeldModel
from kvcli.runtime.engine.opened import Opened
from kvcli.runtime.formats.gguf import GGUFFile
from kvcli.runtime.host.cudadriver import Driver, Failed
from kvcli.runtime.host.memory import CUDA, Memory
from kvcli.runtime.model import handover
from kvcli.runtime.model.archs import from_gguf
from kvcli.runtime.model.decoder import Decoder
from kvcli.runtime.model.handover import describe, take
from kvcli.runtime.model.loading import load, rope_factors
from kvcli.runtime.model.rope import RopeTable, RopeTables
from kvcli.runtime.model.weights import Weights

BLOCK = 1 << 24  # "allocations" of main memory are those runs of addresses
GPU = torch.device(DEVICE)
pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="main memory is in the place of a GPU's")


class Card(Driver):
    """Main memory in the place of a GPU's. It refuses what is in `refuses`."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses

    def open(self, index: int) -> None:
        assert index == 0

    def range_of(self, address: int) -> tuple[int, int]:
        return address // BLOCK * BLOCK, 1 << 30

    def handle_of(self, base: int) -> bytes:
        if "handle" in self.refuses:
            raise Failed("cuIpcGetMemHandle gives 1")
        return b"%d" % base

    def opened(self, handle: bytes) -> int:
        if "open" in self.refuses:
            raise Failed("cuIpcOpenMemHandle_v2 gives 1")
        return int(handle)


@pytest.fixture(autouse=True)
def main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(handover, "_bytes_at", bytes_at)


@functools.cache
def opened(path: Path) -> tuple[ModelConfig, Weights]:
    file = GGUFFile.open(path)
    return from_gguf(file.metadata, {name: tensor.shape for name, tensor in file.tensors.items()}), Weights(file)


def ropes(config: ModelConfig, weights: Weights) -> RopeTables:
    return RopeTables(config, rope_factors(config, weights))


def _alike(a: Any, b: Any, own: dict[int, Any], path: str = "") -> int:
    """How many tensors two objects have in the same memory, which are alike; `own`: what the second one has of its own,
    by the identity of what stands there in the first one."""
    if id(a) in own:
        assert b is own[id(a)], path
        return 0
    assert type(a) is type(b), path
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), path
        assert not a.numel() or a.data_ptr() == b.data_ptr(), path
        assert torch.equal(a, b), path
        return 1
    if isinstance(a, functools.partial):
        return _alike((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), own, path)
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        return sum(_alike(x, b[name], own, f"{path}[{name}]") for name, x in a.items())
    if isinstance(a, tuple | list):
        assert len(a) == len(b), path
        return sum(_alike(x, y, own, f"{path}[{i}]") for i, (x, y) in enumerate(zip(a, b, strict=True)))
    if isinstance(a, np.ndarray):
        assert np.array_equal(a, b), path
        return 0
    assert not isinstance(a, RopeTable | RopeTables | ModelConfig | GpuBackend), path
    if dataclasses.is_dataclass(a):
        return sum(
            _alike(getattr(a, f.name), getattr(b, f.name), own, f"{path}.{f.name}") for f in dataclasses.fields(a)
        )
    if hasattr(a, "__dict__") and not callable(a):
        return _alike(vars(a), vars(b), own, path)
    assert a == b, path
    return 0


@pytest.mark.parametrize("variant", tiny.VARIANTS)
def test_decoders_of_every_family_are_taken_as_they_are(variant: str) -> None:
    config, weights = opened(tiny.make(variant).path)
    ops, theirs = GpuBackend(GPU), GpuBackend(GPU)
    with torch.inference_mode():
        decoder = load(config, weights, ops)
        described = describe(decoder, Card())
        assert b"RopeConfig" not in described and len(described) < 1 << 18
        at, tables = config.at(config.context_length + 1), ropes(config, weights)
        taken = take(described, at, theirs, tables, Card())
    own = {id(decoder.ops): theirs, id(decoder.config): at, id(decoder.ropes): tables}
    there = tables.named(config)
    own |= {id(table): there[name] for name, table in decoder.ropes.named(config).items()}
    assert _alike(vars(decoder), vars(taken), own) > 2 * config.n_layers
    assert theirs.placed == ops.placed


def _logits(decoder: Decoder, config: ModelConfig) -> torch.Tensor:
    seq = Sequence(PagePool(KVLayout.build(config, "f32", "f32", 16)))
    with torch.inference_mode():
        return decoder.logits(decoder.hidden(Step((seq.reserve(IDS[:40]),))))


def test_angles_are_those_of_the_context_of_who_takes_it() -> None:
    """Not of the context that the other process loaded it for."""
    config, weights = opened(tiny.make("phi3-long").path)
    short, long = config.at(8), config.at(config.context_length)
    described = describe(load(short, weights, OPS), None)
    taken = take(described, long, OPS, ropes(long, weights), None)
    expected = _logits(load(long, weights, OPS), long)
    assert torch.equal(_logits(taken, long), expected)
    assert not torch.equal(_logits(load(short, weights, OPS), short), expected)


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> tuple[HeldModel, ModelConfig, Weights]:
    path = tiny.make("gemma3").path
    config, weights = opened(path)
    described = describe(load(config, weights, GpuBackend(GPU)), Card())
    return HeldModel(Opened(path, LoadOptions(str(path))), 7, "cuda:0", described, 100), config, weights


@pytest.mark.parametrize("refused", ["", "open"])
def test_what_cannot_be_opened_is_refused_in_one_line(
    refused: str, model: tuple[HeldModel, ModelConfig, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, config, weights = model
    monkeypatch.setattr(held, "Driver", lambda: Card(refused))
    ops: Backend = GpuBackend(GPU)
    if not refused:
        assert made.decoder(config, weights, ops).ops is ops
        return
    with pytest.raises(NotTaken, match="on cuda:0 cannot be opened: cuIpcOpenMemHandle_v2 gives 1"):
        made.decoder(config, weights, ops)


def test_what_cannot_be_lent_is_refused() -> None:
    config, weights = opened(tiny.make("gemma3").path)
    with pytest.raises(Failed, match="cuIpcGetMemHandle"):
        describe(load(config, weights, GpuBackend(GPU)), Card("handle"))


def test_a_plan_counts_weights_once(model: tuple[HeldModel, ModelConfig, Weights]) -> None:
    cards = [Memory(CUDA, "a card", 1000, free, "nvml", f"GPU-{free}") for free in (300, 500)]
    assert [each.free for each in model[0].beside(cards)] == [400, 500]
    assert model[0].beside([]) == []
