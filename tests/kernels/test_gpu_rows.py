"""Preparing queries and rows, and sealing pages, on a GPU, against the operations of the facade in plain torch."""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpucases import DEVICE, OPS, GpuCache, Layer, error, watched  # noqa: F401
from kernelcases import one_thread, record

from kvcli.kernels import PagedKV
from kvcli.kernels.gpu import basis
from kvcli.kernels.gpu.attention import attend
from kvcli.kernels.gpu.combine import combine, quantize
from kvcli.kernels.gpu.launching import collecting
from kvcli.kernels.gpu.pages import check, padded
from kvcli.kernels.gpu.products import Activations
from kvcli.kernels.gpu.rows import LOG2_E, Queries
from kvcli.kernels.gpu.seal import seal, seal_step
from kvcli.kernels.reference.basis import fix_basis
from kvcli.runtime.config import FULL, LayerConfig, ModelConfig
from kvcli.runtime.model.sealing import seal_step as reference_seal_step
from kvcli.runtime.plan import repacked


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


@pytest.mark.parametrize(
    ("types", "dims", "start", "t", "options"),
    [
        (("f16", "f16"), (64, 64), 14, 5, {}),
        (("bf16", "f32"), (80, 72), 31, 2, {"norm": True}),
        (("int4", "int4"), (128, 64), 40, 1, {"norm": True}),
        (("int6", "int8"), (72, 40), 15, 3, {}),
        (("int8", "f16"), (192, 112), 47, 1, {}),
        (("f16", "fp8"), (256, 96), 0, 1, {"norm": True}),
        (("int8", "int8"), (64, 64), 5, 1, {"rope": False}),
        (("int8", "f16"), (64, 64), 21, 2, {"norm": True, "how": {"norms_last": True}}),
        (("int8", "f16"), (72, 64), 21, 2, {"how": {"amplitude": 1.4, "temperature": (0.3, 8, 1)}}),
        (("f16", "f16"), (64, 64), 21, 2, {"rope": False, "how": {"temperature": (0.3, 8, 0)}}),
    ],
)
def test_prepare(types, dims, start, t, options):
    layer = Layer(types, dims, 2, 6, **options)
    cache = layer.cache
    if start:
        cache.append(layer.random(start, 2, dims[0]), layer.random(start, 2, dims[1]))
    layer.step(t)
    if cache.layout.groups[0].codec_k.centred:
        cache.kv.basis.centre = layer.random(2, dims[0])
    cache.angles = cache.rope.centres(cache.kv) if layer.rope else None
    qkv = layer.projections(t)
    made = layer.prepare(qkv, start)
    turned, q, k, v = layer.rows(qkv, start)
    factor = layer.scale * LOG2_E
    assert error(made.q.float(), q * factor) < 4e-4
    if layer.pages.centre is not None:
        check_centre(layer, turned * factor, made, start + t + 7.5)
    found = cache.there.open or cache.there
    expected = Layer(types, dims, 2, 6, **options)
    expected.cache.append(torch.zeros(start + t, 2, dims[0]), torch.zeros(start + t, 2, dims[1]))
    target = expected.cache.kv.open or expected.cache.kv
    page = (start + t - 1) // 16
    OPS.store(k, v, expected.cache.kv, start)
    slots = max(start - 16 * page, 0), start + t - 16 * page
    for a, b in zip(*(kv.slots(kv.into.memory[-1], *slots) for kv in (found, target)), strict=True):
        assert (a.cpu() != b).float().mean() < (0 if DEVICE == "cpu" else 0.01) + 1e-9


@pytest.mark.parametrize("types", [("f16", "f16"), ("int8", "int8")])
def test_projections_in_parts_are_summed(types):
    """To the bit as if they were summed before."""
    found = []
    for apart in (False, True):
        layer = Layer(types, (64, 64), 2, 6, norm=True)
        layer.step(3)
        layer.cache.angles = layer.cache.rope.centres(layer.cache.kv)
        parts = torch.stack([layer.projections(3) for _ in range(3)]).to(DEVICE)
        made = layer.prepare(parts if apart else parts[0] + parts[1] + parts[2], 0)
        page = (layer.cache.there.open or layer.cache.there).into.memory[-1]
        found.append((made.q.cpu(), page.clone().cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)) and found[0][0].any()


def check_centre(layer: Layer, q: torch.Tensor, made: Queries, at: float) -> None:
    """What qc and qb give with the angles of a position: the score of the mean, turned by them."""
    centre = layer.cache.kv.basis.centre[None].clone()
    found = made.qb.cpu().clone()
    if layer.rope:
        cos, sin = (x.half().float() for x in layer.rope.at_positions(np.array([at])))
        OPS.rope_(centre, cos, sin)
        found += made.qc.cpu().float() @ torch.cat((cos, sin), 1)[0]
    expected = (q * centre[0].repeat_interleave(layer.heads // layer.kv_heads, 0)).sum(-1)
    assert error(found, expected) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "dims", "more", "chunks"),
    [
        (("f16", "f16"), (64, 64), {}, (15, 1, 1)),
        (("int4", "int4"), (64, 64), {}, (31, 1, 1)),
        (("int8", "fp8"), (72, 40), {"sinks": 0}, (10, 7, 15)),
        (("int6", "int8"), (64, 64), {"tail": 0}, (17, 1)),
    ],
)
def test_a_layer_step_by_step(types, dims, more, chunks):
    """Prefill and decode, each step's rows written and sealed by the kernels, as the reference does on its own."""
    layer, other = (Layer(types, dims, 1, 2, norm=True, **more) for _ in range(2))
    start = 0
    for t in chunks:
        qkv = layer.projections(t)
        layer.step(t)
        other.step(t)
        _, q, k, v = other.rows(qkv, start)
        kv = other.cache.kv
        OPS.store(k, v, kv, start)
        angles = reference_seal_step(OPS, other.rope, kv, start, start + t)
        expected = OPS.attention(q, kv, start, 0, other.scale, 0.0, angles)
        if kv.rotated[1]:
            OPS.rotate_(expected.view(t, 2, -1))
        cache, mine = layer.cache, layer.cache.kv
        mine.basis.__dict__.update(kv.basis.__dict__)
        cache.angles = cache.rope.centres(mine)
        queries = layer.prepare(qkv, start)
        group = cache.layout.groups[0]
        first, last = (max(group.sealed_rows(n), group.sinks * 16) for n in (start, start + t))
        if mine.open is not None and first < last:
            if t == 1:
                seal_step(layer.pages, by_row=not group.tail)
            else:
                seal(layer.pages, first, last)
        found = combine(attend(queries, layer.pages), layer.pages)
        cache.back()
        assert found is not None and error(found, expected) < 2e-3, start
        for one in (cache, other.cache):
            one.seq.commit([0] * t)
        start += t


@pytest.mark.usefixtures("watched")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("types", "dims", "more"),
    [
        (("int4", "int8"), (128, 128), {}),
        (("int6", "int4"), (72, 40), {}),
        (("int5", "int5"), (72, 64), {}),
        (("fp8", "fp8_e5m2"), (64, 96), {"sinks": 0}),
        (("fp8_e5m2", "fp8"), (80, 64), {"sinks": 2}),
        (("f16", "int4"), (64, 112), {}),
        (("int8", "f32"), (64, 64), {"size": 32}),
        (("int8", "int6"), (64, 64), {"tail": 0}),
    ],
)
@pytest.mark.parametrize("in_step", [False, True])
def test_seal(types, dims, more, in_step):
    """The same bytes as the reference; on a GPU, where sums are made in another order, nearly."""
    sealed = []
    for kernel in (True, False):
        layer = Layer(types, dims, 2, 2, **more)
        cache, group = layer.cache, layer.cache.layout.groups[0]
        n = 3 * group.page_size - (0 if group.tail else 3)
        whole = layer.step(n).kv(0)
        k, v = layer.random(n, 2, dims[0]) * layer.random(dims[0]), layer.random(n, 2, dims[1])
        k[5], v[-4, 0] = 0, 0
        OPS.store(k, v, cache.kv, 0)
        fix_basis(OPS, cache.kv, cache.rope)
        cache.angles = cache.rope.centres(cache.kv)
        first = max(group.sinks * group.page_size, n - group.page_size if group.tail else n - 1)
        if not in_step:
            first = group.sinks * group.page_size
        if kernel:
            if in_step:
                cache.kv = filling_the_last(cache.kv)
                cache.angles = cache.rope.centres(cache.kv)
                seal_step(cache.on_device(n - 1), by_row=not group.tail)
            else:
                seal(cache.on_device(0, n), first, n)
            cache.back()
        else:
            OPS.seal(cache.kv, first, n, cache.angles)
        sealed.append([p for p in whole.into.memory if p is not None])
    assert sealed[0]
    for a, b in zip(*sealed, strict=True):
        assert (a != b).float().mean() <= (0 if DEVICE == "cpu" else 0.01)


@pytest.mark.parametrize(
    ("types", "dims", "more"),
    [
        (("int4", "int8"), (128, 64), {}),
        (("int8", "fp8"), (72, 40), {"size": 32}),
        (("fp8_e5m2", "int6"), (64, 64), {}),
        (("fp8", "bf16"), (80, 64), {}),
    ],
)
def test_what_the_first_page_fixes(types, dims, more):
    """As the reference has it, from the same page."""
    layer = Layer(types, dims, 2, 2, **more)
    cache = layer.cache
    size = cache.layout.groups[0].page_size
    layer.step(size + 3)
    k, v = 1 + layer.random(size + 3, 2, dims[0]), layer.random(size + 3, 2, dims[1])
    k[:4] *= 50
    OPS.store(k, v, cache.kv, 0)
    fix_basis(OPS, cache.kv, cache.rope)
    expected, pages = cache.kv.basis, cache.on_device(0, size + 3)
    found = [None if x is None else torch.full_like(x, torch.nan) for x in (pages.centre, pages.scale_k, pages.scale_v)]
    pages = replace(pages, **dict(zip(("centre", "scale_k", "scale_v"), found, strict=True)))
    basis.fix_basis(pages, cache.rope.frequencies_on(torch.device(DEVICE)))
    for x, y in zip(found, (expected.centre, expected.scale_k, expected.scale_v), strict=True):
        assert (x is None) == (y is None) and (y is None or torch.allclose(x.cpu(), y, rtol=1e-5, atol=1e-5))


def filling_the_last(kv: PagedKV) -> PagedKV:
    """As in a step that writes into the last page alone."""
    classes = []
    for each in kv.classes:
        first = each.into.first + (len(each.into.addresses) - 1) * kv.record.page_size
        into = replace(each.into, first=first, addresses=each.into.addresses[-1:], memory=[each.into.memory[-1]])
        classes.append(replace(each, into=into, entries=replace(each.entries, made={})))
    return replace(classes[0], open=classes[1])


@pytest.mark.parametrize("at", [0, 14, 15, 16, 30])
def test_nothing_is_sealed_before_a_page_is_full(at):
    layer = Layer(("int4", "int8"), (64, 64), 1, 1)
    layer.step(40)
    seal_step(layer.cache.on_device(at))
    layer.cache.back()
    for page in layer.cache.kv.into.memory:
        assert page is None or bool((page == 0xFF).all())


def test_what_the_kernels_refuse():
    layer = Layer(("f16", "f16"), (64, 64), 1, 1)
    layer.step(1)
    with pytest.raises(ValueError, match="no pages to seal"):
        seal(layer.cache.on_device(0), 0, 16)
    with pytest.raises(ValueError, match="multiples of 8"):
        check(GpuCache(("f16", "f16"), (68, 64)).append(torch.zeros(1, 1, 68), torch.zeros(1, 1, 64)).record)
    for dim in (60, 64, 512, 520):  # the plan refuses what the kernels do
        layers = (LayerConfig(FULL, 1, dim, 64),)
        unfit = repacked.unfit(ModelConfig("llama", "", 64, 64, 64, 1, 64, 1e-5, layers, 1.0), {})
        with pytest.raises(ValueError, match="head dims") if unfit else nullcontext():
            check(record(1, dim, 64))
        assert bool(unfit) == (dim in (60, 520))
    assert [padded(d) for d in (8, 64, 72, 128, 192, 512)] == [64, 64, 128, 128, 256, 512]


def test_variants_that_are_collected_hold_no_memory() -> None:
    x, to = torch.randn(1, 64, device=DEVICE), Activations.empty(64, False, torch.device(DEVICE))
    with collecting() as variants:
        quantize(x, to)
        quantize(x, Activations.empty(64, False, torch.device(DEVICE)))
    with collecting() as others:
        quantize(torch.randn(1, 65, device=DEVICE)[:, 1:], to)
    memory = weakref.ref(x)
    del x
    assert len(variants) == len(variants - others) == 1 and memory() is None


def test_other_threads_launch_while_variants_are_collected() -> None:
    x, results = torch.randn(1, 64, device=DEVICE), list[torch.Tensor]()

    def elsewhere() -> None:
        to = Activations.empty(64, False, torch.device(DEVICE))
        to.codes.zero_()
        quantize(x, to)
        results.append(to.codes.clone())

    with collecting() as variants, ThreadPoolExecutor(1) as executor:
        executor.submit(elsewhere).result()
    assert not variants and results[0].any()
