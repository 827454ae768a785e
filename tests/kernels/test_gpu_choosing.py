"""What queries read where they do not read all, on a GPU: against the reference, from summaries to attention."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from cachecases import SmallPool
from gpucases import COMPILED, DEVICE, OPS, error, watched  # noqa: F401
from gpucases import Layer as Projections
from kernelcases import one_thread
from sealedcases import layout

from kvcli.codecs import SummaryLayout
from kvcli.kernels import AttentionLayer, Backend, Stretch
from kvcli.kernels.gpu import past, picking
from kvcli.kernels.gpu.backend import GpuBackend
from kvcli.kernels.gpu.pages import selected
from kvcli.options import AttendOptions
from kvcli.runtime.cache import attending
from kvcli.runtime.cache.eviction import Retention
from kvcli.runtime.cache.eviction.sink import POLICY
from kvcli.runtime.cache.pagelist import PoolSummaries
from kvcli.runtime.cache.sequence import Part, Sequence
from kvcli.runtime.config import RopeConfig
from kvcli.runtime.model.rope import RopeTable
from kvcli.runtime.model.sealing import seal_step

HEADS, KV_HEADS, SIZE = 4, 2, 16
TYPES = (
    (("f16", "f16"), (64, 64), {}),
    pytest.param(("int4", "int8"), (64, 64), {}, marks=COMPILED),
)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attending, "LEAST_ROWS", 4)
    monkeypatch.setattr(past, "STAGED_ROWS", 2 * SIZE)
    with one_thread():
        yield


class Layer:
    """A layer of its own over a cache that is read in part, and how much the steps so far left out."""

    def __init__(
        self, ops: Backend, types: tuple[str, str], dims: tuple[int, int], attend: AttendOptions, softcap: float,
        retention: Retention | None, **more: int,
    ) -> None:  # fmt: skip
        where = layout(types, dims, KV_HEADS, SIZE, **more).attending(attend).evicting(retention)
        self.ops, self.table = ops, RopeTable(RopeConfig(10000.0, dims[0]))
        noise = torch.manual_seed(7)
        self.width = (HEADS + KV_HEADS) * dims[0] + KV_HEADS * dims[1]
        bias = 0.5 * torch.randn(self.width, generator=noise)  # so that keys have a mean
        seal = partial(seal_step, ops, self.table)
        self.how = AttentionLayer(
            HEADS, dims[0] ** -0.5, self.table, softcap=softcap, bias=bias.to(ops.device), seal=seal
        )
        self.seq = Sequence(SmallPool(where, device=ops.device))

    def step(self, qkv: torch.Tensor, answering: bool = False) -> tuple[torch.Tensor, Part]:
        part = self.seq.reserve([0] * len(qkv), answering)
        kv = part.kv(0)
        if kv.entries.summaries is not None:
            memory = kv.entries.summaries.memory
            assert isinstance(memory, PoolSummaries)
            missing = np.flatnonzero(memory.missing & (kv.entries.summaries.addresses != 0)).tolist()
            if missing:
                angles = self.table.centres(kv) if kv.basis.centre is not None else None
                self.ops.summarize(kv, np.array(missing), angles)
                memory.settle(np.array(missing))
        out = self.ops.attend(qkv.clone().to(self.ops.device), [Stretch(0, len(qkv), kv, part.start)], self.how)
        self.seq.commit([0] * len(qkv))
        return out.cpu(), part


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("entries", "limits", "forced", "types"),
    [
        (5, (0, 5, 3), (), "f16"),
        (70, (0, 0, 0), (), "f16"),
        (300, (3, 290, 40), (3, 128, 289), "f16"),
        (1024, (0, 1024, 700), (1023,), "f16"),
        (1024, (0, 1024, 1024), (), "f16"),
        (1100, (1, 1100, 500), (7,), "int4"),
        pytest.param(16500, (0, 16500, 9000), (7,), "f16", marks=COMPILED),
    ],
)
def test_the_best_of_many(entries: int, limits: tuple[int, int, int], forced: tuple[int, ...], types: str) -> None:
    """Of equal scores the earlier ones, and what is read in any case whatever it scores; twice, as a graph does."""
    layer, (lo, hi, count) = Projections((types, types), (64, 64), KV_HEADS, HEADS, rope=False, size=2 * SIZE), limits
    layer.step(1)
    each, values = SummaryLayout(KV_HEADS, 2, 64), torch.randint(-20, 20, (entries, KV_HEADS, 2)).float()
    qkv, told = torch.zeros(1, (HEADS + 2 * KV_HEADS) * 64), torch.zeros(entries, each.bytes, dtype=torch.uint8)
    qkv[:, : HEADS * 64 : 64] = torch.tensor([1.5, 0.5, 2, 0])  # means of a head's group are 1
    codes = told[:, : each.scales].view(torch.int8).view(entries, KV_HEADS, 2, 64)
    codes[..., : 64 if types == "int4" else 1] = 127 * values.sign()[..., None]
    told[:, each.scales :].view(torch.float32)[:, : 2 * KV_HEADS] = (values.abs() / 127).flatten(1)
    told, best = told.to(DEVICE), values.amax(2).T.clone()
    addresses = told.data_ptr() + each.bytes * torch.arange(entries)
    addresses[[*forced, *range(lo), *range(hi, entries)]] = 0
    best[:, list(forced)] = torch.inf
    best[:, :lo] = best[:, hi:] = -torch.inf
    pages, table = layer.cache.on_device(0, 1, HEADS), torch.arange(100, 100 + entries).to(DEVICE)
    some = selected(addresses.to(DEVICE), torch.tensor(limits).to(DEVICE), KV_HEADS, count - len(forced) or 1)
    pages = replace(pages, lists=replace(pages.lists, table=table, selection=some), summary=each)
    expected = best.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
    for _ in range(2):
        some.chosen.zero_()
        picking.prepare(qkv.to(DEVICE), layer.how, pages)
        assert torch.equal(some.chosen[:, :count].cpu(), 100 + expected) and not some.chosen[:, count:].any()
        assert not some.done.any()


def both(*what) -> list[Layer]:
    *first, more = what
    return [Layer(ops, *first, **more) for ops in (OPS, GpuBackend(torch.device(DEVICE)))]


@pytest.mark.slow
@pytest.mark.parametrize(("types", "dims", "more"), TYPES)
def test_tokens_of_answers(types: tuple[str, str], dims: tuple[int, int], more: dict[str, int]) -> None:
    layers, noise = both(types, dims, AttendOptions(2), 0.0, None, more), torch.manual_seed(3)
    qkv, chose = torch.randn(160, layers[0].width, generator=noise), 0
    for each in layers:
        each.step(qkv)
    for _ in range(2):
        qkv = 2 * torch.randn(1, layers[0].width, generator=noise)
        (mine, part), (theirs, _) = (each.step(qkv, True) for each in layers)
        chose += part.chooses
        assert error(theirs, mine) < 8e-3, layers[0].seq.length
    assert chose == 2
    kvs = [each.seq.views(None, attending.PageChoice(160, 176, 112, 2))[0][0] for each in layers]
    for at in range(2, 4):
        mine, theirs = (codes.cpu() * scales.cpu()[..., None] for codes, scales in (kv.summary(at) for kv in kvs))
        assert error(theirs, mine) < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "dims", "attend", "softcap"),
    (
        (("f16", "f16"), (64, 64), AttendOptions(0, 0.0, 0.4, 64), 0.0),
        pytest.param(("int6", "int5"), (72, 40), AttendOptions(0, 0.6, 0.0, 64), 2.0, marks=COMPILED),
    ),
)
def test_sparse_prefill(types: tuple[str, str], dims: tuple[int, int], attend: AttendOptions, softcap: float) -> None:
    layers, noise, chose = both(types, dims, attend, softcap, None, {}), torch.manual_seed(4), 0
    for t in (80, 20):
        qkv = torch.randn(t, layers[0].width, generator=noise)
        qkv[:, : HEADS * dims[0]] += 3 * torch.randn(1, HEADS * dims[0], generator=noise)  # blocks differ in something
        (mine, part), (theirs, _) = (each.step(qkv) for each in layers)
        chose += part.chooses
        assert error(theirs, mine) < 1.5e-2, layers[0].seq.length
    assert chose == 1


@pytest.mark.slow
@COMPILED
def test_with_first_rows_kept_and_others_evicted() -> None:
    assert POLICY.retention is not None
    kept = POLICY.retention(20, 112, SIZE)
    layers, noise = both(("f16", "f16"), (64, 64), AttendOptions(2), 0.0, kept, {}), torch.manual_seed(5)
    for t in (100, 90):
        qkv = torch.randn(t, layers[0].width, generator=noise)
        for each in layers:
            each.step(qkv)
    for _ in range(2):
        qkv = 2 * torch.randn(1, layers[0].width, generator=noise)
        (mine, part), (theirs, _) = (each.step(qkv, True) for each in layers)
        assert part.chooses and error(theirs, mine) < 8e-3
