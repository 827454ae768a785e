"""Prefill over a long past: pages read once into rows of float16, against the reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from cachecases import SmallPool
from gpucases import COMPILED, DEVICE, MORE, OPS, error
from kernelcases import one_thread
from sealedcases import layout

from kvcli.kernels import AttentionLayer, Backend, Stretch
from kvcli.kernels.gpu import past
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.pages import lists_of_step
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

HEADS, KV_HEADS, SIZE = 4, 2, 16


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(past, "LEAST_QUERIES", 4)
    monkeypatch.setattr(past, "LEAST_ROWS", SIZE)
    monkeypatch.setattr(past, "STAGED_ROWS", 2 * SIZE)
    with one_thread():
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "dims", "rope", "more"),
    [
        pytest.param(("f16", "f16"), (64, 64), True, {}, marks=MORE),
        (("int4", "int8"), (64, 64), True, {}),
        pytest.param(("int6", "int5"), (72, 40), True, {}, marks=COMPILED),
        pytest.param(("fp8", "f32"), (64, 64), True, {}, marks=COMPILED),
        pytest.param(("int8", "fp8_e5m2"), (64, 64), False, {"tail": 0}, marks=COMPILED),
        pytest.param(("bf16", "int4"), (64, 128), True, {"sinks": 0}, marks=COMPILED),
        (("f16", "f16"), (40, 24), True, {}),
    ],
)
def test_as_the_reference(types: tuple[str, str], dims: tuple[int, int], rope: bool, more: dict[str, int]) -> None:
    where, generator = layout(types, dims, KV_HEADS, SIZE, **more), torch.manual_seed(5)
    table = RopeTable(RopeConfig(10000.0, dims[0])) if rope else None
    width = (HEADS + KV_HEADS) * dims[0] + KV_HEADS * dims[1]
    bias = torch.randn(width, generator=generator)  # so that keys have a mean

    def layer(ops: Backend) -> tuple[Sequence, AttentionLayer]:
        how = AttentionLayer(
            HEADS, dims[0] ** -0.5, table, bias=bias.to(ops.device), seal=partial(seal_step, ops, table)
        )
        return Sequence(SmallPool(where, device=ops.device)), how

    gpu, apart = GpuBackend(torch.device(DEVICE)), 0
    both = [(ops, *layer(ops)) for ops in (OPS, gpu)]
    for t in (50, 5, 21):
        qkv, found = torch.randn(t, width, generator=generator), []
        for ops, seq, how in both:
            part = seq.reserve([0] * t)
            kv = part.kv(0)
            found.append(ops.attend(qkv.clone().to(ops.device), [Stretch(0, t, kv, part.start)], how).cpu())
            if ops is gpu:
                lo, hi = lists_of_step(kv).past
                apart += hi - lo
            seq.commit([0] * t)
        assert error(found[1], found[0]) < 4e-3, both[0][1].length
    assert apart >= 4 and past.library_takes(gpu.device, *dims)


def test_where_the_library_computes_something_else_it_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    device, right = torch.device(DEVICE), past.library
    assert past.library_takes.__wrapped__(device, 24, 40)
    monkeypatch.setattr(past, "library", lambda q, k, v: (2 * right(q, k, v)[0], right(q, k, v)[1]))
    assert not past.library_takes.__wrapped__(device, 24, 40)
