"""Attention on a GPU against float64 over the rows that pages hold; pages are full of NaN where nothing was written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from gpucases import DEVICE, OPS, GpuCache, error, expect_activations
from kernelcases import one_thread

from kvcli.kernels.gpu.attention import Partials, attend, part_count
from kvcli.kernels.gpu.combine import combine, fits_half, quantize
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.wide import HalfRows, weave
from kvcli.kernels.reference.rotation import rotate_
from kvcli.runtime.plan import footprint

LIMIT = 2e-3


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def written(cache: GpuCache, rows: int, last: int = 1, seed: int = 0) -> int:
    """Random rows whose keys have a mean, the `last` ones as a step of their own; returns where that starts."""
    layer, generator = cache.layout.groups[0], torch.manual_seed(seed)
    shape = (rows, layer.kv_heads)
    k = torch.randn(*shape, layer.dim_k, generator=generator) + 2 * torch.randn(layer.dim_k, generator=generator)
    v = torch.randn(*shape, layer.dim_v, generator=generator)
    start = rows - last
    for a, b in ((0, start), (start, rows)):
        if a < b:
            cache.append(k[a:b], v[a:b])
    return start


def check(cache: GpuCache, heads: int, start: int, t: int = 1, window: int = 0, softcap: float = 0.0, splits: int = 2):
    pages = cache.on_device(start, t, heads, window, splits)
    q = torch.randn(t, heads, pages.record.dim_k, generator=torch.manual_seed(start))
    q, queries = cache.queries(q, pages)
    expected = cache.dense(q, start, window, softcap).float()
    if pages.rotated[1]:
        rotate_(expected.view(t, heads, -1))
    partials, parts = attend(queries, pages, window, softcap), part_count(splits, pages.open is not None, False)
    assert partials.out.shape[:2] == (t, heads) and partials.out.shape[3] == pages.record.dim_v
    assert partials.out.shape[2] <= (footprint.PREFILL_PARTS[0] if t > 1 else parts)
    found = combine(partials, pages)
    assert found is not None and error(found, expected) < LIMIT


@pytest.mark.parametrize(("types", "dim"), [(("f16", "f16"), 64), (("int8", "int4"), 128), (("f16", "bf16"), 64)])
def test_results_are_woven_where_they_fit(types, dim):
    cache = GpuCache(types, (dim, dim), 2)
    start = written(cache, 40, 2)
    pages = cache.on_device(start, 2, 4, 0, 2)
    _, queries = cache.queries(torch.randn(2, 4, dim, generator=torch.manual_seed(1)), pages)
    partials = attend(queries, pages, 0, 0.0)
    plain = combine(partials, pages)
    assert plain is not None and fits_half(pages, 4) == ("bf16" not in types)
    woven = combine(partials, pages, woven=True)
    assert woven is not None and torch.equal(woven, weave(HalfRows(plain.half()), 4 * dim).values)
    assert not fits_half(pages, 1) or dim == 128


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "dims", "size"),
    [
        (("f16", "f16"), (128, 128), 32),
        (("f32", "bf16"), (64, 64), 16),
        (("bf16", "f32"), (256, 256), 16),
        (("f16", "f16"), (72, 40), 64),
        (("f16", "f16"), (512, 512), 32),
        (("int8", "int4"), (512, 512), 16),
        (("int4", "int4"), (512, 256), 64),
        (("int4", "int4"), (128, 128), 64),
        (("int4", "int4"), (256, 256), 32),
        (("int8", "int8"), (64, 64), 128),
        (("int8", "int4"), (80, 80), 16),
        (("int4", "int8"), (192, 128), 32),
        (("int6", "int6"), (72, 72), 32),
        (("int5", "int4"), (72, 128), 32),
        (("int8", "int5"), (64, 72), 16),
        (("int6", "f16"), (112, 96), 16),
        (("f16", "int6"), (96, 112), 16),
        (("int8", "f32"), (64, 64), 16),
        (("fp8", "fp8_e5m2"), (128, 64), 32),
        (("fp8_e5m2", "fp8"), (64, 128), 32),
    ],
)
def test_codecs_and_dims(types, dims, size):
    cache = GpuCache(types, dims, 2, size)
    check(cache, 4, written(cache, 2 * size + 37))


@pytest.mark.slow
@pytest.mark.parametrize("types", [("f16", "f16"), ("int4", "int4"), ("fp8", "int8")])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 64, 65, 100])
def test_lengths(types, rows):
    cache = GpuCache(types, (64, 64))
    check(cache, 2, written(cache, rows))


@pytest.mark.slow
@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@pytest.mark.parametrize("types", [("f16", "f16"), ("int4", "int8")])
def test_splits(types, splits):
    cache = GpuCache(types, (64, 64), size=32)
    check(cache, 2, written(cache, 300), splits=splits)


@pytest.mark.parametrize("heads", [1, 3, 4, 8, 16, 24])
def test_groups_of_heads(heads):
    cache = GpuCache(("int8", "int4"), (64, 64))
    check(cache, heads, written(cache, 70))


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 5, 16, 20, 64])
@pytest.mark.parametrize(("types", "tail"), [(("f16", "f16"), 1), (("int4", "int4"), 1), (("fp8_e5m2", "int6"), 0)])
def test_windows(types, tail, window):
    cache = GpuCache(types, (64, 64), tail=tail)
    check(cache, 2, written(cache, 90), window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("sinks", "tail"), [(0, 1), (1, 1), (2, 1), (1, 0), (2, 0), (5, 1), (9, 0)])
@pytest.mark.parametrize("rows", [20, 70])
def test_sinks_and_tails(sinks, tail, rows):
    cache = GpuCache(("int4", "int6"), (64, 64), sinks=sinks, tail=tail)
    check(cache, 2, written(cache, rows))


@pytest.mark.parametrize("types", [("f16", "f16"), ("int4", "int8")])
def test_softcap(types):
    cache = GpuCache(types, (64, 64))
    check(cache, 2, written(cache, 50), softcap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "rows", "t", "heads", "window", "more"),
    [
        (("f16", "f16"), 40, 40, 1, 0, {}),
        (("f16", "f16"), 40, 20, 3, 18, {}),
        (("int4", "int4"), 50, 18, 4, 0, {}),
        (("int8", "int4"), 35, 12, 8, 7, {"size": 32}),
        (("int8", "fp8"), 40, 9, 1, 0, {"tail": 0}),
        (("int4", "f16"), 50, 2, 2, 0, {"sinks": 2}),
        (("int8", "int4"), 300, 40, 4, 0, {"size": 64}),
    ],
)
def test_blocks_of_queries(types, rows, t, heads, window, more):
    cache = GpuCache(types, (64, 64), **more)
    check(cache, heads, written(cache, rows, t), t, window, splits=1)


def test_logits_beside_the_scores():
    """As one more part of every row, which has a weight and no value."""
    cache = GpuCache(("f16", "f16"), (64, 64))
    start = written(cache, 40, 3)
    pages, sinks = cache.on_device(start, 3, 4, splits=1), torch.tensor([0.7, -2.0, 9.0, -60.0])
    q, queries = cache.queries(torch.randn(3, 4, 64, generator=torch.manual_seed(1)), pages)
    expected = OPS.attention(q, cache.kv, start, 0, 0.125, 0.0, cache.angles, None, sinks)
    found = combine(attend(queries, pages), pages, sinks=sinks.to(DEVICE))
    assert found is not None and error(found, expected) < LIMIT
    assert found.view(3, 4, 64)[:, 2].abs().max() < 0.1 * found.view(3, 4, 64)[:, 3].abs().max()


def test_same_bits_again():
    cache = GpuCache(("int4", "int4"), (64, 64))
    pages = cache.on_device(written(cache, 100), heads=4, splits=3)
    _, queries = cache.queries(torch.randn(1, 4, 64), pages)
    first, second = (combine(attend(queries, pages), pages) for _ in range(2))
    assert first is not None and second is not None and torch.equal(first, second)


@pytest.mark.parametrize("parts", [1, 4, 5, 34, 37, 68, 72])
def test_merging_so_many_parts(parts: int) -> None:
    """Also a few more than a power of two; where nothing was seen results may be anything."""
    dim, heads = 64, 3
    numbers = torch.randn(heads, parts, dim + 2, generator=torch.manual_seed(parts))
    out, tops, totals = numbers[..., :dim].clone(), 4 * numbers[..., -1], numbers[..., -2].abs() + 0.1
    out[:, 1::3], totals[:, 1::3] = torch.nan, 0.0
    weights = (tops - tops.amax(1, keepdim=True)).double().exp2()
    seen = totals > 0
    sums = torch.where(seen[..., None], out, 0.0).double().mul(weights[..., None]).sum(1)
    expected = sums / (totals * weights).sum(1, keepdim=True)
    partials = Partials(*(x[None].contiguous().to(DEVICE) for x in (out, tops, totals)))
    pages = SimpleNamespace(lists=SimpleNamespace(apart=False, starts=None), rotated=(False, False))
    found = combine(partials, pages)
    assert found is not None and error(found.view(heads, dim).cpu(), expected.float()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("types", [("int8", "int8"), ("f16", "f16")])
@pytest.mark.parametrize(("dims", "heads"), [((64, 64), 2), ((64, 96), 2), ((72, 72), 4)])
@pytest.mark.parametrize("keep", [False, True])
def test_output_as_the_next_vector(types, dims, heads, keep):
    cache = GpuCache(types, dims)
    pages = cache.on_device(written(cache, 40), heads=heads)
    _, queries = cache.queries(torch.randn(1, heads, dims[0]), pages)
    partials, n = attend(queries, pages), heads * dims[1]
    into, plain = Activations.empty(n, keep, torch.device(DEVICE)), combine(partials, pages)
    assert plain is not None and combine(partials, pages, into) is None
    expect_activations(plain[0], into)


def test_quantize():
    x = torch.randn(288) * torch.logspace(-20, 3, 9).repeat_interleave(32)
    x[32:64] = 0
    x[70], x[71] = -5 * x[64:96].abs().max(), 0
    into = Activations.empty(288, False, torch.device(DEVICE))
    quantize(x[None].to(DEVICE), into)
    expect_activations(x, into)
