"""The mass of attention on a GPU, against that of the reference over the same pages."""

from __future__ import annotations

import pytest
import torch
from gpucases import DEVICE, OPS, GpuCache
from kernelcases import one_thread
from test_gpu_attention import written

from kvcli.kernels import MASS_UNIT, Watch
from kvcli.kernels.gpu.attention import attend
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
