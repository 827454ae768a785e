"""`attend`, one call from the projections to the heads' outputs: the backends against each other, step after step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cachecases import SmallPool
from gpucases import DEVICE, MORE, OPS, error
from kernelcases import ISAS, backend, one_thread
from sealedcases import layout

from kvcli.kernels import AttentionLayer, Backend
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.window import Rolling
from kvcli.runtime.cache.layout import KVLayout
from kvcli.runtime.cache.sequence import Sequence
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

DIM, HEADS, KV_HEADS, SIZE = 64, 2, 1, 16


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


class Layer:
    """One layer of a sequence on a backend."""

    def __init__(self, ops: Backend, where: KVLayout, *weights: torch.Tensor) -> None:
        self.ops = ops
        self.seq = Sequence(SmallPool(where, device=ops.device))
        rope = RopeTable(RopeConfig(10000.0, DIM))
        bias, q_norm, k_norm = (x.to(ops.device) for x in weights)
        self.how = AttentionLayer(
            HEADS, DIM**-0.5, rope, bias=bias, q_norm=q_norm, k_norm=k_norm, eps=1e-6,
            seal=partial(seal_step, ops, rope),
        )  # fmt: skip

    def step(self, qkv: torch.Tensor) -> torch.Tensor:
        part = self.seq.reserve([0] * len(qkv))
        parts = [part.stretch(0, 0, len(qkv))]
        found = self.ops.attend(qkv.clone().to(self.ops.device), parts, self.how)
        self.seq.commit([0] * len(qkv))
        return found.cpu()


@pytest.mark.slow
@pytest.mark.parametrize("name", [ISAS[-1], "gpu"])
@pytest.mark.parametrize(
    ("types", "retention", "more"),
    [
        (("f16", "f16"), None, {}),
        pytest.param(("int8", "int4"), None, {}, marks=MORE),
        (("int8", "fp8"), Rolling(4, 16, SIZE), {}),
        pytest.param(("int6", "int8"), None, {"tail": 0}, marks=MORE),
    ],
)
def test_backends_agree(types: tuple[str, str], retention: Retention | None, more: dict[str, Any], name: str) -> None:
    """Across a first page that fills inside a step, which fixes the mean of keys, or at its end; and beyond windows."""
    where = layout(types, (DIM, DIM), KV_HEADS, SIZE, **more).evicting(retention)
    generator = torch.manual_seed(5)
    width = (HEADS + 2 * KV_HEADS) * DIM
    weights = [1 + 0.2 * torch.randn(n, generator=generator) for n in (width, DIM, DIM)]
    theirs, ours = (
        Layer(ops, where, *weights)
        for ops in (OPS, GpuBackend(torch.device(DEVICE)) if name == "gpu" else backend(name))
    )
    for t in (10, 5, 1, 1, 20):
        qkv = torch.randn(t, width, generator=generator)
        expected, found = theirs.step(qkv), ours.step(qkv)
        assert error(found, expected) < (4e-3 if name == "gpu" else 1e-3), theirs.seq.length
    assert ours.seq.bases[0][0].known == theirs.seq.bases[0][0].known == (types != ("f16", "f16"))
    assert (ours.seq.evicted > 0) == (retention is not None)
