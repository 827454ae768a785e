"""The mass of attention on a GPU, against that of the reference over the same pages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from gpucases import DEVICE, OPS, GpuCache
from kernelcases import one_thread
from test_gpu_attention import written

from kvcli.kernels import MASS_UNIT, PagedKV, Watch
from kvcli.kernels.gpu import mass
from kvcli.kernels.gpu.attention import LOG2_E, Partials, attend
from kvcli.kernels.gpu.mass import add_mass


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("types", "kv_heads", "heads", "rows", "last", "window", "cap", "noted", "with_sinks", "largest"),
    [
        (("f16", "f16"), 2, 4, 75, 1, 0, 0.0, 1, False, False),
        (("int4", "int8"), 1, 3, 90, 40, 0, 0.0, 7, True, True),
        (("fp8", "int4"), 2, 2, 70, 33, 20, 5.0, 33, False, True),
        (("int8", "f16"), 1, 2, 130, 1, 0, 0.0, 1, True, False),
    ],
)
def test_mass_is_that_of_the_reference(types, kv_heads, heads, rows, last, window, cap, noted, with_sinks, largest):
    cache = GpuCache(types, (64, 64), kv_heads, 16)
    start, sinks = written(cache, rows, last), None
    pages = cache.on_device(start, last, heads, window)
    q, queries = cache.queries(3 * torch.randn(last, heads, 64, generator=torch.manual_seed(2)), pages)
    if with_sinks:
        sinks = torch.randn(heads, generator=torch.manual_seed(3))
    expected, found = torch.zeros(2, kv_heads, rows, dtype=torch.int64)
    watch = Watch(rows - noted, expected, largest=largest)
    OPS.attention(q, cache.kv, start, window, 64**-0.5, cap, cache.angles, None, sinks, watch)
    on_device, device_sinks = found.to(DEVICE), None if sinks is None else sinks.to(DEVICE)
    partials = attend(queries, pages, window, cap)
    watch = Watch(rows - noted, on_device, largest=largest)
    add_mass(queries, cache.there, pages, partials, watch, start, window, cap, device_sinks)
    mine, theirs = on_device.cpu().double() / MASS_UNIT, expected.double() / MASS_UNIT
    torch.testing.assert_close(mine, theirs, rtol=0.02, atol=0.004)
    if sinks is None and not largest:
        assert (mine.sum(1) / (noted * heads // kv_heads) - 1).abs().max() < 1e-3


def exact(
    kv: PagedKV, q: torch.Tensor, start: int, watch: Watch, window: int = 0, softcap: float = 0.0, angles=None
) -> torch.Tensor:
    """Fill `watch.mass` by float64 over decoded rows, by q [T, heads, dim_k] whose scores are exponents of 2, and as
    many turned ones behind them; returns the logarithms to base 2 of the sums, [T, heads]."""
    heads, n, found = q.shape[1], len(q) // 2, []
    for of in kv.classes:
        e, r = of.entries, of.record
        for at in range(len(e)):
            k = torch.zeros(r.kv_heads, r.page_size, r.dim_k, dtype=torch.float64)
            lo, hi = int(e.lo[at]), int(e.hi[at])
            k[:, lo:hi] = of.rows(e.memory[at], lo, hi)[0].double()
            centre = of.centre(at, angles)
            k = k if centre is None else k + centre.double()
            k = k.repeat_interleave(heads // r.kv_heads, 0)
            s = torch.einsum("thd,hnd->htn", q.double().split(n)[int(e.turned[at])], k)
            if softcap:
                s = softcap * torch.tanh(s / softcap)
            query, slot = torch.arange(start, start + n)[:, None], torch.arange(r.page_size)
            row = int(e.first[at]) + slot
            seen = (slot >= lo) & (slot < hi) & (row <= query) & (row > query - (window or start + n))
            seen = seen & (query >= int(e.since[at])) & (query < int(e.until[at]))
            found.append((int(e.first[at]), s.masked_fill(~seen, -torch.inf)))
    weights = torch.stack([s.exp2().sum(2) for _, s in found]).sum(0)
    for first, s in found:
        p = (s.exp2() / weights[:, :, None])[:, max(watch.since - start, 0) :]
        numbers = (p * MASS_UNIT).round().long().unflatten(0, (kv.record.kv_heads, -1))
        some = watch.mass[:, first : first + s.shape[2]]
        got = (numbers.amax((1, 2)) if watch.largest else numbers.sum((1, 2)))[:, : some.shape[1]]
        some.copy_(torch.maximum(some, got) if watch.largest else some + got)
    return weights.log2().T


def partials_of(weights: torch.Tensor) -> Partials:
    """Two partial results of each query, of which the last one saw nothing."""
    tops = torch.stack((weights - 1, torch.full_like(weights, torch.nan)), 2).float()
    totals = torch.tensor([2.0, 0.0]).expand(tops.shape).contiguous()
    return Partials(torch.empty(0), tops.to(DEVICE), totals.to(DEVICE))


@pytest.mark.parametrize(
    ("types", "dim", "kv_heads", "heads", "size", "rows", "last", "window", "cap", "since", "cut", "largest"),
    [
        ("f16", 64, 2, 8, 32, 450, 400, 0, 0.0, 0, False, False),
        ("int4", 64, 1, 3, 16, 330, 300, 0, 0.0, 40, False, False),
        ("int8", 80, 2, 4, 64, 600, 333, 150, 0.0, 0, False, False),
        ("f16", 64, 1, 7, 16, 340, 310, 0, 30.0, 100, True, False),
        ("int6", 72, 1, 2, 64, 500, 70, 0, 0.0, 0, True, True),
        ("bf16", 256, 1, 1, 128, 400, 200, 90, 0.0, 0, True, False),
        ("fp8", 64, 1, 72, 16, 70, 20, 0, 0.0, 0, False, False),
    ],
)  # fmt: skip
def test_mass_of_many_queries(
    monkeypatch, types, dim, kv_heads, heads, size, rows, last, window, cap, since, cut, largest
):
    """Against float64, over pages in several pieces; `cut`: entries that show some of their slots, to some queries, and
    some of them to turned ones."""
    monkeypatch.setattr(mass, "STAGED_ROWS", 256)
    cache = GpuCache((types, "f16"), (dim, dim), kv_heads, size)
    start, generator = written(cache, rows, last), np.random.default_rng(1)
    if cut:
        e, n = cache.kv.entries, len(cache.kv.entries)
        lo = np.minimum(generator.integers(0, size // 2, n), e.hi - 1)
        hi = np.where(generator.integers(0, 2, n), np.minimum(e.hi, lo + size // 2), e.hi)
        until = np.where(np.arange(n) % 3 == 1, np.minimum(e.until, start + last - 30), e.until)
        shown = replace(e, lo=lo, hi=hi, until=until, turned=np.arange(n) % 2, made={})
        cache.kv = replace(cache.kv, entries=shown)
    pages = cache.on_device(start, last, heads, window)
    q = 3 * torch.randn(2 * last, heads, dim, generator=torch.manual_seed(2))
    _, queries = cache.queries(q, pages)
    expected, found = torch.zeros(2, kv_heads, rows, dtype=torch.int64)
    how = start, Watch(start + since, expected, largest=largest), window, cap * LOG2_E, cache.angles
    weights = exact(cache.kv, queries.q.cpu(), *how)
    on_device = found.to(DEVICE)
    watch = Watch(start + since, on_device, largest=largest)
    add_mass(queries, cache.there, pages, partials_of(weights), watch, start, window, cap, None)
    mine, theirs = on_device.cpu().double() / MASS_UNIT, expected.double() / MASS_UNIT
    assert theirs.sum() > 1
    near = (1e-4, 1e-5) if types in ("f16", "bf16") else (0.02, 1e-3)
    torch.testing.assert_close(mine, theirs, rtol=near[0], atol=near[1])


def test_many_queries_on_one_row_are_counted():
    """More than numbers of 32 bits hold."""
    cache, rows, heads = GpuCache(("f16", "f16"), (64, 64), 1, 64), 600, 8
    cache.append(torch.cat((torch.full((1, 1, 64), 8.0), torch.zeros(rows - 1, 1, 64))), torch.zeros(rows, 1, 64))
    pages = cache.on_device(0, rows, heads)
    _, queries = cache.queries(torch.full((rows, heads, 64), 8.0), pages)
    found = torch.zeros(1, rows, dtype=torch.int64, device=DEVICE)
    norms = 8 * queries.q.cpu().double().sum(2)
    add_mass(queries, cache.there, pages, partials_of(norms), Watch(0, found), 0, 0, 0.0, None)
    assert abs(int(found[0, 0]) / (rows * heads * MASS_UNIT) - 1) < 1e-3 and not found[0, 1:].any()
