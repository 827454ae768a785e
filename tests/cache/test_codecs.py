"""Codecs, sealing and attention over sealed pages: the specification, and the compiled kernels against it.

Pages start full of NaN, so whatever is read beyond what was written shows. Codes of the two backends may differ where
a value lies in the middle between two of them (sums of errors are rounded differently); attention may not, on the same
bytes.
"""

from __future__ import annotations

import functools
import math

import pytest
import torch
from kernelcases import ISAS, backend, native, one_thread, same_bits
from kernelcases import page as page_of
from sealedcases import DIMS, LANES, PAIRS, SEALED, Cache, gaussian, layout

from kvcli.codecs import CODECS
from kvcli.kernels import Backend
from kvcli.kernels.cpu.backend import NativeBackend
from kvcli.kernels.reference import codecs
from kvcli.kernels.reference.codecs.grid import GridCodec, pack_plane, unpack_plane
from kvcli.kernels.reference.fixed import MOST
from kvcli.kernels.reference.rotation import rotate

BACKENDS = (*ISAS, "reference")
GRIDS = tuple(name for name in SEALED if CODECS[name].grid)


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def kept(name: str, rows: torch.Tensor) -> torch.Tensor:
    """rows [heads, n, D] encoded and decoded; the head's scale comes from the same rows."""
    codec = codecs.of(CODECS[name])
    if codec.per_head:
        scales = codec.static_scale(rows)
        return codec.decode(codec.encode(rows, scales), scales, rows.shape[-1])
    data, scales = codec.encode(rows)
    assert data.dtype == torch.uint8 and scales.dtype == torch.float16
    return codec.decode(data, scales, rows.shape[-1])


# --- codecs


@pytest.mark.parametrize("name", SEALED)
@pytest.mark.parametrize("dim", sorted({d for pair in DIMS for d in pair} | {7, 30}))
def test_bytes_and_errors_are_as_specified(name: str, dim: int):
    rows, spec = gaussian(2, 300, dim) * 3, CODECS[name]
    codec = codecs.of(spec)
    data = codec.encode(rows, codec.static_scale(rows)) if codec.per_head else codec.encode(rows)[0]
    assert data.shape == (2, 300, spec.row_bytes(dim))
    assert codec.per_head == bool(spec.static_bytes) != bool(spec.scale_bytes)
    error = float((kept(name, rows) - rows).norm() / rows.norm())
    assert 0.2 * spec.error < error < 1.16 * spec.error  # those of grids are larger for more elements a scale


@pytest.mark.parametrize("name", SEALED)
def test_hostile_rows_stay_finite(name: str):
    rows = gaussian(1, 8, 64)
    rows[0, 0] = 0
    rows[0, 1, 5] = 1e4
    rows[0, 2] = 1e-7
    rows[0, 3] = -65504
    rows[0, 4] = 0
    rows[0, 4, 63] = -1e4
    found = kept(name, rows)
    assert found.isfinite().all()
    assert found[0, 0].abs().max() <= 1e-5
    assert abs(float(found[0, 1, 5]) - 1e4) < 2500 and abs(float(found[0, 4, 63]) + 1e4) < 2500
    alone = kept(name, torch.zeros(1, 4, 64))
    assert alone.isfinite().all() and alone.abs().max() <= 1e-7


@pytest.mark.parametrize(("name", "largest"), [(n, CODECS[n].largest) for n in SEALED if not CODECS[n].grid])
def test_fp8_clamps_what_is_beyond_its_range(name: str, largest: float):
    codec, one = codecs.of(CODECS[name]), torch.ones(1)
    beyond = torch.tensor([[[largest, largest + 1, 464.0, 465.0, 1000.0, 1e9, math.inf, -1e9, -largest * 1.04]]])
    found = codec.decode(codec.encode(beyond, one), one, beyond.shape[-1])
    assert found.isfinite().all() and found.abs().max() == largest
    assert found[0, 0, [0, 1, 5, 6]].tolist() == [largest] * 4 and found[0, 0, 7:].tolist() == [-largest] * 2
    first, later = gaussian(1, 64, 32), gaussian(1, 64, 32) * 1000  # the first page fixes the scale
    scales = codec.static_scale(first)
    assert codec.decode(codec.encode(later, scales), scales, 32).abs().max() <= largest * scales[0]


@pytest.mark.parametrize("bits", (4, 2, 1))
def test_packing_keeps_every_code_in_its_place(bits: int):
    codes = torch.arange(64, dtype=torch.uint8)[torch.randperm(64, generator=torch.manual_seed(1))] % (1 << bits)
    packed = pack_plane(codes, bits)
    assert torch.equal(unpack_plane(packed, bits), codes) and len(packed) == 8 * bits
    fields = packed.view(torch.int16) if bits == 4 else packed  # field j: elements j, j + 16, j + 32, j + 48
    if bits == 1:
        fields = torch.cat((packed & 15, packed >> 4))
    for part in range(4):
        mine = fields.int() >> bits * part & (1 << bits) - 1
        assert torch.equal(mine, codes.int()[16 * part : 16 * part + 16])


@pytest.mark.parametrize("name", GRIDS)
def test_every_code_stands_for_its_level(name: str):
    """All levels of a grid in one row, by their order and reversed."""
    numbers = CODECS[name].numbers
    levels = torch.arange(numbers.lowest, 1 << numbers.bits).float()
    rows = torch.stack((levels, levels.flip(0)))[None] - levels.mean()
    assert torch.equal(kept(name, rows), rows)


@pytest.mark.parametrize("name", GRIDS)
def test_the_search_of_scales_takes_the_best_and_beats_the_largest_element(name: str):
    numbers, rows = CODECS[name].numbers, gaussian(1, 200, 64, seed=3)
    searched = (kept(name, rows) - rows).square().sum(-1)
    errors, factors = [], GridCodec(numbers).factors
    for factor in factors:
        one = GridCodec(numbers)
        one.factors = (factor,)
        errors.append((one.decode(*one.encode(rows), 64) - rows).square().sum(-1))
    assert torch.equal(searched, torch.stack(errors).amin(0)) and factors[0] == 1
    assert numbers.bits > 4 or searched.sum() < 0.93 * errors[0].sum()


def test_the_rotation_is_its_own_inverse_and_keeps_scores():
    for dim in {d for pair in DIMS for d in pair}:
        q, k = gaussian(5, 2, dim), gaussian(5, 2, dim, seed=1)
        assert (rotate(rotate(q)) - q).abs().max() < 1e-5
        assert ((rotate(q) * rotate(k)).sum(-1) - (q * k).sum(-1)).abs().max() < 1e-4
        spike = torch.zeros(1, 1, dim)
        spike[0, 0, 3] = 1.0
        assert rotate(spike).abs().max() == pytest.approx((dim & -dim) ** -0.5)


# --- sealing


def filled(ops: Backend, types: tuple[str, str], dims: tuple[int, int], n: int = 70, **more: int) -> Cache:
    """A cache of n rows with hostile ones among them, in one step."""
    cache = Cache(ops, layout(types, dims, **{"kv_heads": 2, **more}))
    k, v = gaussian(n, 2, dims[0], seed=7), gaussian(n, 2, dims[1], seed=8)
    k = k + gaussian(2, dims[0], seed=9) * 2  # keys have a mean
    if n > 40:
        k[20, 0, 5] = v[21, 1, 3] = 1e4
        k[22], v[23], k[33], v[33] = 0, 0, 0, 0
        k[24], v[25] = k[24] * 1e-8, v[25] * 1e-8
    cache.append(k, v)
    return cache


@functools.cache
def sealed_by_the_reference(types: tuple[str, str], dims: tuple[int, int], tail: int) -> Cache:
    return filled(backend("reference"), types, dims, tail=tail)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_native_sealing_agrees_with_the_reference(dims: tuple[int, int], isa: str):
    """With a tail and without one in turn, so that each pair of types has both for each set of instructions; half of
    the pairs of two types for these dims, and the others for those."""
    ops, at = native(isa), DIMS.index(dims)
    for number, types in enumerate((*((t, t) for t in SEALED), *PAIRS[at // 2 % 2 :: 2]), at):
        tail = number % 2
        caches = filled(ops, types, dims, tail=tail), sealed_by_the_reference(types, dims, tail)
        record = caches[0].kv.record
        for page in range(1, 4):
            found, expected = (c.kv.rows(page_of(c.kv, page), 0, 16) for c in caches)
            for a, b, codec, bits in zip(found, expected, (record.codec_k, record.codec_v), (0, 1), strict=True):
                assert a.isfinite().all() and b.isfinite().all(), (types, page)
                levels = (1 << codec.bits) - 1 - codec.lowest
                step = b.abs().amax(-1, keepdim=True) * (3.1 / levels if codec.grid else 0.13)
                assert ((a - b).abs() <= step + 1e-6).all(), (types, page, bits)
                assert (a != b).double().mean() < 0.02, (types, page, bits)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [name for name in SEALED if not CODECS[name].grid])
def test_native_fp8_has_the_bytes_of_torch_for_every_half(name: str, isa: str):
    """All finite float16 values as keys and values, under several scales of a head."""
    ops, values = native(isa), torch.arange(1 << 16).to(torch.int16).view(torch.float16).float()
    values = values[values.isfinite()]
    rows = torch.zeros(256, 1, 256)
    rows.view(-1)[: len(values)] = values
    for scale in (1.0, 0.0371, 150.0):
        cache = Cache(ops, layout((name, name), (256, 256), size=128))
        kv = cache.seq.reserve([0] * 384).kv(0)
        kv.basis.scale_k = kv.basis.scale_v = torch.tensor([scale])
        kv.basis.known = True
        ops.store(rows, rows, kv, 128)
        ops.seal(kv, 128, 384, None)
        for page in (1, 2):
            expected = codecs.of(CODECS[name]).encode(
                rows[128 * page - 128 : 128 * page, 0][None], torch.tensor([scale])
            )
            for data in kv.slots(page_of(kv, page), 0, 128):
                assert torch.equal(data, expected), (scale, page)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_page_of_equal_or_zero_keys_has_no_nan(name: str):
    """The mean leaves nothing of them, in the first page too, which fixes the basis."""
    ops = backend(name)
    for types in (*((t, t) for t in SEALED), ("int8", "int4")):
        for value in (0.0, 3.0, 1e4, 1e6):
            cache = Cache(ops, layout(types, (64, 64)))
            k = torch.full((50, 1, 64), value)
            cache.append(k, torch.zeros(50, 1, 64))
            out = cache.attend(gaussian(50, 1, 64), 0)
            assert out.isfinite().all() and out.abs().max() < 1e-5, (types, value)


# --- attention

PLACES = ((16, 0, 70), (16, 69, 1), (16, 31, 3), (16, 32, 1), (16, 47, 20), (64, 100, 40), (64, 127, 1), (64, 128, 2))
HEADS = ((2, 2), (6, 2), (4, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_attention_over_sealed_pages(dims: tuple[int, int], name: str):
    """Against float64 over the decoded rows, query by query; and every query alone gives the same bits."""
    ops, types = backend(name), (*((t, t) for t in SEALED), *PAIRS)
    for i, (size, start, n) in enumerate(PLACES):
        pair, (heads, kv_heads) = types[(i + DIMS.index(dims)) % len(types)], HEADS[i % len(HEADS)]
        tail, window, softcap = (i + 1) % 2 if i > 3 else 1, (0, 30)[i % 3 == 2], (0.0, 20.0)[i % 4 == 3]
        cache = Cache(ops, layout(pair, dims, kv_heads, size, tail=tail))
        k, v = gaussian(start + n, kv_heads, dims[0], seed=i), gaussian(start + n, kv_heads, dims[1], seed=i + 50)
        cache.append(k, v)
        q = gaussian(n, heads, dims[0], seed=i + 90)
        found = cache.attend(q, start, window, softcap)
        where = (pair, size, start, n, window, softcap, tail)
        assert (found - cache.dense(q, start, window, softcap)).abs().nan_to_num(torch.inf).max() < 2e-5, where
        for at in {0, n // 2, n - 1}:
            alone = cache.attend(q[at : at + 1], start + at, window, softcap)
            assert same_bits(alone, found[at : at + 1]), (where, at)


@pytest.mark.slow
@pytest.mark.parametrize("types", [(t, t) for t in SEALED] + list(PAIRS), ids="/".join)
def test_both_backends_read_the_same_bytes_alike_and_near_the_truth(types: tuple[str, str]):
    """Sealed by the reference, read by both; and against float64 attention over the rows before they were encoded."""
    cache = filled(backend("reference"), types, (64, 64), 300, size=64)
    q = gaussian(300, 4, 64, seed=2)
    found = [cache.attend(q, 0, ops=ops) for ops in (backend("reference"), native())]
    assert (found[0] - found[1]).abs().max() < 2e-5 * float(found[0].abs().max())
    clean = Cache(backend("reference"), layout(types, (64, 64), 2, 64))
    k, v = gaussian(300, 2, 64, seed=4) + 2 * gaussian(2, 64, seed=5), gaussian(300, 2, 64, seed=6)
    kv = clean.append(k, v)
    turned_q, turned_v = (rotate(q) if kv.rotated[0] else q), (v if not kv.rotated[1] else rotate(v))
    true = Cache(backend("reference"), layout(("f32", "f32"), (64, 64), 2, 64))
    true.append(k, turned_v)
    exact = true.dense(q, 0)
    error = clean.attend(turned_q, 0, ops=native()) - exact
    limit = 0.25 if "int4" in types else 0.08
    assert float(error.norm() / exact.norm()) < limit


def test_sinks_and_the_own_page_are_read_in_16_bits_and_all_others_sealed():
    """Whatever stands in the other form of a page changes nothing."""
    ops = native()
    cache = Cache(ops, layout(("int4", "int4"), (64, 64)))
    kv = cache.append(gaussian(70, 1, 64), gaussian(70, 1, 64, seed=1))
    q = gaussian(6, 2, 64, seed=2)
    before = cache.attend(q, 64)
    assert kv.open is not None
    for page in range(1, 4):  # open pages that were sealed in this step
        kv.open.records(page_of(kv.open, page)).fill_(0xFF)
    assert same_bits(cache.attend(q, 64), before)
    for source, page in ((kv, 1), (kv, 3), (kv.open, 0), (kv.open, 4)):
        saved = source.records(page_of(source, page)).clone()
        source.records(page_of(source, page)).fill_(0x11)
        assert not same_bits(cache.attend(q, 64), before), page
        source.records(page_of(source, page)).copy_(saved)
    assert same_bits(cache.attend(q, 64), before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("type_", ("int8", "int4"))
def test_exact_attention_keeps_queries_as_they_are(type_: str, isa: str):
    """And rounded ones are as near to it as 15 bits are: a score is off by at most half a unit of each dim."""
    native(isa)  # or skips
    q, found = gaussian(70, 6, 128, seed=2), []
    for exact in (True, False):
        ops = NativeBackend(2, isa, exact)
        cache = Cache(ops, layout((type_, type_), (128, 128), 2))
        cache.append(gaussian(70, 2, 128), gaussian(70, 2, 128, seed=1))
        found.append(cache.attend(q, 0))
        assert (found[-1] - cache.dense(q, 0)).abs().max() < 2e-5
    assert cache.in_integers() == (isa in LANES) == (not same_bits(*found))
    k, v = (torch.cat([cache.parts(page, 4, 16)[i] for page in range(4)], 1) for i in (0, 1))
    off = 0.51 / MOST * q.abs().max() * k.abs().sum(-1).max() * 128**-0.5  # of a score; weights: exp of twice that
    assert (found[0] - found[1]).abs().max() <= 2 * (math.exp(2 * off) - 1) * v.abs().max() + 2e-5


def test_threads_change_no_bit():
    results = []
    for threads in (1, 2):
        cache = filled(native("", threads), ("int4", "int8"), (64, 64), 300, size=64)
        q = gaussian(300, 4, 64, seed=2)
        results.append(cache.attend(q, 0))
    assert same_bits(*results)
